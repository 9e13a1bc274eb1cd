"""The protocol between the round loop and whatever proposes tokens.

A `DraftSource` is shared: by calls, threads and targets. All that belongs to one row of one call lives in the
`DraftSession` that `start` returns. A source that drafts for several rows at once, sharing its work, gives a `Session`
by `start_batch`; for others the rows' sessions are asked one after the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from transformers import LogitsProcessorList
from transformers.utils import ModelOutput

from hfspec.draft.shape import checked, joined
from hfspec.drafts import Draft
from hfspec.rounds import Outcome, Outcomes, RoundBudget
from hfspec.sampling.noise import BatchNoise
from hfspec.texts import Texts


class Peek(Protocol):
    """The noise of a seeded call, to be looked at."""

    def peek(self, like: torch.Tensor, position: int) -> torch.Tensor:
        """Noise of the `position`-th (0, 1, …) token from now, shaped as `like` `[1, vocab]`."""


class RowsPeek(Protocol):
    """The same for several rows."""

    def peek(self, rows: Sequence[int], position: int, like: torch.Tensor) -> torch.Tensor:
        """Noise `[rows, vocab]` of each of these rows' `position`-th token from now, shaped as `like`."""


@dataclass(frozen=True)
class Context:
    """What a source may know of the call, and of the row, that it drafts for.

    Attributes:
        vocab_size: width of the target's logits; a draft token id is below it.
        device: where the target's ids and logits are.
        selection: how the target will choose: `"greedy"`, `"seeded"` (sampling; the noise can be peeked at),
            or `"rejection"` (draw the draft from its own distribution and hand over `probs`).
        processors: the call's logits processors.
        noise: the noise of a seeded call.
        prompt_mask: `[1, prompt_length]`, 0 where the prompt holds what is no text (padding, places of images);
            `None` if nowhere.
        prompt_length: ids of the prompt, padding and places of images included; 0 where nobody has said so.
        row: which row of the batch this is.
        max_read: the most ids that the call wants read in one forward, where it limits that; `None` for any number.
        inputs: what else the row was given, as `generate()` keywords: an encoder's input, images; a batch of one.
        token_types: `[1, prompt_length]`, what kind of token each id of the prompt is, where the call says so.
        encoder_outputs: of an encoder-decoder target, for this row.
        encoder: the module that made them.
    """

    vocab_size: int
    device: torch.device
    selection: Literal["greedy", "seeded", "rejection"] = "greedy"
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    noise: Peek = field(default_factory=lambda: BatchNoise(1).share())
    prompt_mask: torch.Tensor | None = None
    prompt_length: int = 0
    row: int = 0
    max_read: int | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    token_types: torch.Tensor | None = None
    encoder_outputs: ModelOutput | None = None
    encoder: torch.nn.Module | None = None


class DraftSession(ABC):
    """A source at work on one row of a call."""

    @abstractmethod
    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        """Draft what follows `input_ids` `[1, length]` (prompt and all committed tokens), within `budget`."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 - a source that learns nothing needs nothing
        """Learn the verdict on the last draft. The committed ids come with the next `propose`."""

    def stop(self) -> None:  # noqa: B027 - most sources hold nothing that must be released
        """The row is over, in whatever way."""


@dataclass(frozen=True)
class CallView:
    """What a source may know of a call, all its rows together.

    Attributes:
        contexts: one a row.
        noise: of a seeded call, all rows'.
    """

    contexts: Sequence[Context]
    noise: "RowsPeek"


class Session(ABC):
    """A source at work on all rows of a call that go on.

    Attributes:
        caught_up: tokens a row that the last `propose` had to read first, beyond the one or two that a round leaves
            unread: they are no part of what a draft costs.
    """

    caught_up: int = 0

    @abstractmethod
    def propose(self, texts: Texts, budget: RoundBudget) -> Draft:
        """Draft what follows each row's text, within `budget` for each."""

    @abstractmethod
    def read(self, texts: Texts, outcomes: Outcomes) -> None:
        """Learn the verdict on each row's last draft, and what was committed: the texts have grown by it."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, counted among those at work."""

    @abstractmethod
    def stop(self) -> None:
        """The call is over, in whatever way."""


class DraftSource(ABC):
    """Anything that proposes tokens. `start` is called once for each row of a `generate()` call.

    Attributes:
        may_draw: whether it may draw from torch's default generators. Say `True` where it does: they are then
            put back after each draft, so that vanilla's stream goes on undisturbed. Better draw from a generator
            of your own: putting back is not safe while other threads draw.
    """

    may_draw: bool = False

    @abstractmethod
    def start(self, context: Context) -> DraftSession:
        """Begin a row."""

    def start_batch(self, call: CallView) -> Session:
        """Begin all rows of a call; to be overridden by a source that can share work between them."""
        sessions: list[DraftSession] = []
        try:
            for context in call.contexts:
                sessions.append(self.start(context))
        except BaseException:
            _stop_all(sessions)
            raise
        return RowByRow(sessions, call.contexts)


class RowByRow(Session):
    """The rows' own sessions, asked in turn. What each proposes is checked, as anybody may have written it."""

    def __init__(self, sessions: list[DraftSession], contexts: Sequence[Context]) -> None:
        self._sessions = sessions
        self._contexts = list(contexts)

    def propose(self, texts: Texts, budget: RoundBudget) -> Draft:
        """Draft for every row."""
        # What one row's confidence says about going on is no news about another row.
        num_rows = len(self._sessions)
        each_budget = budget if num_rows == 1 else RoundBudget(budget.num_tokens, allows_trees=budget.allows_trees)
        drafts = []
        for row, (session, context) in enumerate(zip(self._sessions, self._contexts, strict=True)):
            if texts.has_ended[row]:  # it gets padding, and is not asked
                drafts.append(Draft.empty(1, context.device))
                continue
            # A copy: what a source does with it is its own affair.
            draft = session.propose(texts.of(row).clone(), each_budget)
            drafts.append(checked(draft, 1, budget.num_tokens, context.vocab_size, context.device))
        return joined(drafts)

    def read(self, texts: Texts, outcomes: Outcomes) -> None:
        """Learn what was committed."""
        for session, outcome in zip(self._sessions, outcomes.rows, strict=True):
            session.observe(outcome)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        for index in set(range(len(self._sessions))) - set(rows):
            self._sessions[index].stop()
        self._sessions = [self._sessions[row] for row in rows]
        self._contexts = [self._contexts[row] for row in rows]

    def stop(self) -> None:
        """Stop all of them."""
        sessions, self._sessions = self._sessions, []
        _stop_all(sessions)


def _stop_all(sessions: Sequence[DraftSession]) -> None:
    """Stop each of them, whatever another does; the first error is raised at the end."""
    errors: list[Exception] = []
    for session in sessions:
        try:
            session.stop()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
