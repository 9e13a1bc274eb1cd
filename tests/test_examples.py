"""Every example runs, on tiny stand-ins for its models: with drafts, and with plain's results."""

from pathlib import Path

import pytest
import torch

from tests.scripts import ROOT, example

EXAMPLES = ROOT / "examples"
FLOAT32 = {"dtype": "float32"}

pytestmark = pytest.mark.usefixtures("stand_ins")


def run(name, **options):
    """Call an example's `main()`; returns what that returns."""
    return example(name).main(**FLOAT32, **options)


def run_plain(name, monkeypatch, **options):
    """The same with speculation switched off from outside."""
    with monkeypatch.context() as patch:
        patch.setenv("HFSPEC_DISABLE", "1")
        result = run(name, **options)
    assert result[-1].total.drafted_tokens == 0
    return result


def test_every_example_is_tested_short_and_says_how_to_run_it():
    paths = sorted(EXAMPLES.glob("*.py"))
    here = Path(__file__).read_text()
    assert len(paths) >= 5
    for path in paths:
        text = path.read_text()
        assert f'run("{path.stem}"' in here, f"{path.name} is not run here"
        assert f"python examples/{path.name}" in text.split('"""')[1]
        assert len(text.splitlines()) < 60


def test_quickstart(capsys):
    plain, fast, stats = run("quickstart")
    assert torch.equal(plain, fast)
    assert stats.drafted_tokens > 0
    assert stats.fallback_reason is None
    printed = capsys.readouterr().out
    assert "same tokens: True" in printed
    assert "acceptance rate" in printed


def test_pipeline_and_streamer(capsys, monkeypatch):
    answer, stats = run("pipeline_and_streamer", max_new_tokens=40)
    assert stats.accepted_tokens > 0
    assert max(stats.last.budget_histogram) == 5
    printed = capsys.readouterr().out
    assert printed.startswith(answer)
    assert f"40 tokens from {stats.target_forward_passes} forwards" in printed
    assert run_plain("pipeline_and_streamer", monkeypatch, max_new_tokens=40)[0] == answer


def test_sampling_same_seed(capsys):
    (plain, fast), verdict, stats = run("sampling_same_seed")
    assert plain == fast
    assert verdict.identical
    assert stats.drafted_tokens > 0
    assert capsys.readouterr().out.count(plain) == 2
    assert run("sampling_same_seed", seed=8)[0][0] != plain


def test_chat_loop(capsys, monkeypatch):
    ids, stats = run("chat_loop", max_new_tokens=24)
    assert stats.total.calls == 3
    assert stats.total.new_tokens == 72
    assert stats.total.drafted_tokens > 0
    assert not stats.total.fallback_reasons
    assert "> When is it slow?" in capsys.readouterr().out
    assert torch.equal(ids, run_plain("chat_loop", monkeypatch, max_new_tokens=24)[0])


def test_chat_loop_with_typed_questions(monkeypatch):
    questions = iter(["Hello?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(questions))
    _, stats = run("chat_loop", max_new_tokens=8, interactive=True)
    assert stats.total.calls == 1


def test_own_draft_source(monkeypatch):
    ids, stats = run("own_draft_source")
    assert stats.drafted_tokens > 0
    assert stats.fallback_reason is None
    assert run_plain("own_draft_source", monkeypatch)[0] == ids
