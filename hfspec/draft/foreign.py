"""Sessions that others have written: what they are shown is a copy, and what they propose is checked."""

from collections.abc import Sequence

from hfspec.draft.base import CallView, Context, Session
from hfspec.draft.shape import checked
from hfspec.drafts import Draft
from hfspec.errors import DraftError
from hfspec.rounds import Outcomes, RoundBudget
from hfspec.texts import Texts


def trusted(session: Session, call: CallView) -> Session:
    """The session itself, if its class is hfspec's own, which proposes what it should; another one checked."""
    if type(session).__module__.startswith("hfspec."):
        return session
    return _Checked(session, call.contexts)


class _Checked(Session):
    def __init__(self, session: Session, contexts: Sequence[Context]) -> None:
        self._session = session
        self._contexts = list(contexts)

    def propose(self, texts: Texts, budget: RoundBudget) -> Draft:
        """Draft for every row.

        Raises:
            DraftError: what it proposed is no such draft.
        """
        context = self._contexts[0]
        draft = self._session.propose(texts.copy(), budget)
        draft = checked(draft, len(self._contexts), budget.num_tokens, context.vocab_size, context.device)
        caught_up: object = self._session.caught_up
        if not isinstance(caught_up, int) or caught_up < 0:
            raise DraftError(f"it says that it read {caught_up!r} tokens first; a count is needed")
        self.caught_up = caught_up
        return draft

    def read(self, texts: Texts, outcomes: Outcomes) -> None:
        """Hand the verdicts on."""
        self._session.read(texts.copy(), outcomes)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self._contexts = [self._contexts[row] for row in rows]
        self._session.select(rows)

    def stop(self) -> None:
        """Stop it."""
        self._session.stop()
