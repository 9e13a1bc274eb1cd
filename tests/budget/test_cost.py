"""What is remembered of costs and acceptance."""

import pytest

from hfspec.budget.cost import Acceptance, Average, Costs, Experience, Seconds


def test_an_average_begins_as_the_mean():
    """The first values count alike."""
    average = Average(weight=0.1)
    for value in (1.0, 2.0, 6.0):
        average.add(value)
    assert average.value == pytest.approx(3.0)


def test_an_average_forgets():
    """Later values count by their weight, so old ones fade."""
    average = Average(weight=0.1)
    for value in [1.0] * 100 + [5.0] * 100:
        average.add(value)
    assert average.value == pytest.approx(5.0, abs=0.01)


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
    """Before the first measurement times are 0 and rates unknown, not errors."""
    assert Costs().forwards(5) == [0.0] * 6
    assert Costs().forwards(3) == [0.0] * 4
    assert Experience().plain_rate == 0.0
    assert Experience().speculative_rate == 0.0


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


def test_another_number_of_rows_begins_with_what_the_last_one_cost():
    """In proportion to its first plain forward, and going back finds the old costs."""
    experience = Experience()
    experience.set_rows(1)
    for width, seconds in ((1, 1.0), (1, 1.0), (4, 1.3)):
        experience.costs.add_forward(width, seconds)
    one = experience.costs
    experience.set_rows(2)
    assert experience.costs.needs_plain
    experience.costs.add_forward(1, 3.0)
    assert experience.costs.pace == pytest.approx(3.0)
    experience.costs.add_forward(8, 6.0)
    assert experience.costs.forwards(8)[8] == pytest.approx(2 * experience.costs.forwards(8)[1])
    experience.set_rows(1)
    assert experience.costs is one
    assert one.pace == 1.0


@pytest.mark.parametrize(("some", "others"), [(3, 4), (5, 8), (9, 16)])
def test_batches_of_about_one_size_share_their_costs(some, others):
    """Rows that leave one by one do not each make a new start."""
    experience = Experience()
    experience.set_rows(some)
    costs = experience.costs
    experience.set_rows(others)
    assert experience.costs is costs
    experience.set_rows(others + 1)
    assert experience.costs is not costs


def test_acceptance_is_kept_by_depth():
    """Depths are judged only as far as the walk came, and little-seen ones borrow the mean."""
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.add((), num_judged=2, num_accepted=1)
    assert acceptance.at_depth(1) == pytest.approx(1.0, abs=0.02)
    assert acceptance.at_depth(2) == pytest.approx(0.0, abs=0.02)
    assert acceptance.at_depth(9) == pytest.approx(0.5, abs=0.05)


def test_acceptance_is_kept_by_confidence():
    """Sure tokens and unsure ones are counted apart."""
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.add((0.95, 0.05), num_judged=2, num_accepted=1)
    assert acceptance.at_confidence(0.95) > 0.95
    assert acceptance.at_confidence(0.05) < 0.05
    assert acceptance.at_confidence(0.7) == Acceptance().at_confidence(0.7)


def test_sure_tokens_and_surer_ones_are_counted_apart():
    """A draft of sixteen tokens stands or falls with whether each is accepted 95 or 99 times of 100."""
    acceptance = Acceptance()
    for index in range(300):
        acceptance.add((0.95,), num_judged=1, num_accepted=int(index % 5 > 0))
        acceptance.add((0.995,), num_judged=1, num_accepted=1)
    assert acceptance.at_confidence(0.95) == pytest.approx(0.8, abs=0.1)
    assert acceptance.at_confidence(0.995) > 0.99


def test_before_anything_is_known_a_surer_token_is_likelier():
    acceptance = Acceptance()
    expected = [acceptance.at_confidence(each) for each in (0.0, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0)]
    assert expected == sorted(set(expected))
    assert 0.2 < expected[0] < expected[-1] < 1


@pytest.mark.parametrize("confidence", [-1.0, 0.0, 1.0, 7.0, float("nan")])
def test_any_confidence_has_a_place(confidence):
    """Confidences at and beyond the ends of 0 … 1 are no error."""
    assert 0 <= Acceptance().at_confidence(confidence) <= 1
