"""Chooses, round by round, how many tokens to draft (DESIGN §3D).

One `Controller` serves one call. What it measures goes into the pair's `Experience`, which outlives the call.
"""

from hfspec.budget.cost import Experience
from hfspec.config import DraftBudget
from hfspec.rounds import Round, RoundBudget

#: Rounds that feel the way, at first and after a pause, and rounds after them before what they brought is judged.
_TRIAL_ROUNDS, _JUDGED_ROUNDS = 4, 6
#: Plain rounds after speculation was found not to pay: twice as many each time, up to the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512
#: Share of the time that tries which do not pay may cost, the draft's reading of a long prompt included.
_BEARABLE_LOSS = 0.03
#: Share of a call's time that a try is hoped to save, where nothing is known of what it will.
_HOPED_GAIN = 0.2
#: The target's forward over a single token is measured again after so many rounds.
_PLAIN_EVERY = 60
#: Committed tokens that a cache which had to go back may still have to read; beyond, a plain round reads them.
_MOST_UNREAD = 8
#: Where the ratio policy begins a call: Hugging Face's own long-time default.
_RATIO_START = 5


class _Prospects:
    """What drafting further is expected to bring in one round, at the costs and acceptance known at its start."""

    def __init__(self, experience: Experience, max_tokens: int, num_unread: int) -> None:
        self._acceptance = experience.acceptance
        self._seconds = experience.costs.rounds(max_tokens, num_unread)
        self._max_tokens = max_tokens
        # The time spent is worth what the best known way of decoding makes of it: the stopping rule that
        # maximises tokens per second over many rounds (renewal reward).
        self._rate = max(experience.plain_rate, experience.speculative_rate)

    def are_good(self, num_drafted: int, path: float) -> bool:
        """Whether some number of further tokens brings more than its time is worth.

        Args:
            num_drafted: tokens drafted so far in this round.
            path: probability that all of them are accepted.

        All numbers are looked at, not only the next, as the time of a forward rises in steps.
        """
        gain = 0.0
        for length in range(num_drafted + 1, self._max_tokens + 1):
            path *= self._acceptance.at_depth(length)
            gain += path
            if gain > self._rate * (self._seconds[length] - self._seconds[num_drafted]):
                return True
        return False

    def best_length(self) -> int:
        """The number of tokens with the highest expected tokens per second, 0 included."""
        if not self._seconds[0]:
            return 0  # nothing is known yet
        best, best_rate = 0, 1 / self._seconds[0]
        expected, path = 1.0, 1.0
        for length in range(1, self._max_tokens + 1):
            path *= self._acceptance.at_depth(length)
            expected += path
            if expected > best_rate * self._seconds[length]:
                best, best_rate = length, expected / self._seconds[length]
        return best


class _WorthwhileBudget(RoundBudget):
    """A budget that ends where drafting on is not expected to pay, given the confidences so far.

    Rows that share forwards go on together, as long as the mean of them gains.
    """

    def __init__(self, num_tokens: int, prospects: _Prospects, experience: Experience, num_rows: int) -> None:
        super().__init__(num_tokens, reads_confidence=True)
        self._prospects = prospects
        self._acceptance = experience.acceptance
        self._paths = [1.0] * num_rows
        self._num_drafted = 0

    def allows_another(self, *confidences: float) -> bool:
        # The token just drafted stays in the draft either way, so stopping here never biases the
        # result.
        self._paths = [
            path * self._acceptance.at_confidence(each) for path, each in zip(self._paths, confidences, strict=True)
        ]
        self._num_drafted += 1
        return self._prospects.are_good(self._num_drafted, sum(self._paths) / len(self._paths))


