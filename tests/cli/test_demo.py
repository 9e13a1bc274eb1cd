"""`hfspec demo` compares three methods on the default pair (here: tiny stand-ins), within its time."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from hfspec.cli.demo import LABELS
from hfspec.cli.main import app
from hfspec.config import DraftBudget
from hfspec.weights.packaged import DEFAULT_DRAFT, DEFAULT_TARGET

pytestmark = pytest.mark.usefixtures("stand_ins")


def demo(*options: str) -> str:
    result = CliRunner().invoke(app, ["demo", "--max-new-tokens", "12", "--dtype", "float32", *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def demo_json(*options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(demo("--json", *options))
    return found


def test_three_methods_are_compared_in_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    # Times decide whether drafting pays on models this small; here it is to happen.
    monkeypatch.setattr("hfspec.cli.demo.DraftBudget", lambda: DraftBudget.parse(3))
    lines = demo("--num-prompts", "2").splitlines()
    assert f"target {DEFAULT_TARGET}, draft {DEFAULT_DRAFT}" in lines[0]
    for label in LABELS.values():
        assert any(label in line for line in lines)
    assert any("hfspec" in line and "2 of 2" in line for line in lines)
    assert any("acceptance rate 1.00" in line for line in lines)


def test_the_json_is_that_of_the_benchmark() -> None:
    found = demo_json("--num-prompts", "2")
    assert [item["method"] for item in found["overall"]] == list(LABELS)
    assert found["overall"][-1]["num_identical"] == 2
    assert [row["num_tokens"] for row in found["prompts"]] == [12] * 6
    conditions = found["conditions"]
    assert (conditions["num_prompts"], conditions["dtype"]) == (2, "float32")
    assert conditions["command"].startswith("hfspec")


def test_out_of_time_it_ends_after_a_prompt() -> None:
    found = demo_json("--max-minutes", "0")
    assert found["conditions"]["num_prompts"] == 1
    assert {row["prompt_id"] for row in found["prompts"]} == {"prompt 1"}


def test_a_method_that_refuses_the_pair_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ValueError("not with this pair")

    monkeypatch.setattr("transformers.GenerationMixin._assisted_decoding", refuse)
    assert "HF assisted generation could not run: not with this pair" in demo("--num-prompts", "1")
