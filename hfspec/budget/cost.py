"""What rounds cost and bring on this machine with this pair, learned while running.

These are measurements of a pair, kept from call to call; what a call chose is not kept. Knows nothing
of models. Calls in several threads share them, one at a time (`Experience.lock`).
"""

import math
import statistics
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy

#: Share of a forward's time that one more token is taken to add beyond the widest forward measured.
_ASSUMED_SLOPE = 0.02
#: Levels of confidence that acceptance is kept for, and the doubt (1 - confidence) that is none.
_NUM_LEVELS, _NO_DOUBT = 12, 1e-9
#: Times that are kept of each thing.
_NUM_KEPT = 24
#: Times that tell how fast the machine is just now.
_NUM_PACES = 7
#: Values of its own after which a text's averages are half its own, half those of the texts before.
_WORTH_OF_OTHER_TEXTS = 12


class Seconds:
    """How long something takes, in spite of bursts: the median of recent times."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_NUM_KEPT)
        self.value = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        """Take a new time."""
        self._recent.append(seconds)
        self.count += 1
        self.value = statistics.median_low(self._recent)

    def as_guess(self) -> "Seconds":
        """What is soon outweighed by times of its own."""
        guess = Seconds()
        if self.count:
            guess.add(self.value)
        return guess


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
class Costs:
    """What things cost, in seconds at the machine's usual pace.

    Other processes, and longer contexts, make everything dearer, about alike, for a while or for good. So a time is
    taken relative to how much dearer the last few things were than expected: what is compared is then comparable,
    whenever it was measured.

    Attributes:
        draft_token: one token of a draft.
        overhead: the loop itself, a round.
        by_width: a target forward, by its width in tokens.
        reading: the source's, for each token of a text that it has to read first.
    """

    draft_token: Seconds = field(default_factory=Seconds)
    overhead: Seconds = field(default_factory=Seconds)
    by_width: dict[int, Seconds] = field(default_factory=dict)
    reading: Seconds = field(default_factory=Seconds)
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_PACES))
    _plain_forwards_wanted: int = 2

    def add_forward(self, width: int, seconds: float) -> None:
        """Take the time of a target forward."""
        self._add(self.by_width.setdefault(width, Seconds()), seconds)
        if width == 1:
            self._plain_forwards_wanted = max(0, self._plain_forwards_wanted - 1)

    def add_draft(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a draft."""
        self._add(self.draft_token, seconds / num_tokens)

    def add_reading(self, num_tokens: int, num_drafted: int, seconds: float) -> float:
        """Take the time of a draft before which the source read so many tokens; return what of it was reading."""
        if self.draft_token.count == 0:
            # Until a draft can be timed by itself, half a plain forward a token is a fair guess.
            self.draft_token.value = 0.5 * self.forwards(1)[1]
        reading = max(0.0, seconds / self.pace - num_drafted * self.draft_token.value)
        self.reading.add(reading / num_tokens)
        return reading

    def add_overhead(self, seconds: float) -> None:
        """Take what a round took besides."""
        self.overhead.add(seconds / self.pace)  # too short to tell a pace

    def _add(self, times: Seconds, seconds: float) -> None:
        if times.count and times.value > 0:  # what was only guessed tells no pace
            self._paces.append(seconds / times.value)
        times.add(seconds / self.pace)

    @property
    def pace(self) -> float:
        """How many times as long as usual things take just now."""
        return statistics.median(self._paces) if self._paces else 1.0

    def for_other_rows(self) -> "Costs":
        """A first guess at what things cost with another number of rows: in proportion to a new plain forward."""
        widths = {width: times.as_guess() for width, times in self.by_width.items()}
        token, overhead, reading = (each.as_guess() for each in (self.draft_token, self.overhead, self.reading))
        return Costs(token, overhead, widths, reading, _plain_forwards_wanted=1)

    def forwards(self, max_width: int) -> list[float]:
        """Expected seconds of target forwards over 0 (meaningless), 1, … `max_width` tokens.

        Between measured widths they are interpolated. Beyond them next to no slope is assumed, as the true
        curve has steps: a wide forward that turns out dear is measured once, a cheap one would never be found.
        """
        widths = sorted(width for width, times in self.by_width.items() if times.count)
        if not widths:
            return [0.0] * (max_width + 1)
        wanted = numpy.arange(max_width + 1)
        seconds = numpy.interp(wanted, widths, [self.by_width[each].value for each in widths])
        beyond = numpy.maximum(0, wanted - widths[-1])
        result: list[float] = (seconds * (1 + _ASSUMED_SLOPE * beyond)).tolist()
        return result

    def rounds(self, max_drafted: int, num_unread: int = 1) -> list[float]:
        """Expected seconds of rounds with 0, 1, … `max_drafted` draft tokens behind `num_unread` committed ones."""
        forwards = self.forwards(max_drafted + num_unread)
        token, fixed = self.draft_token.value, self.overhead.value
        return [drafted * token + forwards[drafted + num_unread] + fixed for drafted in range(max_drafted + 1)]

    @property
    def needs_plain(self) -> bool:
        """Whether a forward over a single token must be measured before anything can be compared with it."""
        return self._plain_forwards_wanted > 0


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


