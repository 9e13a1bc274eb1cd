"""A session for all rows, in the place of one for a single row."""

from collections.abc import Callable, Sequence

import torch

from hfspec.draft.base import CallView, Context, DraftSession, Session
from hfspec.drafts import Draft
from hfspec.rounds import Outcome, Outcomes, RoundBudget
from hfspec.texts import Texts


class OneRow(DraftSession):
    """A batch of one as a row's session: `start` for a source that begins by batches.

    Args:
        start_batch: the source's.
    """

    def __init__(self, start_batch: Callable[[CallView], Session], context: Context) -> None:
        self._session = start_batch(CallView([context], _OwnNoise(context)))
        self._texts: Texts | None = None

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        """Draft for the row."""
        self._texts = Texts(input_ids)
        return self._session.propose(self._texts, budget)

    def observe(self, outcome: Outcome) -> None:
        """Learn the verdict."""
        if self._texts is not None:
            self._session.read(self._texts, Outcomes((outcome,)))

    def stop(self) -> None:
        """Stop the batch."""
        self._session.stop()


class _OwnNoise:
    """A row's own noise, as that of a batch."""

    def __init__(self, context: Context) -> None:
        self._noise = context.noise

    def peek(self, rows: Sequence[int], position: int, like: torch.Tensor) -> torch.Tensor:
        """See `RowsPeek.peek`."""
        return self._noise.peek(like, position)
