"""What is known of a pair: how often its drafts are accepted, and what they bring and cost.

These are measurements, kept from call to call; what a call chose is not kept. Calls in several threads share them,
one at a time (`Experience.lock`).
"""

import math
import threading
from dataclasses import dataclass, field, replace

from hfspec.budget.cost import Costs

#: Levels of confidence that acceptance is kept for, and the doubt (1 - confidence) that is none.
_NUM_LEVELS, _NO_DOUBT = 12, 1e-9
#: Values of its own after which a text's averages are half its own, half those of the texts before.
_WORTH_OF_OTHER_TEXTS = 12
#: The same, for batches of another size.
_WORTH_OF_OTHER_SIZES = 3
#: Plain rounds after speculation was first found not to pay.
FIRST_PAUSE = 16


@dataclass
class Average:
    """A running mean that forgets: at first the plain mean, later at least `weight` for each new value."""

    weight: float = 0.1
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Take a new value."""
        count = self.count + 1  # local, as another thread may set it back meanwhile
        self.value += max(self.weight, 1 / count) * (value - self.value)
        self.count = count

    def loosen(self, count: int) -> None:
        """Take what is known for no more than so many values' worth."""
        self.count = min(self.count, count)


@dataclass
class Acceptance:
    """How often draft tokens are accepted: at each depth, and at each level of the source's confidence."""

    by_depth: dict[int, Average] = field(default_factory=dict)
    overall: Average = field(default_factory=lambda: Average(weight=0.02, value=0.7, count=3))
    by_confidence: list[Average] = field(
        default_factory=lambda: [
            # Before anything is measured, confidence is taken nearly at its word, for a few tokens' worth.
            Average(weight=0.03, value=0.95 - 0.75 * 0.5 ** (level + 0.5), count=3)
            for level in range(_NUM_LEVELS)
        ]
    )

    def add(self, confidences: tuple[float, ...], num_judged: int, num_accepted: int) -> None:
        """Take the verdict on one draft."""
        for index in range(num_judged):
            accepted = float(index < num_accepted)
            self.overall.add(accepted)
            self.by_depth.setdefault(index + 1, Average(weight=0.05)).add(accepted)
            if confidences:
                self.by_confidence[_level(confidences[index])].add(accepted)

    def begin_call(self) -> None:
        """Another text may be of another kind: let its own verdicts soon outweigh those of the texts before."""
        for each in (self.overall, *self.by_depth.values(), *self.by_confidence):
            each.loosen(_WORTH_OF_OTHER_TEXTS)

    def at_confidence(self, confidence: float) -> float:
        """Expected acceptance of a token, given all before it were accepted."""
        return self.by_confidence[_level(confidence)].value

    def at_depth(self, depth: int) -> float:
        """Expected acceptance at a depth, given all before it were accepted; little-seen depths borrow the mean."""
        seen = self.by_depth.get(depth)
        if seen is None:
            return self.overall.value
        trust = seen.count / (seen.count + 4)
        return trust * seen.value + (1 - trust) * self.overall.value


def _level(confidence: float) -> int:
    """0 below a confidence of 1/2, 1 below 3/4, 2 below 7/8, …: sure tokens differ by how small the doubt is."""
    if not confidence > 0:  # nan too: nothing could have been picked
        return 0
    return min(_NUM_LEVELS - 1, int(-math.log2(max(1 - confidence, _NO_DOUBT))))


@dataclass
class BatchExperience:
    """What speculation costs and brings with about so many rows at work, and how long it stays off for them.

    Attributes:
        costs: what things cost.
        tokens: committed per row, in rounds with a draft.
        seconds: what those rounds cost, by `costs` (not by the clock, see `cost.Seconds`).
        tokens_lost: how many more a row plain decoding would have written in the time that speculation has taken
            since it was switched on in calls that began with so many rows, the draft's reading of prompts included;
            below 0 if it has gained.
        rounds_on: rounds with a draft since speculation was switched on.
        rounds_since_plain: rounds since the target's forward over a single token was last measured.
        pause: plain rounds still to come before speculation is tried again.
        next_pause: how long the next pause will be.
    """

    costs: Costs = field(default_factory=Costs)
    tokens: Average = field(default_factory=lambda: Average(weight=0.06))
    seconds: Average = field(default_factory=lambda: Average(weight=0.06))
    tokens_lost: float = 0.0
    rounds_on: int = 0
    rounds_since_plain: int = 0
    pause: int = 0
    next_pause: int = FIRST_PAUSE

    def for_other_rows(self) -> "BatchExperience":
        """A first guess at what holds for another number of rows, soon outweighed by what is measured with them."""
        guess = BatchExperience(
            self.costs.for_other_rows(), replace(self.tokens), replace(self.seconds), rounds_on=self.rounds_on
        )
        guess.loosen(_WORTH_OF_OTHER_SIZES)
        return guess

    def add_forward(self, width: int, seconds: float) -> None:
        """Take the time of a target forward; the first plain one tells how far guesses were off."""
        self.seconds.value *= self.costs.add_forward(width, seconds)

    def loosen(self, count: int) -> None:
        """Take what rounds brought and cost for no more than so many rounds' worth."""
        self.tokens.loosen(count)
        self.seconds.loosen(count)

    @property
    def speculative_rate(self) -> float:
        """Tokens per second and row of the rounds with a draft, 0 before the first."""
        return self.tokens.value / self.seconds.value if self.seconds.value else 0.0

    @property
    def plain_rate(self) -> float:
        """Tokens per second and row without drafts, 0 while unknown."""
        seconds = self.costs.rounds(0)[0]
        return 1 / seconds if seconds else 0.0


@dataclass
class Experience:
    """All that is learned about one pair.

    Attributes:
        gives_confidence: whether the source says how sure it is of its tokens; taken to until it does not.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    gives_confidence: bool = True
    lock: threading.RLock = field(default_factory=threading.RLock)
    _by_size: dict[int, BatchExperience] = field(default_factory=dict)

    def with_rows(self, num_rows: int) -> BatchExperience:
        """What is known of so many rows at work: 1, 2, 3–4, 5–8, … share it. A new size begins as the nearest known."""
        size = (num_rows - 1).bit_length()
        if size not in self._by_size:
            nearest = min(self._by_size, key=lambda known: abs(known - size), default=None)
            self._by_size[size] = BatchExperience() if nearest is None else self._by_size[nearest].for_other_rows()
        return self._by_size[size]