@dataclass
class Experience:
    """All that is learned about one pair, and how long speculation stays off for it.

    Attributes:
        costs: what things cost with the present number of rows.
        gives_confidence: whether the source says how sure it is of its tokens; taken to until it does not.
        tokens: committed per round with a draft.
        seconds: what those rounds cost, by `costs` (not by the clock, see `Seconds`).
        tokens_lost: how many more plain decoding would have written in the time that speculation has taken since it
            was switched on, the draft's reading of prompts included; below 0 if it has gained.
        rounds_on: rounds with a draft since speculation was switched on.
        rounds_since_plain: rounds since the target's forward over a single token was last measured.
        pause: plain rounds still to come before speculation is tried again.
        next_pause: how long the next pause will be.
    """

    costs: Costs = field(default_factory=Costs)
    costs_by_size: dict[int, Costs] = field(default_factory=dict)
    acceptance: Acceptance = field(default_factory=Acceptance)
    gives_confidence: bool = True
    tokens: Average = field(default_factory=lambda: Average(weight=0.06))
    seconds: Average = field(default_factory=lambda: Average(weight=0.06))
    tokens_lost: float = 0.0
    rounds_on: int = 0
    rounds_since_plain: int = 0
    pause: int = 0
    next_pause: int = 16
    lock: threading.RLock = field(default_factory=threading.RLock)

    def set_rows(self, num_rows: int) -> None:
        """Go on with the costs of so many rows at work: 1, 2, 3–4, 5–8, … share them.

        A size that was never measured takes over what the last one cost, in proportion to a new plain forward.
        """
        size = (num_rows - 1).bit_length()
        if not self.costs_by_size:
            self.costs_by_size[size] = self.costs
        if size not in self.costs_by_size:
            self.costs_by_size[size] = self.costs.for_other_rows()
        if self.costs is not self.costs_by_size[size]:
            self.costs = self.costs_by_size[size]
            # What rounds brought and cost with other numbers of rows says nothing about these.
            self.tokens, self.seconds = Average(weight=0.06), Average(weight=0.06)

    def begin_call(self) -> None:
        """Keep what is known of the pair, ready to learn what is different in a new text."""
        self.acceptance.begin_call()
        for each in (self.tokens, self.seconds):
            each.loosen(_WORTH_OF_OTHER_TEXTS)

    @property
    def speculative_rate(self) -> float:
        """Tokens per second of the rounds with a draft, 0 before the first."""
        return self.tokens.value / self.seconds.value if self.seconds.value else 0.0

    @property
    def plain_rate(self) -> float:
        """Tokens per second without drafts, 0 while unknown."""
        seconds = self.costs.rounds(0)[0]
        return 1 / seconds if seconds else 0.0


def _level(confidence: float) -> int:
    """0 below a confidence of 1/2, 1 below 3/4, 2 below 7/8, …: sure tokens differ by how small the doubt is."""
    if not confidence > 0:  # nan too: nothing could have been picked
        return 0
    return min(_NUM_LEVELS - 1, int(-math.log2(max(1 - confidence, _NO_DOUBT))))