class Controller:
    """Asks for a budget before each round and learns from it afterwards.

    Args:
        budget: what the user chose.
        experience: what is known about the pair, shared between calls.
        reads_confidence: whether the source's confidence can be read during a round. Where it cannot, the
            length is planned before the round.
        num_rows: rows at work at first.
    """

    def __init__(self, budget: DraftBudget, experience: Experience, reads_confidence: bool, num_rows: int = 1) -> None:
        self._budget = budget
        self._experience = experience
        self._reads_confidence = reads_confidence
        self._asked_confidence = False
        self._num_rows, self._num_unread = num_rows, 1
        self._ratio_tokens = min(max(_RATIO_START, budget.min_tokens), budget.max_tokens)
        self._may_pause = budget.policy == "measured" and budget.min_tokens == 0
        self._has_read_prompt = False
        with experience.lock:
            experience.set_rows(num_rows)
            if self._may_pause:
                self._look_back()
            experience.begin_call()

    def next_round(
        self, num_remaining: int | None, num_rows: int = 1, num_unread: int = 1, length: int = 0
    ) -> RoundBudget:
        """The budget of the next round.

        Args:
            num_remaining: tokens the call may still generate; `None` if unlimited. A round commits one
                more than it drafts, so it never drafts that many. At 0 or less (a text that goes on beyond
                the target's positions) rounds are plain.
            num_rows: rows at work.
            num_unread: committed tokens a row that the target has to read besides the draft.
            length: of the text, which a source that was not asked before in this call has to read.
        """
        with self._experience.lock:
            return self._next_round(num_remaining, num_rows, num_unread, length)

    def _next_round(self, num_remaining: int | None, num_rows: int, num_unread: int, length: int) -> RoundBudget:
        self._experience.set_rows(num_rows)
        self._num_rows, self._num_unread = num_rows, num_unread
        if num_unread > _MOST_UNREAD:
            return RoundBudget(0)
        most = self._budget.max_tokens
        if num_remaining is not None:
            most = max(0, min(most, num_remaining - 1))
        if self._budget.policy == "fixed":
            return RoundBudget(most)
        if self._budget.policy == "ratio":
            return RoundBudget(min(most, self._ratio_tokens))
        if self._may_pause and (self._wants_plain() or not self._can_earn(num_remaining, length)):
            return RoundBudget(0)
        return self._measured(least=min(self._budget.min_tokens, most), most=most)

    def _can_earn(self, num_remaining: int | None, length: int) -> bool:
        """Whether the tokens that are left may earn back what the source's reading of the text so far will cost."""
        experience = self._experience
        if self._has_read_prompt or num_remaining is None:
            return True
        reading = experience.costs.reading.value * length * experience.plain_rate
        is_hoped = reading <= _HOPED_GAIN * num_remaining
        rate = experience.speculative_rate
        if not experience.rounds_on or not rate:
            return is_hoped
        will = reading <= (1 - experience.plain_rate / rate) * num_remaining
        if is_hoped and not will:
            self._pause()  # what drafting brings is too little, as far as is known: look again after a while
        return will

    def _measured(self, least: int, most: int) -> RoundBudget:
        experience = self._experience
        self._asked_confidence = False
        if most == 0:
            return RoundBudget(0)
        on_trial = least == 0 and experience.rounds_on < _TRIAL_ROUNDS
        if on_trial:  # feel the way: one token at least, and each trial round may draft one more
            most = min(most, experience.rounds_on + 1)
        prospects = _Prospects(experience, most, self._num_unread)
        if self._reads_confidence and experience.gives_confidence and least == 0:
            # How far to go is found on the way: what stopping early brought before may pass what any length promises.
            pays = experience.speculative_rate > experience.plain_rate
            if on_trial or pays or prospects.best_length():
                self._asked_confidence = True
                return _WorthwhileBudget(most, prospects, experience, self._num_rows)
        elif length := max(least, prospects.best_length(), int(on_trial)):
            return RoundBudget(length)
        self._pause()
        return RoundBudget(0)

    def _wants_plain(self) -> bool:
        experience = self._experience
        return experience.pause > 0 or experience.costs.needs_plain or experience.rounds_since_plain >= _PLAIN_EVERY

    def observe(self, round_: Round) -> None:
        """Learn from a finished round."""
        with self._experience.lock:
            self._observe(round_)

    def _observe(self, round_: Round) -> None:
        experience = self._experience
        costs = experience.costs
        num_drafted, draft_seconds = round_.num_drafted, round_.draft_seconds
        costs.add_forward(round_.num_read, round_.verify_seconds)
        costs.add_overhead(max(0.0, round_.seconds - draft_seconds - round_.verify_seconds))
        if num_drafted == 0:
            experience.rounds_since_plain = 0
            experience.pause = max(0, experience.pause - 1)
            return
        experience.rounds_since_plain += 1
        if self._asked_confidence:
            experience.gives_confidence = any(draft.confidences for draft in round_.drafts)
        self._has_read_prompt, reading = True, 0.0
        if round_.caught_up:
            reading = costs.add_reading(round_.caught_up, num_drafted, draft_seconds)
        else:
            costs.add_draft(num_drafted, draft_seconds)
        for draft, outcome in round_.verdicts:
            experience.acceptance.add(draft.confidences, outcome.num_judged, outcome.num_accepted)
        num_committed = round_.tokens_per_row
        if self._budget.policy == "ratio":
            self._adapt_ratio((num_committed - 1) / num_drafted)
        elif self._may_pause:
            experience.rounds_on += 1
            experience.tokens.add(num_committed)
            seconds = costs.rounds(num_drafted, round_.num_read - num_drafted)[-1]
            experience.seconds.add(seconds)
            experience.tokens_lost += (seconds + reading) * experience.plain_rate - num_committed
            self._judge()

    def _adapt_ratio(self, rate: float) -> None:
        step = 1 if rate > 0.8 else -1 if rate < 0.4 else 0
        low, high = max(1, self._budget.min_tokens), max(1, self._budget.max_tokens)
        self._ratio_tokens = min(max(self._ratio_tokens + step, low), high)

    def _judge(self) -> None:
        """Switch speculation off for a while if the rounds since the trial have not paid.

        The trial itself tries lengths that may not pay; what it taught shows in the prospects.
        """
        experience = self._experience
        if experience.rounds_on == _TRIAL_ROUNDS:
            experience.tokens.count = experience.seconds.count = 0
        elif experience.rounds_on > _TRIAL_ROUNDS and experience.tokens.count >= _JUDGED_ROUNDS:
            if experience.speculative_rate < experience.plain_rate:
                self._pause()
            else:
                experience.next_pause = _FIRST_PAUSE

    def _look_back(self) -> None:
        """Pause if earlier calls did not earn back what the draft's reading of their prompts cost."""
        experience = self._experience
        if experience.tokens_lost > _FIRST_PAUSE:
            self._pause()
        # What earlier calls gained does not pay for this one.
        experience.tokens_lost = max(0.0, experience.tokens_lost)

    def _pause(self) -> None:
        experience = self._experience
        # Long enough, too, for what the last try has cost to stay a small share of the whole.
        bearable = int(experience.tokens_lost / _BEARABLE_LOSS)
        experience.pause = max(experience.next_pause, min(bearable, _LONGEST_PAUSE))
        experience.next_pause = min(2 * experience.pause, _LONGEST_PAUSE)
        experience.rounds_on, experience.tokens_lost = 0, 0.0
