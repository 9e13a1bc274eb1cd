"""What things cost on this machine with this pair, in seconds measured while running.

Knows nothing of models, nor of what is done with the costs.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy

#: Share of a forward's time that one more token is taken to add beyond the widest forward measured.
_ASSUMED_SLOPE = 0.02
#: Times that are kept of each thing.
_NUM_KEPT = 24
#: Times that tell how fast the machine is just now.
_NUM_PACES = 7


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
        """The same value, until there is a time of its own."""
        guess = Seconds()
        guess.value = self.value
        return guess


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
        reading: the source's, for each token of each text that it has to read first.
    """

    draft_token: Seconds = field(default_factory=Seconds)
    overhead: Seconds = field(default_factory=Seconds)
    by_width: dict[int, Seconds] = field(default_factory=dict)
    reading: Seconds = field(default_factory=Seconds)
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_PACES))
    _plain_forwards_wanted: int = 2

    def add_forward(self, width: int, seconds: float) -> float:
        """Take the time of a target forward.

        Returns:
            By how much all that was only guessed had to be scaled to it: 1.0, except at the first plain forward.
        """
        times, scale = self.by_width.setdefault(width, Seconds()), 1.0
        if width == 1 and times.count == 0 and times.value > 0:
            scale = seconds / times.value
            for guess in (*self.by_width.values(), self.draft_token, self.overhead, self.reading):
                if guess.count == 0:
                    guess.value *= scale
        self._add(times, seconds)
        if width == 1:
            self._plain_forwards_wanted = max(0, self._plain_forwards_wanted - 1)
        return scale

    def add_draft(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a draft."""
        self._add(self.draft_token, seconds / num_tokens)

    def add_reading(self, num_tokens: int, num_drafted: int, seconds: float) -> float:
        """Take the time of a draft before which the source read so many tokens; return what of it was reading."""
        if not self.draft_token.value:
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
        widths = sorted(width for width, times in self.by_width.items() if times.value)
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
