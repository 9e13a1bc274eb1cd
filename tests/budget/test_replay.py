"""The controller on a real pair's verdicts, which `benchmarks/budget.py` recorded: no model, no clock."""

import random
import statistics

import pytest

from hfspec import DraftBudget
from hfspec.budget.experience import Experience
from tests.scripts import ROOT, benchmark

budget = benchmark("budget")
TEXTS = budget.read(ROOT / "benchmarks" / "results" / "traces.json")


at_every_price = pytest.mark.parametrize(
    "prices", budget.PRICES, ids=lambda prices: f"draft {prices.draft}, wider {prices.wider}, rows {prices.rows}"
)


@at_every_price
def test_choosing_beats_every_fixed_length(prices):
    """No length for all texts is faster, whether drafts are cheap or dear; where little is to gain, none by much.

    Batches have had fewer rounds to find out.
    """
    chosen = statistics.geometric_mean(budget.replay(TEXTS, prices, DraftBudget(), orders=3))
    for length in (1, 2, 5, 16):
        fixed = budget.replay(TEXTS, prices, DraftBudget(max_tokens=length, policy="fixed"), orders=1)
        assert chosen > (0.98 if prices.rows == 1 else 0.96) * statistics.geometric_mean(fixed)


@at_every_price
def test_no_text_is_much_slower(prices):
    """Promise 3, call by call, reading each prompt included; the first call finds out what that costs."""
    found = budget.replay(TEXTS, prices, DraftBudget(), orders=3)
    num_calls = len(TEXTS) // prices.rows
    assert min(speed_up for index, speed_up in enumerate(found) if index % num_calls) > 0.9
    assert min(found) > 0.8


@at_every_price
def test_a_busy_machine_confuses_nobody(prices):
    """Times that are up to seven times too long, for a moment or for a while, lead to nearly the same choices."""
    usual, busy = (replayed(prices, is_busy) for is_busy in (False, True))
    assert busy > 0.92 * usual


def replayed(prices, is_busy):
    return statistics.geometric_mean(budget.replay(TEXTS, prices, DraftBudget(), orders=3, is_busy=is_busy))


def test_a_free_and_perfect_draft_is_bounded_by_its_length():
    """Sixteen tokens a round and the bonus token, once the way is found."""
    perfect = [budget.Text("1", "all right", [True] * 400, [1.0] * 400)]
    (speed_up,) = budget.replay(perfect, budget.Prices(0.0, 0.0, 0.0), DraftBudget(max_tokens=16), orders=1)
    assert 12 < speed_up <= 17


@pytest.mark.parametrize("order", range(4))
def test_batches_of_another_size_are_not_taken_for_those_before(order):
    """Eight rows after four that paid: what they cost is found out in one call, and then they are left alone."""
    experience, prices, texts = Experience(), budget.Prices(draft=0.3, wider=0.08, reading=2.0), list(TEXTS)
    random.Random(order).shuffle(texts)
    for start in range(0, 24, 4):
        budget.speedup(texts[start : start + 4], experience, prices, DraftBudget())
    found = [budget.speedup(texts[start : start + 8], experience, prices, DraftBudget()) for start in (0, 8, 16)]
    assert found[0] > 0.8
    assert min(found[1:]) > 0.97
