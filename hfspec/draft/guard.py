"""Keeps a failing draft source from failing the call: its drafts are checked, its errors end drafting.

The target needs no draft to be right, so whatever a source does wrong costs speed alone.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hfspec.draft.base import BatchSession, Context, DraftSource
from hfspec.errors import DraftError
from hfspec.rounds import Draft, Outcome, RoundBudget
from hfspec.sampling.devices import unmoved


class Guard:
    """The rows' sessions, which propose nothing any more once one of them has failed.

    Args:
        source: started only when first asked for a draft, so that a call which drafts nothing pays nothing.
        contexts: one a row.
        on_failure: told the reason, once.
    """

    def __init__(self, source: DraftSource, contexts: Sequence[Context], on_failure: Callable[[str], None]) -> None:
        self._source = source
        self._contexts = list(contexts)
        self._on_failure = on_failure
        self._session: BatchSession | None = None
        self.has_failed = False

    def propose(self, texts: Sequence[torch.Tensor], budget: RoundBudget) -> list[Draft]:
        """A draft for each row's text `[1, length]`: empty ones for a budget of 0 and after a failure."""
        if budget.num_tokens > 0 and not self.has_failed:
            try:
                with self._unmoved_randomness():
                    if self._session is None:
                        self._session = self._source.start_batch(self._contexts)
                    drafts = list(self._session.propose([text.clone() for text in texts], budget))
                for draft, context in zip(drafts, self._contexts, strict=True):
                    _check_draft(draft, budget.num_tokens, context)
                return drafts
            except Exception as error:  # any fault of a source, out of memory included, must not reach the user
                self._fail(error)
        return [Draft.empty(context.device) for context in self._contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Hand the verdicts on."""
        self._tell(lambda session: session.observe(outcomes))

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, counted among those at work."""
        self._contexts = [self._contexts[row] for row in rows]
        self._tell(lambda session: session.select(rows))

    def stop(self) -> None:
        """Stop the session inside, if it was started."""
        if self._session is not None:
            session, self._session = self._session, None
            try:
                session.stop()
            except Exception as error:  # see propose
                if not self.has_failed:
                    self._fail(error)

    def _tell(self, news: Callable[[BatchSession], None]) -> None:
        if self._session is not None and not self.has_failed:
            try:
                with self._unmoved_randomness():
                    news(self._session)
            except Exception as error:  # see propose
                self._fail(error)

    def _unmoved_randomness(self) -> AbstractContextManager[None]:
        """Whatever the source draws, vanilla's random stream goes on as if it had not.

        In rejection drafts are drawn from that very stream: the tokens are not vanilla's there. A source
        that never draws is left alone, as putting the stream back would undo other threads' draws.
        """
        context = self._contexts[0]
        if context.selection == "rejection" or not self._source.may_draw:
            return nullcontext()
        return unmoved(context.device)

    def _fail(self, error: Exception) -> None:
        self.has_failed = True
        reason = str(error) if isinstance(error, DraftError) else f"{type(error).__name__}: {error}"
        self._on_failure(f"the draft source stopped ({reason})")
        self.stop()  # what it holds may be the very memory that ran out


def _check_draft(draft: object, max_tokens: int, context: Context) -> None:
    """Raise `DraftError` for anything that is not a draft of at most `max_tokens` tokens of the target's vocabulary."""
    if not isinstance(draft, Draft) or not isinstance(draft.token_ids, torch.Tensor):
        raise DraftError(f"it proposed a {type(draft).__name__}, not an hfspec Draft of a tensor of token ids")
    ids = draft.token_ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.dtype != torch.long:
        raise DraftError(f"it proposed ids of shape {list(ids.shape)} and {ids.dtype}; [1, num_tokens] int64 is needed")
    if ids.shape[1] > max_tokens:
        raise DraftError(f"it proposed {ids.shape[1]} tokens where at most {max_tokens} were asked for")
    if ids.numel() and not bool(((ids >= 0) & (ids < context.vocab_size)).all()):
        raise DraftError(f"it proposed ids outside the target's vocabulary of {context.vocab_size}")
    if ids.device != context.device:
        raise DraftError(f"it proposed ids on {ids.device}; the target's are on {context.device}")
    if draft.confidences and len(draft.confidences) != ids.shape[1]:
        raise DraftError(f"it proposed {ids.shape[1]} tokens with {len(draft.confidences)} confidences")
    if not all(isinstance(each, float | int) and math.isfinite(each) for each in draft.confidences):
        raise DraftError(f"its confidences {draft.confidences} are not finite numbers")
    if not isinstance(draft.caught_up, int) or draft.caught_up < 0:
        raise DraftError(f"it says that it read {draft.caught_up!r} tokens first; a count is needed")
    wanted = (ids.shape[1], context.vocab_size)
    if draft.probs is None:
        return
    if tuple(draft.probs.shape) != wanted:
        raise DraftError(f"its probabilities have shape {list(draft.probs.shape)}; {list(wanted)} is needed")
    # A distribution that does not sum to 1, nan included, would bias what is accepted.
    if not bool(((draft.probs.sum(dim=-1) - 1).abs() < 1e-3).all() & (draft.probs >= 0).all()):
        raise DraftError("its probabilities are not a distribution: each row must be 0 or more and sum to 1")
