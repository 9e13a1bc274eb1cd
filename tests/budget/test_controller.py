"""The controller, with made-up times and verdicts: no model, no clock."""

import random
import statistics
from itertools import pairwise

import pytest

from hfspec import DraftBudget
from hfspec.budget.controller import Controller
from hfspec.budget.experience import Experience
from hfspec.drafts import Draft
from tests.models import rows
from tests.rounds import finished, outcome


class Machine:
    """A pair and a machine on paper: what a round costs, and how likely each draft token is accepted.

    Args:
        acceptance: probability that a draft token is accepted, given those before it were.
        reading: seconds the draft needs for a call's prompt.
        overhead: seconds a round takes besides.
        moods: acceptances from which each round has one instead.
        draft, verify, wider: seconds of one draft token, of a plain forward, and of one more token in it.
    """

    def __init__(
        self,
        acceptance=0.8,
        draft=0.1,
        verify=1.0,
        wider=0.01,
        seed=0,
        says_confidence=True,
        reading=0.0,
        overhead=0.01,
        moods=(),
    ):
        self.says_confidence, self.reading, self.overhead, self.moods = says_confidence, reading, overhead, moods
        self.acceptance, self.draft, self.verify, self.wider = acceptance, draft, verify, wider
        self.random = random.Random(seed)
        self.experience = Experience()
        self.seconds, self.tokens, self.lengths = 0.0, 0, []

    def forward(self, width: int) -> float:
        return self.verify + self.wider * (width - 1)

    def call(self, num_tokens, budget=DraftBudget(), reads_confidence=False):  # noqa: B008 - frozen
        """Generate so many tokens; return how long each round's draft was."""
        controller = Controller(budget, self.experience, reads_confidence)
        lengths, remaining, is_first = [], num_tokens, True
        while remaining > 0:
            round_budget = controller.next_round([100], 100 + remaining)
            confidences, num_drafted = [], 0
            if self.moods:
                self.acceptance = self.random.choice(self.moods)
            while num_drafted < round_budget.num_tokens:
                num_drafted += 1
                if round_budget.reads_confidence and self.says_confidence:
                    confidences.append(self.random.uniform(0.5, 1) * self.acceptance)
                    if not round_budget.allows_another(confidences[-1]):
                        break
            accepted = 0
            while accepted < num_drafted and self.random.random() < self.acceptance:
                accepted += 1
            judged = min(num_drafted, accepted + 1)
            draft_seconds, verify_seconds = num_drafted * self.draft, self.forward(num_drafted + 1)
            seconds = draft_seconds + verify_seconds + self.overhead
            if is_first and num_drafted:
                draft_seconds, seconds = draft_seconds + self.reading, seconds + self.reading
            draft, caught_up = Draft(rows(*[5] * num_drafted), confidences=tuple(confidences)), 100 if is_first else 0
            is_first = is_first and num_drafted == 0
            verdict = outcome(judged, accepted, accepted + 1)
            times = (draft_seconds, verify_seconds, seconds)
            controller.observe(finished([draft], [verdict], *times, caught_up=caught_up))
            lengths.append(num_drafted)
            self.seconds += seconds
            self.tokens += accepted + 1
            remaining -= accepted + 1
        self.lengths += lengths
        return lengths

    @property
    def speed_up(self) -> float:
        """Against plain decoding on the same machine."""
        return self.tokens * (self.forward(1) + self.overhead) / self.seconds


both_ways = pytest.mark.parametrize("reads_confidence", [False, True], ids=["blind", "reads confidence"])


