"""`hfspec bench` from the command line to its outputs, on a tiny pair."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hfspec.bench.methods import NAMES
from hfspec.cli.bench import bench
from hfspec.errors import HfspecError


@pytest.fixture
def run(pair_folders: tuple[str, str], tmp_path: Path) -> Any:
    """Run the command on the tiny pair; returns its output and its JSON."""
    app = typer.Typer()
    app.command()(bench)
    target, draft = pair_folders

    def invoke(*words: str) -> tuple[str, dict[str, Any]]:
        path = tmp_path / "bench.json"
        fixed = ["--target", target, "--draft", draft, "--dtype", "float32", "--output", str(path)]
        outcome = CliRunner().invoke(app, [*fixed, "--max-new-tokens", "6", *words], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return outcome.output, json.loads(path.read_text())

    return invoke


def test_every_method_is_measured_and_gives_plains_tokens(run: Any) -> None:
    text, found = run("--limit", "2", "--repeats", "2")
    assert [item["method"] for item in found["overall"]] == list(NAMES)
    for item in found["overall"]:
        assert item["num_identical"] == item["num_compared"] == (0 if item["method"] == "plain" else 4)
        assert item["tokens_per_second"] > 0
    assert [row["num_tokens"] for row in found["prompts"]] == [6] * 2 * len(NAMES)
    assert all(0 < row["ttft_seconds"] < row["seconds"] for row in found["prompts"])
    assert found["conditions"]["command"].startswith("hfspec")
    assert found["conditions"]["machine"]["cores"] >= 1
    assert found["peak_rss_bytes"] > 0
    assert "Speed-up by category" in text
    assert "Passing" not in text


def test_the_json_goes_to_standard_output_where_it_is_asked_for(run: Any) -> None:
    text, found = run("--limit", "1", "--methods", "hfspec", "--json")
    assert json.loads(text[text.index("{") :]) == found


def test_the_chart_is_a_picture(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("--limit", "1", "--methods", "hfspec", "--chart", str(tmp_path / "chart.png"))
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_sampled_calls_are_compared_where_the_draws_are_the_same(run: Any) -> None:
    text, found = run("--limit", "1", "--sample", "--methods", "hf-assisted,hfspec", "--budget", "3")
    by_name = {item["method"]: item for item in found["overall"]}
    assert by_name["hf-assisted"]["num_compared"] == 0
    assert by_name["hfspec"]["num_identical"] == by_name["hfspec"]["num_compared"] == 1
    assert "other draws by design" in text


def test_a_random_quantised_draft_goes_to_all_methods(run: Any) -> None:
    _, found = run("--limit", "1", "--draft-int8", "--draft-random", "--methods", "hf-assisted,hfspec", "--budget", "2")
    assert found["conditions"]["draft_kind"] == " (int8, random weights)"
    assert found["not_run"] == {}
    assert all(item["num_identical"] == item["num_compared"] for item in found["overall"])
    speculation = found["overall"][-1]["speculation"]
    assert speculation["acceptance_rate"] < 0.5
    assert sum(speculation["shares"].values()) == pytest.approx(100)


def test_prompts_come_from_a_file(run: Any, tmp_path: Path) -> None:
    entries = [{"question_id": n, "category": f"kind {n % 2}", "turns": ["hello"]} for n in range(4)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    _, found = run("--prompts", str(path), "--limit", "3", "--methods", "hfspec")
    assert [row["prompt_id"] for row in found["prompts"] if row["method"] == "plain"] == ["0", "1", "2"]
    assert found["conditions"]["prompts"] == "prompts.jsonl"


def test_quick_is_one_prompt_of_each_kind_by_three_methods(run: Any) -> None:
    _, found = run("--quick")
    assert [item["method"] for item in found["overall"]] == ["plain", "hf-assisted", "hfspec"]
    assert found["conditions"]["num_prompts"] == 6
    assert len({row["category"] for row in found["prompts"]}) == 6


def test_an_output_that_cannot_be_written_is_found_before_measuring(run: Any, tmp_path: Path) -> None:
    with pytest.raises(HfspecError, match="no folder"):
        run("--output", str(tmp_path / "missing" / "bench.json"))


def test_a_method_that_refuses_the_pair_is_reported(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ValueError("not with this pair")

    monkeypatch.setattr("transformers.GenerationMixin._assisted_decoding", refuse)
    text, found = run("--limit", "1", "--methods", "hf-assisted,hfspec")
    assert found["not_run"] == {"hf-assisted": "not with this pair"}
    assert "hf-assisted could not run: not with this pair" in text
