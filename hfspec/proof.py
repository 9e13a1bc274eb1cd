"""What came of proving a target's forwards over several tokens, and for how long it holds. Knows nothing of models."""

import dataclasses
from dataclasses import dataclass

#: A forward so many times as wide as was proved is proved anew. Doublings, as for lengths, would prove four times on
#: the way to sixteen tokens, by two forwards each: a tenth of a first call.
_MUCH_WIDER = 8


@dataclass(frozen=True)
class Proof:
    """What came of making a target's forwards both ways: over several tokens at once, and over one each.

    Attributes:
        problem: why the forward over several is not used; `None` if it gives what the others give.
        length, width: of the text and of the forward with which it was made.
        difference: the largest between two logits for the same place.
        tolerance: by how much rounding may move them there.
        arithmetic: of what numbers.
        num_positions: places a row that were compared.
    """

    length: int
    width: int
    difference: float = 0.0
    tolerance: float = 0.0
    arithmetic: str = ""
    num_positions: int = 0
    problem: str | None = None

    def covers(self, length: int, width: int) -> bool:
        """Whether what was found holds for such a text and forward: less than twice as long, and not much wider."""
        return length < 2 * self.length and width <= self.reach

    @property
    def reach(self) -> int:
        """The width up to which it holds."""
        return _MUCH_WIDER * self.width - 1

    def with_reach_of(self, earlier: "Proof") -> "Proof":
        """The same with the earlier's length and width, where those are greater and both hold."""
        if self.problem is not None or earlier.problem is not None:
            return self
        return dataclasses.replace(self, length=max(self.length, earlier.length), width=max(self.width, earlier.width))

    def summary(self) -> str:
        """One line for people."""
        if self.problem is not None:
            return f"not proved: {self.problem}"
        return (
            f"proved below {2 * self.length} tokens of text: one over {self.width} gave the logits of forwards "
            f"over one at {self.num_positions} places (apart by {self.difference:.2g}; {self.arithmetic} may "
            f"round by {self.tolerance:.2g})"
        )
