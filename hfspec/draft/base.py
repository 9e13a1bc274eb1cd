"""The protocol between the round loop and whatever proposes tokens.

A `DraftSource` is shared: by calls, threads and targets. All that belongs to one call lives in the
`DraftSession` that `start` returns.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import LogitsProcessorList

from hfspec.rounds import Draft, Outcome, RoundBudget
from hfspec.sampling.noise import SeededNoise


@dataclass(frozen=True)
class Context:
    """What a source may know of the call it drafts for.

    Attributes:
        vocab_size: width of the target's logits; a draft token id is below it.
        device: where the target's ids and logits are.
        selection: how the target will choose: `"greedy"`, `"seeded"` (sampling; the noise can be peeked at),
            or `"rejection"` (draw the draft from its own law and hand over `probs`).
        processors: the call's logits processors.
        noise: the noise of a seeded call.
        prompt_mask: `[batch, prompt_length]`, 0 where the prompt is padding; `None` if nowhere.
    """

    vocab_size: int
    device: torch.device
    selection: Literal["greedy", "seeded", "rejection"] = "greedy"
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    noise: SeededNoise = field(default_factory=SeededNoise)
    prompt_mask: torch.Tensor | None = None


class DraftSession(ABC):
    """A source at work in one call."""

    @abstractmethod
    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        """Draft what follows `input_ids` `[1, length]` (prompt and all committed tokens), within `budget`."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 - a source that learns nothing needs nothing
        """Learn the verdict on the last draft. The committed ids come with the next `propose`."""

    def stop(self) -> None:  # noqa: B027 - most sources hold nothing that must be released
        """The call is over, in whatever way."""


class DraftSource(ABC):
    """Anything that proposes tokens. `start` is called once per `generate()` call.

    Attributes:
        may_draw: whether it may draw from torch's default generators. They are then put back after each
            draft, so that vanilla's stream goes on undisturbed; say `False` where it never does, or draws
            from a generator of its own: putting back is not safe while other threads draw.
    """

    may_draw: bool = True

    @abstractmethod
    def start(self, context: Context) -> DraftSession:
        """Begin a call."""
