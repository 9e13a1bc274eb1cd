"""The best that could be had with the measured acceptance and the measured forward times, and nothing else.

    ideal speed-up = max over K of  (1 + Σ_{j≤K} Π_{i≤j} a_i) · t_plain / (K · t_draft + t_verify(K + 1))

a_i is the acceptance at depth i of the tokens that were drafted there (with one for all depths this is theorem
3.8 of Leviathan et al. 2022, arXiv 2211.17192). Where a draft stops early when it is unsure, only the surer
tokens get deep, so that a_i flatters a fixed K: the ideal is a bound to look up to.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hfspec import Metrics

#: A depth that was judged less often than this says nothing.
_FEWEST_JUDGED = 5


@dataclass(frozen=True)
class Times:
    """Measured seconds.

    Attributes:
        plain: of a plain token after the first.
        draft: of one draft token.
        verify_root: of a target forward over one token, and
        verify_node: how much longer it takes with each token more.
    """

    plain: float
    draft: float
    verify_root: float
    verify_node: float

    @classmethod
    def of(cls, metrics: Metrics, plain_seconds: float) -> "Times | None":
        """Read off what a run measured; `None` if nothing was drafted.

        The verify time of other widths lies on the line through one token (hfspec's own plain rounds, or else
        plain decoding) and the mean width.
        """
        if not metrics.rounds or not metrics.drafted_tokens:
            return None
        root = metrics.plain_seconds / metrics.plain_rounds if metrics.plain_rounds else plain_seconds
        verify = metrics.verify_seconds / metrics.rounds
        root = min(root, verify)
        return cls(
            plain=plain_seconds,
            draft=metrics.draft_seconds / (metrics.timed_draft_tokens or metrics.drafted_tokens),
            verify_root=root,
            verify_node=(verify - root) / (metrics.drafted_tokens / metrics.rounds),
        )

    def round(self, num_drafted: int) -> float:
        """Seconds of a round without any overhead."""
        return num_drafted * self.draft + self.verify_root + num_drafted * self.verify_node


def ideal_speedup(metrics: Metrics, times: Times) -> tuple[float, int]:
    """The ideal speed-up of what was measured, and the K that reaches it."""
    by_depth = metrics.acceptance_by_depth.items()
    rates = (rate for depth, rate in by_depth if metrics.drafted_by_depth[depth] >= _FEWEST_JUDGED)
    return best_speedup(rates, lambda num_drafted: times.round(num_drafted) / times.plain)


def best_speedup(rates: Iterable[float], cost: Callable[[int], float]) -> tuple[float, int]:
    """The speed-up of the best number K of draft tokens a round, and that K; K = 0, plain decoding, gives 1.

    Args:
        rates: the acceptance at depth 1, 2, …: as many as may be drafted.
        cost: of a round with so many draft tokens; a plain token costs 1.
    """
    best, best_length = 1.0, 0
    expected, path = 1.0, 1.0
    for depth, rate in enumerate(rates, start=1):
        path *= rate
        expected += path
        speedup = expected / cost(depth)
        if speedup > best:
            best, best_length = speedup, depth
    return best, best_length
