"""The report's arithmetic, on runs made up by hand."""

import json

import pytest

from hfspec import Metrics, Verdict
from hfspec.bench.measure import Results, Run
from hfspec.bench.prompts import Prompt
from hfspec.bench.report import Report, build

A, B, C = Prompt("1", "x", "a"), Prompt("2", "x", "b"), Prompt("3", "y", "c")
SAME, NEAR, OTHER = Verdict(True), Verdict(False, 3, 0.1, 0.2, True), Verdict(False, 3, 9.0, 0.2, False)


def _run(method: str, prompt: Prompt, seconds: float, verdict: Verdict | None = None, **more: object) -> Run:
    fields = {
        "repeat": 0,
        "num_tokens": 10,
        "ttft_seconds": 1.0,
        "num_first_tokens": 1,
        "num_prompt_tokens": 5,
    }
    return Run(method, prompt, seconds=seconds, verdict=verdict, **(fields | more))  # type: ignore[arg-type]


def _report(*runs: Run) -> Report:
    return build(Results(list(runs), {"hf-assisted": "refused"}, 1, 0), {"conditions": "here"})


def test_speedups_are_averaged_geometrically_over_prompts() -> None:
    report = _report(
        _run("plain", A, 10.0),
        _run("plain", B, 10.0),
        _run("plain", C, 30.0),
        _run("hfspec", A, 5.0, SAME),
        _run("hfspec", B, 20.0, NEAR),
        _run("hfspec", C, 10.0, OTHER),
    )
    everywhere, x = report.summary("hfspec"), report.summary("hfspec", "x")
    assert x.speedup == pytest.approx(1.0)
    assert everywhere.speedup == pytest.approx((2 * 0.5 * 3) ** (1 / 3))
    assert (everywhere.speedup_worst, everywhere.speedup_median, everywhere.speedup_best) == (0.5, 2.0, 3.0)
    assert everywhere.tokens_per_second == pytest.approx(30 / 35)
    assert (everywhere.num_compared, everywhere.num_identical, everywhere.num_near_ties) == (3, 1, 1)


def test_a_shorter_answer_is_not_a_faster_one() -> None:
    report = _report(_run("plain", A, 10.0), _run("hfspec", A, 5.0, OTHER, num_tokens=5))
    assert report.summary("hfspec").speedup == pytest.approx(1.0)


def test_repeats_count_as_their_median() -> None:
    runs = [_run("plain", A, seconds, repeat=n) for n, seconds in enumerate((10.0, 99.0, 12.0))]
    assert _report(*runs).rows[0].seconds_per_token == pytest.approx(1.2)


def test_shares_add_up_and_achieved_leaves_the_first_token_out() -> None:
    metrics = Metrics(
        new_tokens=10,
        rounds=3,
        drafted_tokens=6,
        accepted_tokens=6,
        prefill_seconds=1.0,
        draft_seconds=1.0,
        verify_seconds=2.0,
        total_seconds=4.5,
        ttft_seconds=1.0,
    )
    report = _report(_run("plain", A, 10.0), _run("hfspec", A, 5.5, SAME, metrics=metrics))
    speculation = report.summary("hfspec").speculation
    assert speculation is not None
    assert sum(speculation.shares.values()) == pytest.approx(100)
    assert speculation.shares["overhead"] == pytest.approx(100 * 1.5 / 5.5)
    assert speculation.overhead_ms_per_token == pytest.approx(50.0)
    assert speculation.achieved == pytest.approx(2.0)


def test_first_tokens_that_come_together_are_not_counted_as_decoded() -> None:
    report = _report(_run("plain", A, 10.0, num_first_tokens=4, ttft_seconds=4.0))
    assert report.rows[0].decode_seconds_per_token == pytest.approx(1.0)


def test_the_report_is_ready_for_json() -> None:
    metrics = Metrics(rounds=1, new_tokens=10)
    metrics.budget_histogram[4] += 1
    report = _report(_run("plain", A, 10.0), _run("hfspec", A, 5.0, NEAR, metrics=metrics))
    again = json.loads(json.dumps(report.to_dict()))
    assert again["not_run"] == {"hf-assisted": "refused"}
    mine = again["prompts"][1]
    assert mine["metrics"]["budget_histogram"] == {"4": 1}
    assert mine["verdicts"][0]["near_tie"] is True
