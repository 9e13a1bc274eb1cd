"""Counts are made in the round and divided when read."""

import copy
import json
import pickle

import pytest
import torch

import hfspec
from hfspec import Draft, Metrics, Stats
from tests.models import RECURRENT, OnForward, Scripted, noisy, plain_text, prompt, rows, shared
from tests.rounds import finished, outcome

NEW = {"max_new_tokens": 24}


def counted() -> Metrics:
    """Three rounds: 4 drafted and 2 accepted, 3 and 3, and a plain one; one prefill."""
    metrics = Metrics(
        calls=1, speculative_calls=1, prefills=1, prefill_seconds=0.5, ttft_seconds=0.6, new_tokens=9, steps=8
    )
    metrics.count_round(finished([Draft(rows(1, 2, 3, 4))], [outcome(3, 2, 3)], 0.4, 1.0, caught_up=3))
    metrics.count_round(finished([Draft(rows(1, 2, 3))], [outcome(3, 3, 4)], 0.2, 1.2))
    metrics.count_round(finished([Draft(rows())], [outcome(0, 0, 1)], 0.0, 0.9))
    metrics.total_seconds = 4.6
    return metrics


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rounds", 2),
        ("plain_rounds", 1),
        ("drafted_tokens", 7),
        ("accepted_tokens", 5),
        ("acceptance_rate", 5 / 7),
        ("acceptance_by_depth", {1: 1.0, 2: 1.0, 3: 0.5}),
        ("tokens_per_round", 3.5),
        ("rollback_rate", 0.5),
        ("target_forward_passes", 4),
        ("target_forward_passes_saved", 5),
        ("draft_latency_ms", 200 / 3),
        ("verify_latency_ms", 1100.0),
        ("overhead_seconds", 4.6 - 0.5 - 0.4 - 0.2 - 1.0 - 1.2 - 0.9),
        ("ttft_ms", 600.0),
        ("tpot_ms", 500.0),
        ("budget_histogram", {4: 1, 3: 1, 0: 1}),
        ("fallback_reason", None),
    ],
)
def test_arithmetic(name, value):
    """Each rate is its definition's quotient."""
    assert getattr(counted(), name) == pytest.approx(value)


def test_nothing_counted_has_no_rates():
    """Where there is nothing to divide by, a rate is `None`, and the table prints."""
    empty = Metrics()
    for name in ("acceptance_rate", "tokens_per_round", "rollback_rate", "draft_latency_ms", "ttft_ms", "overhead_ms"):
        assert getattr(empty, name) is None
    assert empty.acceptance_by_depth == {}
    assert "–" in str(Stats(empty, empty))


def test_adding_adds_counts_not_rates():
    """Totals are sums; their rates are those of the sums."""
    total = counted()
    other = Metrics(calls=1)
    other.count_round(finished([Draft(rows(1))], [outcome(1, 0, 1)], 0.1, 1.0))
    other.fallback_reasons["why"] += 2
    total.add(other)
    assert (total.calls, total.drafted_tokens, total.accepted_tokens) == (2, 8, 5)
    assert total.acceptance_by_depth[1] == pytest.approx(2 / 3)
    assert total.fallback_reason == "why"
    assert other.drafted_tokens == 1


def test_the_commonest_reason_is_the_reason():
    """With several reasons the most frequent is shown, and all are kept."""
    metrics = Metrics()
    metrics.fallback_reasons.update({"rare": 1, "common": 3})
    assert metrics.fallback_reason == "common"


def test_a_dict_for_json():
    """`to_dict` has every count and every rate and survives JSON."""
    as_dict = json.loads(json.dumps(Stats(counted(), Metrics()).to_dict()))
    assert as_dict["last"]["acceptance_rate"] == pytest.approx(5 / 7)
    assert as_dict["last"]["drafted_tokens"] == 7
    assert as_dict["total"]["tokens_per_round"] is None


def test_stats_read_the_last_call():
    """Any metric read on `Stats` is the last call's; others raise as attributes do."""
    stats = Stats(last=counted(), total=Metrics())
    assert stats.accepted_tokens == 5
    with pytest.raises(AttributeError, match="zebra"):
        stats.zebra  # noqa: B018 - reading it is the test
    assert pickle.loads(pickle.dumps(stats)) == copy.deepcopy(stats) == stats


