"""Keeps a failing draft source from failing the call: its errors end drafting.

The target needs no draft to be right, so whatever a source does wrong costs speed alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from hfspec.draft.base import CallView, DraftSource, Session
from hfspec.draft.foreign import trusted
from hfspec.drafts import Draft
from hfspec.errors import DraftError
from hfspec.rounds import Outcomes, RoundBudget
from hfspec.sampling.devices import unmoved
from hfspec.texts import Texts


class Guard:
    """A source's session, which proposes nothing any more once it has failed.

    Args:
        source: started only when first asked for a draft, so that a call which drafts nothing pays nothing.
        on_failure: told the reason, once.
    """

    def __init__(self, source: DraftSource, call: CallView, on_failure: Callable[[str], None]) -> None:
        self._source = source
        self._call = call
        self._on_failure = on_failure
        self._session: Session | None = None
        self._rows = list(range(len(call.contexts)))
        self._has_proposed = False
        self.has_failed = False

    @property
    def caught_up(self) -> int:
        """See `Session.caught_up`, of the last draft."""
        return self._session.caught_up if self._session is not None and self._has_proposed else 0

    def propose(self, texts: Texts, budget: RoundBudget) -> Draft:
        """A draft for the rows at work: an empty one for a budget of 0 and after a failure."""
        self._has_proposed = False
        if budget.num_tokens > 0 and not self.has_failed:
            try:
                with self._unmoved_randomness():
                    if self._session is None:
                        self._session = self._started()
                    draft = self._session.propose(texts, budget)
                self._has_proposed = True
                return draft
            except Exception as error:  # any fault of a source, out of memory included, must not reach the user
                self._fail(error)
        return Draft.empty(len(self._rows), texts.device)

    def read(self, texts: Texts, outcomes: Outcomes) -> None:
        """Hand the verdicts on a draft on."""
        if self._has_proposed:
            self._tell(lambda session: session.read(texts, outcomes))

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, counted among those at work."""
        self._rows = [self._rows[row] for row in rows]
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

    def _started(self) -> Session:
        """A session of the rows that are at work by now."""
        call = CallView([self._call.contexts[row] for row in self._rows], self._call.noise)
        return trusted(self._source.start_batch(call), call)

    def _tell(self, news: Callable[[Session], None]) -> None:
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
        context = self._call.contexts[0]
        if context.selection == "rejection" or not self._source.may_draw:
            return nullcontext()
        return unmoved(context.device)

    def _fail(self, error: Exception) -> None:
        self.has_failed = True
        self._has_proposed = False
        reason = str(error) if isinstance(error, DraftError) else f"{type(error).__name__}: {error}"
        self._on_failure(f"the draft source stopped ({reason})")
        self.stop()  # what it holds may be the very memory that ran out
