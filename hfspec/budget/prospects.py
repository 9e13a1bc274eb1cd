"""What drafting further in a round is expected to bring, and a budget that ends where that is too little."""

from collections.abc import Sequence

from hfspec.budget.experience import Acceptance, BatchExperience
from hfspec.rounds import RoundBudget


class Prospects:
    """What drafting further is expected to bring in one round, at the costs and acceptance known at its start.

    Args:
        batch: what is known of so many rows.
        max_tokens: that may be drafted.
        num_unread: committed tokens a row that the target has to read besides the draft.
    """

    def __init__(self, acceptance: Acceptance, batch: BatchExperience, max_tokens: int, num_unread: int) -> None:
        self._acceptance = acceptance
        self._seconds = batch.costs.rounds(max_tokens, num_unread)
        self._max_tokens = max_tokens
        # The time spent is worth what the best known way of decoding makes of it: the stopping rule that
        # maximises tokens per second over many rounds (renewal reward).
        self._rate = max(batch.plain_rate, batch.speculative_rate)

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


class WorthwhileBudget(RoundBudget):
    """A budget that ends where drafting on is not expected to pay, given the confidences so far.

    Args:
        lengths: of the rows' texts. Rows that share forwards go on together, as long as the rows furthest behind
            gain: those ahead end earlier anyway, and the last one decides how long the batch takes.
    """

    def __init__(self, num_tokens: int, prospects: Prospects, acceptance: Acceptance, lengths: Sequence[int]) -> None:
        super().__init__(num_tokens, reads_confidence=True)
        self._prospects = prospects
        self._acceptance = acceptance
        self._behind = [row for row, length in enumerate(lengths) if length == min(lengths)]
        self._paths = [1.0] * len(self._behind)
        self._num_drafted = 0

    def allows_another(self, *confidences: float) -> bool:
        """See `RoundBudget.allows_another`."""
        # The token just drafted stays in the draft either way, so stopping here never biases the
        # result.
        self._paths = [
            path * self._acceptance.at_confidence(confidences[row])
            for path, row in zip(self._paths, self._behind, strict=True)
        ]
        self._num_drafted += 1
        return self._prospects.are_good(self._num_drafted, sum(self._paths) / len(self._paths))
