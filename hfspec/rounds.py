"""The nouns that pass between the parts of a round: budget, draft, verified logits, outcome.

Knows no part that makes or uses them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput


@dataclass
class RoundBudget:
    """What one round may draft.

    Attributes:
        num_tokens: the most draft tokens; 0 asks for a plain round.
        reads_confidence: whether `allows_another` wants to be asked after each token. That needs the
            confidence on the host, so it is false where reading it would stall a device.
    """

    num_tokens: int
    reads_confidence: bool = False

    def allows_another(self, confidence: float) -> bool:
        """Say that a token was drafted with this confidence; ask whether to draft one more."""
        return True


@dataclass(frozen=True)
class Draft:
    """The tokens proposed in one round: a chain, each following the one before.

    Attributes:
        token_ids: `[1, num_tokens]`, int64, on the target's device.
        probs: `[num_tokens, vocab]`, the law each token was really drawn from; `None` if they were chosen,
            not drawn (argmax, lookup), which counts as a law with all its weight on the token.
        confidences: for each token, how sure the source is, 0 … 1, in any scale of its own; may be empty.
        caught_up: tokens the source had to read first, beyond the one or two that a round leaves unread.
    """

    token_ids: torch.Tensor
    probs: torch.Tensor | None = None
    confidences: tuple[float, ...] = ()
    caught_up: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens are proposed."""
        return self.token_ids.shape[1]

    @classmethod
    def empty(cls, device: torch.device) -> "Draft":
        """A draft of no tokens: a plain round."""
        return cls(torch.empty(1, 0, dtype=torch.long, device=device))


@dataclass(frozen=True)
class Verified:
    """A target forward over the root (the last committed token) and the draft tokens after it.

    Attributes:
        logits: `[1, 1 + num_drafted, vocab]`; those at index i choose the token after i draft tokens.
        outputs: the model's outputs.
        is_prompt: whether it was the prompt's forward, whose states vanilla reports whole.
    """

    logits: torch.Tensor
    outputs: ModelOutput
    is_prompt: bool = False

    def hidden_states_at(self, index: int) -> Any:
        """Per layer `[1, 1, hidden]`, as from a forward over that token alone."""
        if self.is_prompt:
            return self.outputs.hidden_states
        # Copies, as a slice would keep the states of the whole draft alive.
        return tuple(_copy(layer[:, index : index + 1]) for layer in self.outputs.hidden_states)

    def attentions_at(self, index: int) -> Any:
        """Per layer `[1, heads, 1, length]`, without the columns of later draft tokens, whose weight is 0."""
        if self.is_prompt:
            return self.outputs.attentions
        num_later = self.logits.shape[1] - 1 - index
        return tuple(
            layer if layer is None else _copy(layer[:, :, index : index + 1, : layer.shape[-1] - num_later])
            for layer in self.outputs.attentions
        )


def _copy(states: torch.Tensor) -> torch.Tensor:
    return states.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Outcome:
    """The verdict on a draft: the first `num_judged` tokens were compared, the first `num_accepted` accepted."""

    num_judged: int
    num_accepted: int
    num_committed: int
