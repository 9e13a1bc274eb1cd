"""The ideal speed-up, against sums worked out by hand."""

from collections import Counter

import pytest

from hfspec import Metrics
from hfspec.bench.ideal import Times, ideal_speedup


def _metrics(**counts: object) -> Metrics:
    return Metrics(drafted_by_depth=Counter({1: 100, 2: 80}), accepted_by_depth=Counter({1: 80, 2: 40}), **counts)  # type: ignore[arg-type]


def test_free_drafts_and_flat_verification_give_tokens_per_round() -> None:
    times = Times(plain=1.0, draft=0.0, verify_root=1.0, verify_node=0.0)
    speedup, length = ideal_speedup(_metrics(), times)
    assert length == 2
    assert speedup == pytest.approx(1 + 0.8 + 0.8 * 0.5)


def test_the_best_length_is_chosen() -> None:
    times = Times(plain=1.0, draft=0.5, verify_root=1.0, verify_node=0.0)
    speedup, length = ideal_speedup(_metrics(), times)
    assert length == 1
    assert speedup == pytest.approx(1.8 / 1.5)


def test_a_draft_that_cannot_pay_has_plain_as_its_ideal() -> None:
    times = Times(plain=1.0, draft=1.0, verify_root=1.0, verify_node=0.1)
    assert ideal_speedup(_metrics(), times) == (1.0, 0)


def test_depths_that_were_hardly_ever_judged_say_nothing() -> None:
    metrics = Metrics(drafted_by_depth=Counter({1: 10, 2: 2}), accepted_by_depth=Counter({1: 9, 2: 2}))
    times = Times(plain=1.0, draft=0.0, verify_root=1.0, verify_node=0.0)
    assert ideal_speedup(metrics, times) == (pytest.approx(1.9), 1)


def test_times_are_read_off_the_metrics() -> None:
    metrics = Metrics(
        rounds=10,
        plain_rounds=5,
        drafted_tokens=40,
        draft_seconds=8.0,
        verify_seconds=12.0,
        plain_seconds=5.0,
    )
    times = Times.of(metrics, plain_seconds=1.1)
    assert times == Times(plain=1.1, draft=0.2, verify_root=1.0, verify_node=pytest.approx(0.05))
    assert times.round(4) == pytest.approx(4 * 0.2 + 1.2)


def test_nothing_drafted_gives_no_times() -> None:
    assert Times.of(Metrics(plain_rounds=3, plain_seconds=1.0), plain_seconds=1.0) is None
