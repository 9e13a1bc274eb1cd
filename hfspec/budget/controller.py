"""Chooses, round by round, how many tokens to draft (DESIGN §3D).

One `Controller` serves one call. What it measures goes into the pair's `Experience`, which outlives the call.
"""

from hfspec.budget.cost import Experience
from hfspec.config import DraftBudget
from hfspec.rounds import Draft, Outcome, RoundBudget

#: A pause never grows beyond this many plain tokens, so that speculation comes back when the text changes.
_LONGEST_PAUSE = 512
_FIRST_PAUSE = 16
#: Rounds after a pause (or at first) before speculation is judged by what it brought.
_TRIAL_ROUNDS = 4
#: Most tokens a trial round drafts.
_TRIAL_TOKENS = 4
#: The plain forward's time is measured again after this many rounds with a draft.
_PLAIN_EVERY = 120
#: Where the ratio policy begins a call: Hugging Face's own long-time default.
_RATIO_START = 5


class _WorthwhileBudget(RoundBudget):
    """A budget that ends where drafting on is not expected to pay."""

    def __init__(self, num_tokens: int, experience: Experience) -> None:
        super().__init__(num_tokens, reads_confidence=True)
        self._experience = experience
        self._path = 1.0
        self._num_drafted = 0

    def allows_another(self, confidence: float) -> bool:
        # The token just drafted stays in the draft either way, so stopping here never biases the
        # result (ALGORITHMS B0).
        self._path *= self._experience.acceptance.at_confidence(confidence)
        self._num_drafted += 1
        return is_worth_drafting(self._experience, self._num_drafted, self._path)


def is_worth_drafting(experience: Experience, num_drafted: int, path: float) -> bool:
    """Whether one more draft token is expected to bring more than its time brings otherwise.

    Args:
        num_drafted: tokens drafted so far in this round.
        path: probability that all of them are accepted.

    The time spent on a token is worth the best rate known, plain or speculative, times its cost: the
    stopping rule that maximises tokens per second over many rounds (renewal reward).
    """
    costs = experience.costs
    gain = path * experience.acceptance.at_depth(num_drafted + 1)
    time = costs.draft_token.value + costs.forward(num_drafted + 2) - costs.forward(num_drafted + 1)
    return gain > time * max(experience.plain_rate, experience.speculative_rate)


class Controller:
    """Asks for a budget before each round and learns from it afterwards.

    Args:
        budget: what the user chose.
        experience: what is known about the pair, shared between calls.
        reads_confidence: whether the source's confidence can be read during a round.
    """

    def __init__(self, budget: DraftBudget, experience: Experience, reads_confidence: bool) -> None:
        self._budget = budget
        self._experience = experience
        self._reads_confidence = reads_confidence
        self._ratio_tokens = min(max(_RATIO_START, budget.min_tokens), budget.max_tokens)

    def next_round(self, num_remaining: int | None) -> RoundBudget:
        """The budget of the next round.

        Args:
            num_remaining: tokens the call may still generate; `None` if unlimited. A round commits one
                more than it drafts, so it never drafts that many.
        """
        most = self._budget.max_tokens
        if num_remaining is not None:
            most = min(most, num_remaining - 1)
        if self._budget.policy == "fixed":
            return RoundBudget(most)
        if self._budget.policy == "ratio":
            return RoundBudget(min(most, self._ratio_tokens))
        return self._measured(most)

    def _measured(self, most: int) -> RoundBudget:
        experience = self._experience
        least = min(self._budget.min_tokens, most)
        if least == 0 and self._wants_plain():
            return RoundBudget(0)
        on_trial = experience.rounds_on < _TRIAL_ROUNDS
        most = max(least, min(most, _TRIAL_TOKENS)) if on_trial else most
        if on_trial:
            wanted = most
        elif self._reads_confidence:
            wanted = most if is_worth_drafting(experience, 0, 1.0) else 0
        else:
            wanted = self._best_length(most)
        if wanted == 0 and least == 0 < most:
            self._pause()
        if self._reads_confidence and least == 0 < wanted:
            return _WorthwhileBudget(wanted, experience)
        return RoundBudget(max(least, wanted))

    def _wants_plain(self) -> bool:
        experience = self._experience
        return (
            experience.pause > 0
            or not experience.costs.knows_plain
            or experience.rounds_since_plain >= _PLAIN_EVERY
        )

    def _best_length(self, most: int) -> int:
        """The length with the highest expected tokens per second: the global best, as verify time has steps."""
        best, best_rate = 0, self._experience.plain_rate
        expected, path = 1.0, 1.0
        for length in range(1, most + 1):
            path *= self._experience.acceptance.at_depth(length)
            expected += path
            rate = expected / self._experience.costs.round(length)
            if rate > best_rate:
                best, best_rate = length, rate
        return best

    def observe(
        self,
        draft: Draft,
        outcome: Outcome,
        draft_seconds: float,
        verify_seconds: float,
        round_seconds: float,
    ) -> None:
        """Learn from a finished round."""
        experience = self._experience
        costs = experience.costs
        costs.add_forward(draft.num_tokens + 1, verify_seconds)
        costs.overhead.add(max(0.0, round_seconds - draft_seconds - verify_seconds), clip=True)
        if draft.num_tokens == 0:
            experience.rounds_since_plain = 0
            experience.pause = max(0, experience.pause - 1)
            return
        experience.rounds_since_plain += 1
        experience.acceptance.add(draft.confidences, outcome.num_judged, outcome.num_accepted)
        experience.tokens.add(outcome.num_committed)
        if draft.caught_up == 0:
            costs.draft_token.add(draft_seconds / draft.num_tokens, clip=True)
            experience.seconds.add(round_seconds)
        elif costs.draft_token.count == 0:
            # The first draft also reads the prompt: until one can be timed by itself, this is a fair guess.
            costs.draft_token.value = 0.5 * costs.forward(1)
        self._adapt_ratio(outcome.num_accepted / draft.num_tokens)
        if self._budget.policy == "measured":
            self._judge()

    def _adapt_ratio(self, rate: float) -> None:
        step = 1 if rate > 0.8 else -1 if rate < 0.4 else 0
        low, high = max(1, self._budget.min_tokens), max(1, self._budget.max_tokens)
        self._ratio_tokens = min(max(self._ratio_tokens + step, low), high)

    def _judge(self) -> None:
        """Switch speculation off for a while if it has not paid, for longer each time."""
        experience = self._experience
        experience.rounds_on += 1
        if experience.rounds_on < _TRIAL_ROUNDS:
            return
        if experience.speculative_rate < experience.plain_rate:
            self._pause()
        else:
            experience.next_pause = _FIRST_PAUSE

    def _pause(self) -> None:
        experience = self._experience
        experience.pause = experience.next_pause
        experience.next_pause = min(2 * experience.next_pause, _LONGEST_PAUSE)
        experience.rounds_on = 0
        # The next trial is judged by itself, not by what led to this pause.
        experience.tokens.count = experience.seconds.count = 0
