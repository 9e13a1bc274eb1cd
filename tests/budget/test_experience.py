"""What is remembered of a pair: acceptance, and what batches of each size bring."""

import pytest

from hfspec.budget.experience import Acceptance, Average, BatchExperience, Experience


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


def test_before_the_first_round_rates_are_unknown():
    """0, not an error."""
    assert BatchExperience().plain_rate == 0.0
    assert BatchExperience().speculative_rate == 0.0


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


# Batches


def test_another_number_of_rows_begins_with_what_the_last_one_cost():
    """In proportion to its first plain forward, and going back finds the old costs."""
    experience = Experience()
    one = experience.with_rows(1).costs
    for width, seconds in ((1, 1.0), (1, 1.0), (4, 1.3)):
        one.add_forward(width, seconds)
    two = experience.with_rows(2).costs
    assert two.needs_plain
    two.add_forward(1, 3.0)
    assert two.forwards(4)[1] == pytest.approx(3.0)
    assert two.forwards(4)[4] == pytest.approx(3.9)
    two.add_forward(4, 6.0)
    two.add_forward(8, 6.0)
    assert two.forwards(8)[4] == two.forwards(8)[8] == pytest.approx(2 * two.forwards(8)[1])
    assert experience.with_rows(1).costs is one
    assert one.pace == 1.0


def test_another_number_of_rows_expects_what_the_last_one_gained():
    """Until it has rounds of its own; what it then learns is no news about the other."""
    experience = Experience()
    four = experience.with_rows(4)
    four.costs.add_forward(1, 1.0)
    for _ in range(50):
        four.tokens.add(1.5)
        four.seconds.add(1.2)
    eight = experience.with_rows(8)
    assert eight.speculative_rate == pytest.approx(four.speculative_rate)
    for _ in range(20):
        eight.tokens.add(1.5)
        eight.seconds.add(3.0)
    assert eight.speculative_rate == pytest.approx(0.5, rel=0.1)
    assert four.speculative_rate == pytest.approx(1.25)


@pytest.mark.parametrize(("some", "others"), [(3, 4), (5, 8), (9, 16)])
def test_batches_of_about_one_size_share_what_is_known(some, others):
    """Rows that leave one by one do not each make a new start."""
    experience = Experience()
    batch = experience.with_rows(some)
    assert experience.with_rows(others) is batch
    assert experience.with_rows(others + 1) is not batch
