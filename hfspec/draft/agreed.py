"""Keeps processes that share a model together: a source that fails on one of them has failed on all.

A draft of another length on one process would have its forwards wait for ever for those of the others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hfspec.draft.base import CallView, Context, DraftSession, DraftSource, Session
from hfspec.draft.foreign import trusted
from hfspec.draft.one_row import OneRow
from hfspec.drafts import Draft
from hfspec.errors import DraftError
from hfspec.host import architectures
from hfspec.rounds import Outcomes, RoundBudget
from hfspec.texts import Texts

#: Told whether it happened here, says whether it happened in any process.
AnyOf = Callable[[bool], bool]


class Agreed(DraftSource):
    """A source whose failures all processes know of before any of them goes on."""

    def __init__(self, source: DraftSource, any_of: AnyOf) -> None:
        self._source = source
        self._any_of = any_of

    @property
    def may_draw(self) -> bool:  # type: ignore[override]  # what the source inside says
        """Whether the source inside may draw."""
        return self._source.may_draw

    def start(self, context: Context) -> DraftSession:
        """One row is a batch of one."""
        return OneRow(self.start_batch, context)

    def start_batch(self, call: CallView) -> Session:
        """Begin; what fails is told at the next `propose`, to which all processes come."""
        return _AgreedSession(lambda: trusted(self._source.start_batch(call), call), self._any_of)


class _AgreedSession(Session):
    def __init__(self, start: Callable[[], Session], any_of: AnyOf) -> None:
        self._any_of = any_of
        self._session: Session | None = None
        self._error: Exception | None = None
        self._attempt(lambda: setattr(self, "_session", start()))

    def propose(self, texts: Texts, budget: RoundBudget) -> Draft:
        drafts: list[Draft] = []
        self._attempt(lambda: drafts.extend([self._session.propose(texts, budget)] if self._session else []))
        if self._any_of(self._error is not None):
            raise self._error or DraftError("it failed in another of the processes that share the model")
        self.caught_up = 0 if self._session is None else self._session.caught_up
        return drafts[0]

    def read(self, texts: Texts, outcomes: Outcomes) -> None:
        self._attempt(lambda: self._session and self._session.read(texts, outcomes))

    def select(self, rows: Sequence[int]) -> None:
        self._attempt(lambda: self._session and self._session.select(rows))

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()

    def _attempt(self, work: Callable[[], object]) -> None:
        if self._error is None:
            try:
                work()
            except Exception as error:  # whatever a source raises
                self._error = error


def among_processes(source: DraftSource, model: PreTrainedModel) -> DraftSource:
    """The source, agreed upon where several processes share the model."""
    if architectures.num_processes(model) == 1 or not (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    ):
        return source
    mesh: Any = getattr(model, "_device_mesh", None)
    group = mesh.get_group() if mesh is not None else None
    device = next(model.parameters()).device

    def any_of(has_happened: bool) -> bool:
        flag = torch.tensor([int(has_happened)], device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group)
        return bool(flag.item())

    return Agreed(source, any_of)
