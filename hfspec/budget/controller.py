"""Chooses, round by round, how many tokens to draft.

One `Controller` serves one call. What it measures goes into the pair's `Experience`, which outlives the call.
"""

from collections.abc import Sequence

from hfspec.budget.experience import FIRST_PAUSE, Experience
from hfspec.budget.prospects import Prospects, WorthwhileBudget
from hfspec.config import DraftBudget
from hfspec.rounds import Round, RoundBudget

#: Rounds that feel the way, at first and after a pause, and rounds after them before what they brought is judged.
_TRIAL_ROUNDS, _JUDGED_ROUNDS = 4, 6
#: Plain rounds after speculation was found not to pay: twice as many each time, up to so many.
_LONGEST_PAUSE = 512
#: Tokens that earlier calls may have lost before the next one does without drafts.
_LOSS_REMEMBERED = 4
#: Share of the time that tries which do not pay may cost, the draft's reading of a long prompt included.
_BEARABLE_LOSS = 0.03
#: Share of a call's time that a try is hoped to save, where nothing is known of what it will.
_HOPED_GAIN = 0.2
#: The target's forward over a single token is measured again after so many rounds.
_PLAIN_EVERY = 60
#: Committed tokens that take no more than a single one to read: the target reads more in a plain round, and a source's
#: reading of more is timed apart from its drafting.
_MOST_UNREAD = 8
#: Why rounds are plain, for `stats`.
_CATCHES_UP = "the target's cache had to catch up"
_ENDS = "the text was about to end"
_DOES_NOT_PAY = "drafting did not pay; it is tried again now and then"
_EARNS_TOO_LITTLE = "what was left to write would not earn back the draft's reading of the text"
_MEASURES = "to measure how fast plain decoding is"
#: Where the ratio policy begins a call: Hugging Face's own long-time default.
_RATIO_START = 5


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
        self._lengths: Sequence[int] = ()
        self._num_unread = 1
        self._ratio_tokens = min(max(_RATIO_START, budget.min_tokens), budget.max_tokens)
        self._may_pause = budget.policy == "measured" and budget.min_tokens == 0
        self._has_read_prompt = False
        with experience.lock:
            #: What is known of so many rows as are at work, and as the call began with.
            self._batch = self._whole = experience.with_rows(num_rows)
            if self._may_pause:
                self._look_back()
            experience.acceptance.begin_call()

    def next_round(
        self,
        lengths: Sequence[int],
        max_length: int | None = None,
        num_unread: int = 1,
        measures_plain: bool = False,
    ) -> RoundBudget:
        """The budget of the next round.

        Args:
            lengths: of the texts at work.
            max_length: that the call may write up to; `None` if unlimited. A round commits one token more than
                it drafts, so it never drafts all that remain. Texts that go on beyond are written plainly.
            num_unread: committed tokens a row that the target has to read besides the draft.
            measures_plain: whether a draft will be proved by forwards over single tokens, whose times are told.
        """
        with self._experience.lock:
            return self._next_round(lengths, max_length, num_unread, measures_plain)

    def _next_round(
        self, lengths: Sequence[int], max_length: int | None, num_unread: int, measures_plain: bool
    ) -> RoundBudget:
        self._batch = self._experience.with_rows(len(lengths))
        self._lengths, self._num_unread = lengths, num_unread
        if num_unread > _MOST_UNREAD:
            return RoundBudget(0, why_plain=_CATCHES_UP)
        num_remaining = None if max_length is None else max_length - min(lengths)
        most = self._budget.max_tokens
        if num_remaining is not None:
            most = max(0, min(most, num_remaining - 1))
        if most == 0:
            return RoundBudget(0, why_plain=_ENDS)
        if self._budget.policy == "fixed":
            return RoundBudget(most)
        if self._budget.policy == "ratio":
            return RoundBudget(min(most, self._ratio_tokens))
        if self._may_pause and (reason := self._why_plain(num_remaining, measures_plain)):
            return RoundBudget(0, why_plain=reason)
        return self._measured(least=min(self._budget.min_tokens, most), most=most)

    def _can_earn(self, num_remaining: int | None) -> bool:
        """Whether the tokens that are left may earn back what the source's reading of the text so far will cost."""
        batch = self._batch
        if self._has_read_prompt or num_remaining is None:
            return True
        reading = batch.costs.reading.value * max(self._lengths) * len(self._lengths) * batch.plain_rate
        is_hoped = reading <= _HOPED_GAIN * num_remaining
        rate = batch.speculative_rate
        if not batch.rounds_on or not rate:
            return is_hoped
        will = reading <= (1 - batch.plain_rate / rate) * num_remaining
        if is_hoped and not will:
            self._pause()  # what drafting brings is too little, as far as is known: look again after a while
        return will

    def _measured(self, least: int, most: int) -> RoundBudget:
        batch, acceptance = self._batch, self._experience.acceptance
        self._asked_confidence = False
        on_trial = least == 0 and batch.rounds_on < _TRIAL_ROUNDS
        if on_trial:  # feel the way: one token at least, and each trial round may draft one more
            most = min(most, batch.rounds_on + 1)
        prospects = Prospects(acceptance, batch, most, self._num_unread)
        if self._reads_confidence and self._experience.gives_confidence and least == 0:
            # How far to go is found on the way: what stopping early brought before may pass what any length promises.
            pays = batch.speculative_rate > batch.plain_rate
            if on_trial or pays or prospects.best_length():
                self._asked_confidence = True
                return WorthwhileBudget(most, prospects, acceptance, self._lengths)
        elif length := max(least, prospects.best_length(), int(on_trial)):
            return RoundBudget(length)
        self._pause()
        return RoundBudget(0, why_plain=_DOES_NOT_PAY)

    def _why_plain(self, num_remaining: int | None, measures_plain: bool) -> str:
        """Why the next round is to be a plain one, empty if it need not."""
        batch = self._batch
        if batch.pause > 0:
            return _DOES_NOT_PAY
        if not measures_plain and (batch.costs.needs_plain or batch.rounds_since_plain >= _PLAIN_EVERY):
            return _MEASURES
        return "" if self._can_earn(num_remaining) else _EARNS_TOO_LITTLE

    def observe(self, round_: Round, plain_seconds: Sequence[float] = ()) -> None:
        """Learn from a finished round.

        Args:
            plain_seconds: of forwards over single tokens that were made besides, for a proof.
        """
        with self._experience.lock:
            for seconds in plain_seconds:
                self._batch.add_forward(1, seconds)
                self._batch.rounds_since_plain = 0
            self._observe(round_)

    def _observe(self, round_: Round) -> None:
        batch, costs = self._batch, self._batch.costs
        num_drafted, draft_seconds = round_.num_drafted, round_.draft_seconds
        batch.add_forward(round_.num_read, round_.verify_seconds)
        costs.add_overhead(max(0.0, round_.seconds - draft_seconds - round_.verify_seconds))
        if num_drafted == 0:
            batch.rounds_since_plain = 0
            batch.pause = max(0, batch.pause - 1)
            return
        batch.rounds_since_plain += 1
        if self._asked_confidence:
            self._experience.gives_confidence = round_.draft.confidences is not None
        self._has_read_prompt, reading = True, 0.0
        if round_.caught_up > _MOST_UNREAD:
            reading = costs.add_reading(round_.caught_up * round_.num_rows, num_drafted, draft_seconds)
        else:
            costs.add_draft(num_drafted, draft_seconds)
        for confidences, outcome in round_.verdicts:
            self._experience.acceptance.add(confidences, outcome.num_judged, outcome.num_accepted)
        num_committed = round_.tokens_per_row
        if self._budget.policy == "ratio":
            self._adapt_ratio((num_committed - 1) / round_.draft.depth)
        elif self._may_pause:
            batch.rounds_on += 1
            batch.tokens.add(num_committed)
            seconds = costs.rounds(num_drafted, round_.num_read - num_drafted)[-1]
            batch.seconds.add(seconds)
            self._whole.tokens_lost += (seconds + reading) * self._whole.plain_rate - self._progress(round_)
            self._judge()

    def _progress(self, round_: Round) -> int:
        """How far the batch has come: as far as the row that is furthest behind, for which the others have to wait."""
        ends = [length + each.num_committed for length, each in zip(self._lengths, round_.outcomes, strict=True)]
        return min(ends) - min(self._lengths)

    def _adapt_ratio(self, rate: float) -> None:
        step = 1 if rate > 0.8 else -1 if rate < 0.4 else 0
        low, high = max(1, self._budget.min_tokens), max(1, self._budget.max_tokens)
        self._ratio_tokens = min(max(self._ratio_tokens + step, low), high)

    def _judge(self) -> None:
        """Switch speculation off for a while if the rounds since the trial have not paid.

        The trial itself tries lengths that may not pay; what it taught shows in the prospects.
        """
        batch = self._batch
        if batch.rounds_on == _TRIAL_ROUNDS:
            batch.loosen(0)
        elif batch.rounds_on > _TRIAL_ROUNDS and batch.tokens.count >= _JUDGED_ROUNDS:
            if batch.speculative_rate < batch.plain_rate:
                self._pause()
            else:
                batch.next_pause = FIRST_PAUSE

    def _look_back(self) -> None:
        """Pause if earlier calls with as many rows did not earn back what the draft's reading of their prompts cost."""
        if self._whole.tokens_lost > _LOSS_REMEMBERED:
            self._pause()

    def _pause(self) -> None:
        batch = self._batch
        # Long enough, too, for what the last try has cost to stay a small share of the whole.
        bearable = int(self._whole.tokens_lost / _BEARABLE_LOSS)
        batch.pause = max(batch.next_pause, min(bearable, _LONGEST_PAUSE))
        batch.next_pause = min(2 * batch.pause, _LONGEST_PAUSE)
        batch.rounds_on, self._whole.tokens_lost = 0, 0.0