def test_the_table():
    """Printed, it is a table of both, with the reasons for plain decoding below."""
    metrics = counted()
    metrics.fallback_reasons["beam search is not sped up yet"] += 1
    printed = str(Stats(metrics, metrics))
    for piece in ("last call", "all calls", "5 / 7", "0.71", "3.50", "ran plain 1×: beam search"):
        assert piece in printed
    assert max(map(len, printed.splitlines())) <= 88


def test_a_call_counts_what_happened():
    """The numbers of a real call agree with what its source saw, and with the text's length."""
    script = Scripted(plain_text(shared(), prompt(), **NEW), [3, 0, 2])
    with hfspec.patched(shared(), script, draft_budget=4):
        shared().generate(prompt(), **NEW)
        last = hfspec.stats(shared()).last
    assert last.new_tokens == 24
    assert last.drafted_tokens == sum(map(len, script.drafts))
    assert last.rounds == sum(len(draft) > 0 for draft in script.drafts)
    assert last.accepted_tokens <= sum(outcome.num_accepted for outcome in script.outcomes)
    assert last.prefills + last.plain_rounds + last.committed_tokens == 24
    assert last.target_forward_passes + last.target_forward_passes_saved == 24
    assert sum(last.budget_histogram.values()) == last.rounds + last.plain_rounds
    assert 0 < last.ttft_seconds <= last.total_seconds


@pytest.mark.skipif(not RECURRENT, reason="this release cannot go on from a state")
def test_the_forward_that_completes_a_cache_is_counted():
    """A state that went back to a checkpoint is brought up to the text for the user: one forward more."""
    model, forwards = shared("mamba2"), []

    def amid_a_draft(input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 17)

    with hfspec.patched(model, Scripted(plain_text(model, prompt(), **NEW), [9]), draft_budget=4):
        handle = OnForward(model, after=lambda *_: forwards.append(1))
        model.generate(prompt(), return_dict_in_generate=True, stopping_criteria=[amid_a_draft], **NEW)
        handle.remove()
        last = hfspec.stats(model).last
    assert last.target_forward_passes == len(forwards)
    assert last.catch_ups == 1


def test_plain_rounds_have_their_reasons():
    """Whoever sees no speed-up can see why: each round without a draft says so."""
    hopeless = Scripted(plain_text(shared(), prompt(), max_new_tokens=40), [0])
    with hfspec.patched(shared(), hopeless):
        for _ in range(3):
            shared().generate(prompt(), max_new_tokens=40)
        stats = hfspec.stats(shared())
    assert stats.last.plain_reasons.total() == stats.last.plain_rounds
    assert "did not pay" in max(stats.last.plain_reasons, key=stats.last.plain_reasons.get)
    assert "plain rounds" in str(stats)


def test_reasons_that_differ_in_every_call_do_not_pile_up():
    """Errors that name sizes or addresses are summed up; the total stays right."""
    metrics = Metrics()
    for number in range(500):
        metrics.fallback_reasons["a common one"] += 1
        metrics.fallback_reasons[f"object at {number}"] += 1
        metrics.forget_rare_reasons()
    assert len(metrics.fallback_reasons) <= 50
    assert metrics.fallback_reasons.total() == 1000
    assert metrics.fallback_reason == "a common one"


def test_calls_add_up():
    """The total is the sum over calls; a new patch begins anew."""
    with hfspec.patched(shared(), noisy(), draft_budget=3):
        for _ in range(3):
            shared().generate(prompt(), **NEW)
        shared().generate(prompt(), speculate=False, **NEW)
        stats = hfspec.stats(shared())
        assert (stats.total.calls, stats.total.speculative_calls, stats.total.new_tokens) == (4, 3, 96)
        assert (stats.last.calls, stats.last.drafted_tokens) == (1, 0)
    with hfspec.patched(shared(), noisy()):
        assert hfspec.stats(shared()).total.calls == 0
