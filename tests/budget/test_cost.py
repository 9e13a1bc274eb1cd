"""What is remembered of costs."""

import pytest

from hfspec.budget.cost import Costs, Seconds


def test_a_burst_of_slow_times_is_not_believed():
    """Stretches in which another process had the machine do not spoil what is known."""
    seconds = Seconds()
    for value in [1.0] * 20 + [50.0] * 10:
        seconds.add(value)
    assert seconds.value == pytest.approx(1.0)


def test_a_lasting_change_of_time_is_believed():
    """When something becomes dearer or cheaper for good, the time known follows."""
    seconds = Seconds()
    for value in [1.0] * 50 + [3.0] * 50 + [0.5] * 50:
        seconds.add(value)
    assert seconds.value == pytest.approx(0.5)
    assert seconds.count == 150


def test_forward_times_are_interpolated_between_widths():
    """At measured widths as measured, between them on the line, below the least as the least."""
    costs = Costs()
    costs.add_forward(2, 1.0)
    costs.add_forward(6, 3.0)
    assert costs.forwards(6)[1:] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.5, 3.0])


def test_forward_times_beyond_the_widest_hardly_grow():
    """Beyond the widest measured, no steep slope is made up: the true curve has steps."""
    costs = Costs()
    costs.add_forward(1, 1.0)
    costs.add_forward(2, 2.0)
    assert 2.0 < costs.forwards(10)[10] < 2.4


def test_nothing_measured_costs_nothing():
    """Before the first measurement times are 0, not errors."""
    assert Costs().forwards(5) == [0.0] * 6
    assert Costs().forwards(3) == [0.0] * 4


def test_a_round_costs_its_parts():
    """Draft tokens, one forward a token wider, and the loop."""
    costs = Costs()
    costs.add_forward(1, 1.0)
    costs.add_forward(4, 1.3)
    costs.draft_token.add(0.2)
    costs.add_overhead(0.05)
    assert costs.rounds(3) == pytest.approx([1.05, 1.35, 1.65, 1.95])


def test_a_round_costs_more_behind_a_longer_unread_text():
    """Committed tokens that must be read too widen the forward; the draft costs the same."""
    costs = Costs()
    costs.add_forward(1, 1.0)
    costs.add_forward(5, 1.4)
    costs.draft_token.add(0.2)
    assert costs.rounds(2, num_unread=3) == pytest.approx([1.2, 1.5, 1.8])
    assert costs.rounds(2)[0] == pytest.approx(1.0)


def test_what_was_measured_in_a_slow_hour_compares_with_what_was_measured_before():
    """Another process, or a longer context, makes everything dearer, about alike: what is known stays true."""
    costs = Costs()
    for _ in range(10):
        costs.add_forward(1, 1.0)
        costs.add_draft(2, 0.4)
    for _ in range(10):
        costs.add_forward(1, 3.0)
        costs.add_draft(2, 1.2)
    assert costs.pace == pytest.approx(3.0)
    costs.add_forward(8, 3.6)  # never measured before
    assert costs.forwards(8)[8] == pytest.approx(1.2 * costs.forwards(8)[1])
    assert costs.draft_token.value == pytest.approx(0.2 * costs.forwards(8)[1])


def test_a_single_slow_forward_is_no_change_of_pace():
    costs = Costs()
    for _ in range(10):
        costs.add_forward(1, 1.0)
    costs.add_forward(1, 9.0)
    assert costs.pace == 1.0


def test_what_was_guessed_tells_no_pace():
    """The first draft's price is a guess, as it also reads the prompt; it must not colour what is measured next."""
    costs = Costs()
    costs.add_forward(1, 1.0)
    costs.draft_token.value = 0.5
    costs.add_draft(1, 0.05)
    assert costs.pace == 1.0
    assert costs.draft_token.value == pytest.approx(0.05)


def test_a_plain_forward_is_wanted_twice_at_first():
    costs = Costs()
    for _ in range(2):
        assert costs.needs_plain
        costs.add_forward(1, 1.0)
    assert not costs.needs_plain