@both_ways
def test_a_good_cheap_draft_drafts_long(reads_confidence):
    """With cheap, good drafts most rounds draft, several tokens at a time, and it pays."""
    machine = Machine(acceptance=0.9, draft=0.05)
    lengths = machine.call(1000, reads_confidence=reads_confidence)
    later = lengths[len(lengths) // 2 :]
    assert sum(later) / len(later) > 4
    assert machine.speed_up > 2


@both_ways
def test_a_better_draft_drafts_longer(reads_confidence):
    """The length follows the acceptance."""
    means = []
    for acceptance in (0.5, 0.75, 0.95):
        lengths = Machine(acceptance, draft=0.05).call(1500, reads_confidence=reads_confidence)
        later = lengths[len(lengths) // 2 :]
        means.append(sum(later) / len(later))
    assert means[0] < means[1] < means[2]


@both_ways
@pytest.mark.parametrize(
    "machine", [{"acceptance": 0.0}, {"acceptance": 0.3, "draft": 0.9}, {"acceptance": 0.1, "draft": 0.3}]
)
def test_a_hopeless_draft_is_hardly_used(machine, reads_confidence):
    """Promise 3: speculation that does not pay takes a small share of the rounds and of the time."""
    hopeless = Machine(**machine)
    lengths = hopeless.call(3000, reads_confidence=reads_confidence)
    assert sum(length > 0 for length in lengths) / len(lengths) < 0.05
    assert hopeless.speed_up > 0.97


@both_ways
def test_a_hopeless_draft_hardly_reads_prompts(reads_confidence):
    """Where the draft needs long for every prompt, it is not tried again at every prompt."""
    hopeless = Machine(acceptance=0.1, reading=12.0)
    for _ in range(8):
        hopeless.call(64, reads_confidence=reads_confidence)
    assert hopeless.speed_up > 0.945


@both_ways
def test_a_short_answer_does_not_pay_for_a_long_prompt(reads_confidence):
    """What the draft's reading costs is known after the first call: a call that cannot earn it back runs plain."""
    machine = Machine(acceptance=0.9, draft=0.05, reading=12.0)
    machine.call(400, reads_confidence=reads_confidence)
    assert sum(machine.call(10, reads_confidence=reads_confidence)) == 0
    assert sum(length > 0 for length in machine.call(200, reads_confidence=reads_confidence)) > 20


@both_ways
def test_a_gain_too_small_for_the_prompts_is_given_up(reads_confidence):
    """Rounds that pay a little do not make up for long prompts: such a pair costs no more than a few percent."""
    small = Machine(acceptance=0.8, draft=0.3, wider=0.2, reading=24.0)
    for _ in range(20):
        small.call(64, reads_confidence=reads_confidence)
    assert small.speed_up > 0.945


@both_ways
def test_a_small_loss_is_not_held_against_the_next_call(reads_confidence):
    """An answer too short to earn back the prompt's reading says little of a pair: the next call drafts at once."""
    good = Machine(acceptance=0.9, draft=0.05, reading=2.0)
    for _ in range(3):
        good.call(5, reads_confidence=reads_confidence)
    one = good.experience.with_rows(1)
    assert one.tokens_lost > 0
    assert good.call(100, reads_confidence=reads_confidence)[0] > 0


@both_ways
def test_a_call_too_short_for_a_try_is_not_tried(reads_confidence):
    """Where reading the prompt alone would take as long as much of the answer, even a rare try slows that call down."""
    hopeless = Machine(acceptance=0.1, reading=12.0)
    hopeless.call(400, reads_confidence=reads_confidence)
    for _ in range(60):
        assert sum(hopeless.call(20, reads_confidence=reads_confidence)) == 0


@both_ways
def test_a_good_pair_survives_long_prompts(reads_confidence):
    """A gain that pays for the prompts is kept from call to call."""
    good = Machine(acceptance=0.9, draft=0.05, reading=12.0)
    for _ in range(8):
        good.call(128, reads_confidence=reads_confidence)
    assert good.speed_up > 1.6


@both_ways
def test_pauses_double(reads_confidence):
    """Each failed trial is followed by a pause about twice as long, up to a limit."""
    lengths = Machine(acceptance=0.0).call(4000, reads_confidence=reads_confidence)
    pauses, run = [], 0
    for length in lengths:
        if length == 0:
            run += 1
        elif run:
            pauses.append(run)
            run = 0
    grown = [pause for pause in pauses if pause >= 16]
    assert len(grown) >= 4
    for before, after in pairwise(grown):
        assert after == pytest.approx(min(2 * before, 512), abs=before * 0.2)


@both_ways
def test_speculation_comes_back_when_the_text_changes(reads_confidence):
    """A draft that becomes good is found out within one of the longest pauses."""
    machine = Machine(acceptance=0.0, draft=0.05)
    machine.call(3000, reads_confidence=reads_confidence)
    machine.acceptance = 0.95
    machine.call(1200, reads_confidence=reads_confidence)
    lengths = machine.call(300, reads_confidence=reads_confidence)
    assert sum(length > 0 for length in lengths) / len(lengths) > 0.8


@pytest.mark.parametrize(("reads_confidence", "least"), [(False, 0.6), (True, 0.8)], ids=["blind", "reads confidence"])
def test_a_text_of_another_kind_is_soon_found_out(reads_confidence, least):
    """A short answer that the draft is hopeless at, after easy ones: what it accepts itself outweighs the past."""
    speed_ups = []
    for seed in range(20):
        machine = Machine(acceptance=0.95, seed=seed)
        machine.call(1000, reads_confidence=reads_confidence)
        machine.acceptance, machine.seconds, machine.tokens = 0.05, 0.0, 0
        machine.call(40, reads_confidence=reads_confidence)
        speed_ups.append(machine.speed_up)
    assert statistics.geometric_mean(speed_ups) > least


def test_a_source_that_knows_when_it_is_right_pays_where_no_length_does():
    """It is mostly wrong, and says so at once: only how long it was right on average is a bad guide."""
    speed_ups = []
    for seed in range(8):
        moody = Machine(moods=(0.02, 0.02, 0.02, 0.98), draft=0.2, seed=seed)
        moody.call(1500, reads_confidence=True)
        speed_ups.append(moody.speed_up)
    assert statistics.geometric_mean(speed_ups) > 1.5


@both_ways
def test_what_a_round_takes_besides_is_saved_by_every_accepted_token(reads_confidence):
    """With slow processors or streamers a draft pays that would not pay by the forwards alone."""
    machine = Machine(acceptance=0.6, draft=0.9, overhead=3.0)
    machine.call(1000, reads_confidence=reads_confidence)
    assert machine.speed_up > 1.1


def test_what_was_learned_outlives_the_call():
    """A second call starts with the experience of the first: no second set of trials."""
    machine = Machine(acceptance=0.0)
    machine.call(400)
    assert sum(length > 0 for length in machine.call(50)) <= 4


def test_a_good_pair_does_not_wait_in_its_second_call():
    """A second call of a pair that clearly pays drafts at once."""
    machine = Machine(acceptance=0.9, draft=0.05)
    machine.call(400)
    assert machine.call(50)[0] > 0


def test_a_proof_measures_plain_decoding_and_nothing_waits_for_it():
    """The first round drafts; later ones are compared with what the proof's forwards over single tokens took."""
    for is_due, plain_first in ((False, 2), (True, 0)):
        experience = Experience()
        controller = Controller(DraftBudget(), experience, reads_confidence=False)
        budgets = []
        for _ in range(4):
            budget = controller.next_round([100], 200, measures_plain=is_due)
            num = budget.num_tokens
            budgets.append(num)
            proof = [1.0, 1.2] if is_due and num else []
            draft, verdict = Draft(rows(*[5] * num)), outcome(num, num, num + 1)
            controller.observe(finished([draft], [verdict], 0.1 * num, 1.1, 1.1 + 0.1 * num), proof)
            is_due = is_due and not num
        assert [num > 0 for num in budgets] == [False] * plain_first + [True] * (4 - plain_first)
        assert 1 / experience.with_rows(1).plain_rate == pytest.approx(1.1, abs=0.11)


def test_plain_decoding_is_measured_again_now_and_then():
    """What a gain is compared with may change, with the length of the context above all."""
    machine = Machine(acceptance=0.8, draft=0.3)
    assert 2 <= sum(length == 0 for length in machine.call(1500)[10:]) < 20


def test_a_harder_text_is_not_given_up_for_being_slower_than_the_last():
    """Plain decoding is chosen where it is faster than drafting, not where drafting was faster in an easy text."""
    machine = Machine(acceptance=0.98, draft=0.1, wider=0.1)
    machine.call(400, reads_confidence=True)
    one = machine.experience.with_rows(1)
    assert one.speculative_rate > 3 * one.plain_rate
    for each in machine.experience.acceptance.by_depth.values():
        each.value = 0.6
    assert machine.call(20, reads_confidence=True)[1] > 0


def test_a_call_that_is_dearer_throughout_keeps_what_was_learned():
    """A longer context makes every forward dearer alike: the choice of lengths stays, from the second round on."""
    machine = Machine(acceptance=0.8, draft=0.1)
    machine.call(400)
    usual = sum(machine.call(200)) / 200
    machine.draft, machine.verify, machine.wider = 4 * machine.draft, 4 * machine.verify, 4 * machine.wider
    assert sum(machine.call(200)) / 200 == pytest.approx(usual, rel=0.35)


def test_a_fixed_budget_never_moves():
    """The fixed policy asks for its number in every round, but for the call's end."""
    lengths = Machine(acceptance=0.0).call(40, DraftBudget(max_tokens=3, policy="fixed"))
    assert lengths == [3] * 37 + [2, 1, 0]


def test_no_round_drafts_beyond_the_calls_end():
    """A round commits one more than it drafts, so it never drafts all that remains."""
    for policy in ("fixed", "ratio", "measured"):
        budget = DraftBudget(min_tokens=2, max_tokens=8, policy=policy)
        controller = Controller(budget, Experience(), reads_confidence=False)
        for remaining in (1, 2, 3, 20):
            assert controller.next_round([20], 20 + remaining).num_tokens <= remaining - 1


def test_a_length_limit_may_be_unknown():
    """Without a limit on the text only the budget limits a round."""
    controller = Controller(DraftBudget(max_tokens=6, policy="fixed"), Experience(), reads_confidence=False)
    assert controller.next_round([9]).num_tokens == 6


@both_ways
def test_a_least_length_is_kept(reads_confidence):
    """With `min_tokens` speculation is never switched off, however little it brings."""
    budget = DraftBudget(min_tokens=2, max_tokens=8)
    lengths = Machine(acceptance=0.1, draft=0.5).call(300, budget, reads_confidence)
    assert min(lengths[:-3]) >= 2


@both_ways
def test_a_most_length_is_kept(reads_confidence):
    """No round drafts more than `max_tokens`."""
    lengths = Machine(acceptance=1.0, draft=0.01).call(300, DraftBudget(max_tokens=5), reads_confidence)
    assert max(lengths) == 5


class TestRatio:
    """+1 above 0.8 acceptance, −1 below 0.4, within the bounds."""

    def lengths(self, verdicts, **bounds):
        controller = Controller(DraftBudget(policy="ratio", **bounds), Experience(), reads_confidence=False)
        seen = []
        for share in verdicts:
            asked = controller.next_round([9]).num_tokens
            seen.append(asked)
            accepted = round(share * asked)
            draft = Draft(rows(*[5] * asked))
            verdict = outcome(min(asked, accepted + 1), accepted, accepted + 1)
            controller.observe(finished([draft], [verdict], 1.0, 1.0, 2.0))
        return seen

    def test_it_rises(self):
        assert self.lengths([1.0] * 4) == [5, 6, 7, 8]

    def test_it_falls_to_one(self):
        assert self.lengths([0.0] * 7) == [5, 4, 3, 2, 1, 1, 1]

    def test_it_stays_in_between(self):
        assert self.lengths([0.6] * 3) == [5, 5, 5]

    def test_it_keeps_its_bounds(self):
        assert self.lengths([1.0] * 4, max_tokens=6) == [5, 6, 6, 6]
        assert self.lengths([0.0] * 4, min_tokens=4) == [5, 4, 4, 4]

    def test_it_starts_within_its_bounds(self):
        assert self.lengths([0.6], max_tokens=3) == [3]
        assert self.lengths([0.6], min_tokens=9) == [9]


def test_a_source_that_says_no_confidence_gets_a_planned_length():
    """Where wide forwards are dear, a source that would fill any budget is asked for what pays, no more."""
    machine = Machine(acceptance=0.75, draft=0.01, wider=0.4, says_confidence=False)
    machine.call(400, reads_confidence=True)
    machine.lengths.clear()
    assert max(machine.call(200, reads_confidence=True)) <= 3


# Batches


def learned(num_rows=1, acceptance=1.0):
    """A controller whose rows have drafted long enough to know what tokens cost and how many are accepted."""
    experience = Experience()
    controller = Controller(DraftBudget(), experience, reads_confidence=True, num_rows=num_rows)
    for _ in range(40):
        asked = controller.next_round([9] * num_rows).num_tokens
        accepted = round(acceptance * asked)
        draft = Draft(rows(*[5] * asked), confidences=(0.9,) * asked)
        verdict = outcome(min(asked, accepted + 1), accepted, accepted + 1)
        times = (0.01 * asked, 1.0 + 0.01 * asked)
        controller.observe(finished([draft] * num_rows, [verdict] * num_rows, *times, sum(times)))
    return controller, experience


def test_a_long_unread_text_is_read_in_a_plain_round():
    """Where a cache had to go back far, a draft would make a dear forward dearer."""
    controller, _ = learned()
    assert controller.next_round([9], num_unread=4).num_tokens > 0
    assert controller.next_round([9], num_unread=9).num_tokens == 0


def test_rows_go_on_drafting_as_long_as_those_furthest_behind_gain():
    """The last row decides how long the batch takes: what others would still gain is not drafted for."""
    controller, experience = learned(num_rows=2, acceptance=0.5)
    for _ in range(300):
        experience.acceptance.add((0.95, 0.05), num_judged=2, num_accepted=1)
    experience.acceptance.by_depth.clear()
    assert controller.next_round([9, 12]).allows_another(0.95, 0.05)
    assert not controller.next_round([12, 9]).allows_another(0.95, 0.05)
    assert controller.next_round([9, 9]).allows_another(0.95, 0.05)  # neither is behind: their mean counts
    assert not controller.next_round([9, 9]).allows_another(0.05, 0.05)


def test_every_row_is_learned_from_but_rows_in_lock_step_count_once():
    """Rows of their own pace are so many verdicts; rows judged as one are one."""
    drafts, outcomes = [Draft(rows(5, 6))] * 3, [outcome(1, 0, 1), outcome(2, 2, 3), outcome(2, 2, 3)]
    for is_lockstep, count in ((False, 3), (True, 1)):
        experience = Experience()
        controller = Controller(DraftBudget(), experience, reads_confidence=False, num_rows=3)
        controller.next_round([9] * 3)
        controller.observe(finished(drafts, outcomes, 0.1, 1.0, 1.2, is_lockstep))
        assert experience.acceptance.by_depth[1].count == count


def test_the_ratio_follows_the_mean_of_the_rows():
    """One row that accepts nothing lowers the rate of all, but does not decide it."""
    controller = Controller(DraftBudget(policy="ratio"), Experience(), reads_confidence=False, num_rows=4)
    asked = controller.next_round([9] * 4).num_tokens
    outcomes = [outcome(1, 0, 1)] + [outcome(asked, asked, asked + 1)] * 3
    controller.observe(finished([Draft(rows(*[5] * asked))] * 4, outcomes, 1.0, 1.0, 2.0))
    assert controller.next_round([9] * 4).num_tokens == asked
    controller.observe(finished([Draft(rows(*[5] * asked))] * 4, [outcomes[1]] * 4, 1.0, 1.0, 2.0))
    assert controller.next_round([9] * 4).num_tokens == asked + 1


def test_a_row_without_a_draft_is_no_verdict():
    """Of rows that were proposed nothing, nothing is learned."""
    experience = Experience()
    controller = Controller(DraftBudget(), experience, reads_confidence=False, num_rows=2)
    drafts = [Draft(rows(5)), Draft(rows())]
    controller.next_round([9, 9])
    controller.observe(finished(drafts, [outcome(1, 1, 2), outcome(0, 0, 1)], 0.1, 1.0, 1.2))
    assert experience.acceptance.by_depth[1].count == 1
    assert experience.with_rows(2).tokens.value == pytest.approx(1.5)


def test_a_pause_is_for_the_number_of_rows_that_earned_it():
    """Drafts that four rows cannot afford may pay for the one that is left of them, at once; four still do without."""
    controller = Controller(DraftBudget(), Experience(), reads_confidence=False, num_rows=4)

    def a_round(num_rows):
        asked = controller.next_round([9] * num_rows).num_tokens
        accepted = min(asked, 1)
        outcomes = [outcome(min(asked, 2), accepted, accepted + 1)] * num_rows
        draft_seconds, verify_seconds = 0.05 * asked, 1 + (0.01 if num_rows == 1 else 1.5) * asked
        drafts = [Draft(rows(*[5] * asked))] * num_rows
        controller.observe(finished(drafts, outcomes, draft_seconds, verify_seconds, draft_seconds + verify_seconds))
        return asked

    assert [a_round(4) for _ in range(20)][-1] == 0
    assert sum(a_round(1) > 0 for _ in range(10)) >= 9  # one is plain, to compare with
    assert a_round(4) == 0


@pytest.mark.parametrize(("committed", "goes_on"), [((3, 1), False), ((2, 2), True)])
def test_a_batch_that_waits_for_its_last_row_is_no_gain(committed, goes_on):
    """Calls are judged by the row furthest behind, however far ahead another is; later calls know."""
    experience, budget = Experience(), DraftBudget(max_tokens=2)
    controller = Controller(budget, experience, reads_confidence=False, num_rows=2)
    lengths = [100, 100]
    for _ in range(40):
        asked = controller.next_round(lengths).num_tokens
        outcomes = [outcome(min(each, asked), min(each - 1, asked), min(each, asked + 1)) for each in committed]
        drafts = [Draft(rows(*[5] * asked))] * 2
        controller.observe(finished(drafts, outcomes, 0.1 * asked, 1 + 0.1 * asked, 1 + 0.2 * asked))
        lengths = [length + each.num_committed for length, each in zip(lengths, outcomes, strict=True)]
    controller = Controller(budget, experience, reads_confidence=False, num_rows=2)
    assert (controller.next_round(lengths).num_tokens > 0) == goes_on


def test_costs_are_kept_apart_by_rows_at_work():
    """A batch's dear wide forwards are not taken for those of the single row that is left of it."""
    experience = Experience()
    controller = Controller(DraftBudget(max_tokens=4, policy="fixed"), experience, reads_confidence=False, num_rows=8)
    for num_rows, wide in ((8, 3.0), (1, 1.1)):
        for width, seconds in ((1, 1.0), (5, wide)) * 8:
            controller.next_round([9] * num_rows)
            drafts = [Draft(rows(*[5] * (width - 1)))] * num_rows
            controller.observe(finished(drafts, [outcome(0, 0, 1)] * num_rows, 0.1, seconds, seconds + 0.1))
    for num_rows, wide in ((8, 3.0), (1, 1.1), (5, 3.0)):
        forwards = experience.with_rows(num_rows).costs.forwards(5)
        assert forwards[5] == pytest.approx(wide * forwards[1], rel=0.05)
