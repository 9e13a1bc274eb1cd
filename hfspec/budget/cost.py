"""What rounds cost and bring on this machine with this pair, learned while running.

These are measurements of a pair, kept from call to call; what a call chose is not kept. Knows nothing
of models. Writes from several threads may interleave: an average may then miss a value, nothing worse.
"""

from dataclasses import dataclass, field

import numpy

#: Share of a verify's time that one more token is taken to add where no wider one was measured.
_ASSUMED_SLOPE = 0.01
#: Buckets of confidence, 0 … 1.
_NUM_BUCKETS = 12


@dataclass
class Average:
    """A running mean that forgets: at first the plain mean, later at least `weight` for each new value.

    A value far above the mean (another process had the machine) counts only as twice the mean.
    """

    weight: float = 0.1
    value: float = 0.0
    count: int = 0

    def add(self, value: float, clip: bool = False) -> None:
        if clip and self.count >= 3:
            value = min(value, 2 * self.value)
        self.count += 1
        self.value += max(self.weight, 1 / self.count) * (value - self.value)


@dataclass
class Costs:
    """Seconds: one draft token, a target forward by width, and the loop itself."""

    draft_token: Average = field(default_factory=Average)
    overhead: Average = field(default_factory=Average)
    by_width: dict[int, Average] = field(default_factory=dict)

    def add_forward(self, width: int, seconds: float) -> None:
        self.by_width.setdefault(width, Average()).add(seconds, clip=True)

    def forward(self, width: int) -> float:
        """Expected seconds of a target forward over `width` tokens.

        Between measured widths it is interpolated, never extrapolated along a slope: the true curve has steps.
        """
        if not self.by_width:
            return 0.0
        widths = sorted(self.by_width)
        seconds = [self.by_width[each].value for each in widths]
        beyond = max(0, width - widths[-1])
        return float(numpy.interp(width, widths, seconds)) * (1 + _ASSUMED_SLOPE * beyond)

    @property
    def knows_plain(self) -> bool:
        return 1 in self.by_width

    def round(self, num_drafted: int) -> float:
        """Expected seconds of a round with `num_drafted` draft tokens."""
        return num_drafted * self.draft_token.value + self.forward(num_drafted + 1) + self.overhead.value


@dataclass
class Acceptance:
    """How often draft tokens are accepted: at each depth, and at each level of the source's confidence."""

    by_depth: dict[int, Average] = field(default_factory=dict)
    overall: Average = field(default_factory=lambda: Average(weight=0.02, value=0.7, count=3))
    by_confidence: list[Average] = field(
        default_factory=lambda: [
            # Before anything is measured, confidence is taken nearly at its word, for a few tokens' worth.
            Average(weight=0.03, value=0.2 + 0.75 * (bucket + 0.5) / _NUM_BUCKETS, count=3)
            for bucket in range(_NUM_BUCKETS)
        ]
    )

    def add(self, confidences: tuple[float, ...], num_judged: int, num_accepted: int) -> None:
        for index in range(num_judged):
            accepted = float(index < num_accepted)
            self.overall.add(accepted)
            self.by_depth.setdefault(index + 1, Average(weight=0.05)).add(accepted)
            if confidences:
                self.by_confidence[_bucket(confidences[index])].add(accepted)

    def at_confidence(self, confidence: float) -> float:
        """Expected acceptance of a token, given all before it were accepted."""
        return self.by_confidence[_bucket(confidence)].value

    def at_depth(self, depth: int) -> float:
        """Expected acceptance at a depth, given all before it were accepted; little-seen depths borrow the mean."""
        seen = self.by_depth.get(depth)
        if seen is None:
            return self.overall.value
        trust = seen.count / (seen.count + 4)
        return trust * seen.value + (1 - trust) * self.overall.value


@dataclass
class Experience:
    """All that is learned about one pair: costs, acceptance, and how long speculation stays off.

    Attributes:
        tokens, seconds: per speculative round, both kinds of cost included.
        pause: plain tokens still to come before speculation is tried again.
        next_pause: how long the next pause will be.
    """

    costs: Costs = field(default_factory=Costs)
    acceptance: Acceptance = field(default_factory=Acceptance)
    tokens: Average = field(default_factory=lambda: Average(weight=0.06))
    seconds: Average = field(default_factory=lambda: Average(weight=0.06))
    rounds_on: int = 0
    rounds_since_plain: int = 0
    pause: int = 0
    next_pause: int = 16

    @property
    def speculative_rate(self) -> float:
        """Tokens per second of the rounds with a draft, 0 before the first."""
        return self.tokens.value / self.seconds.value if self.seconds.value else 0.0

    @property
    def plain_rate(self) -> float:
        """Tokens per second without drafts, 0 while unknown."""
        return 1 / self.costs.round(0) if self.costs.by_width else 0.0


def _bucket(confidence: float) -> int:
    return min(_NUM_BUCKETS - 1, max(0, int(confidence * _NUM_BUCKETS))) if confidence == confidence else 0
