"""The protocol between the round loop and whatever proposes tokens.

A `DraftSource` is shared: by calls, threads and targets. All that belongs to one row of one call lives in the
`DraftSession` that `start` returns. A source that can draft for several rows at once, sharing its work, also
has a `BatchSession`; for others the rows' sessions are asked one after the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from transformers import LogitsProcessorList
from transformers.utils import ModelOutput

from hfspec.rounds import Draft, Outcome, RoundBudget
from hfspec.sampling.noise import SeededNoise


class Peek(Protocol):
    """The noise of a seeded call, to be looked at."""

    def peek(self, like: torch.Tensor, position: int) -> torch.Tensor:
        """Noise of the `position`-th (0, 1, …) token from now, shaped as `like` `[1, vocab]`."""


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
        row: which row of the batch this is.
        inputs: what else the row was given, as `generate()` keywords: an encoder's input, images; a batch of one.
        encoder_outputs: of an encoder-decoder target, for this row.
        encoder: the module that made them.
    """

    vocab_size: int
    device: torch.device
    selection: Literal["greedy", "seeded", "rejection"] = "greedy"
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    noise: Peek = field(default_factory=SeededNoise)
    prompt_mask: torch.Tensor | None = None
    row: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict)
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


class BatchSession(ABC):
    """A source at work on several rows of a call."""

    @abstractmethod
    def propose(self, texts: Sequence[torch.Tensor], budget: RoundBudget) -> list[Draft]:
        """Draft what follows each row's text `[1, length]`, within `budget` for each."""

    @abstractmethod
    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn the verdict on each row's last draft."""

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

    def start_batch(self, contexts: Sequence[Context]) -> BatchSession:
        """Begin all rows of a call; to be overridden by a source that can share work between them."""
        sessions: list[DraftSession] = []
        try:
            for context in contexts:
                sessions.append(self.start(context))
        except BaseException:
            _stop_all(sessions)
            raise
        return _RowByRow(sessions)


class _RowByRow(BatchSession):
    """The rows' own sessions, asked in turn."""

    def __init__(self, sessions: list[DraftSession]) -> None:
        self._sessions = sessions

    def propose(self, texts: Sequence[torch.Tensor], budget: RoundBudget) -> list[Draft]:
        # What one row's confidence says about going on is no news about another row.
        each_budget = budget if len(texts) == 1 else RoundBudget(budget.num_tokens)
        return [session.propose(text, each_budget) for session, text in zip(self._sessions, texts, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(self._sessions, outcomes, strict=True):
            session.observe(outcome)

    def select(self, rows: Sequence[int]) -> None:
        for index in set(range(len(self._sessions))) - set(rows):
            self._sessions[index].stop()
        self._sessions = [self._sessions[row] for row in rows]

    def stop(self) -> None:
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
