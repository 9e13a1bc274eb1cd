"""The nouns that pass between the parts of a round: budget, draft, verified logits, outcome.

Knows no part that makes or uses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import ModelOutput


@dataclass
class RoundBudget:
    """What one round may draft.

    Attributes:
        num_tokens: the most draft tokens a row; 0 asks for a plain round.
        reads_confidence: whether `allows_another` wants to be asked after each token. That needs the
            confidence on the host, so it is false where reading it would stall a device.
        why_plain: why the round is to be a plain one.
    """

    num_tokens: int
    reads_confidence: bool = False
    why_plain: str = ""

    def allows_another(self, *confidences: float) -> bool:
        """Say that a token was drafted with this confidence, one a row; ask whether to draft one more."""
        return True


@dataclass(frozen=True)
class Draft:
    """The tokens proposed for one row in one round: a chain, each following the one before.

    Attributes:
        token_ids: `[1, num_tokens]`, int64, on the target's device.
        probs: `[num_tokens, vocab]`, the distribution each token was really drawn from; `None` if they were chosen,
            not drawn (argmax, lookup), which counts as a distribution with all its weight on the token.
        confidences: for each token, how sure the source is, 0 … 1, in any scale of its own; may be empty.
        caught_up: tokens the source had to read first, beyond the one or two that a round leaves unread.
        is_padding: whether no source proposed it: what surely comes after the end of a row.
    """

    token_ids: torch.Tensor
    probs: torch.Tensor | None = None
    confidences: tuple[float, ...] = ()
    caught_up: int = 0
    is_padding: bool = False

    @property
    def num_tokens(self) -> int:
        """How many tokens are proposed."""
        return self.token_ids.shape[1]

    def cut(self, num_tokens: int) -> "Draft":
        """The same without what comes after the first `num_tokens`."""
        if num_tokens >= self.num_tokens:
            return self
        probs = None if self.probs is None else self.probs[:num_tokens]
        return replace(
            self, token_ids=self.token_ids[:, :num_tokens], probs=probs, confidences=self.confidences[:num_tokens]
        )

    @classmethod
    def empty(cls, device: torch.device) -> "Draft":
        """A draft of no tokens: a plain round."""
        return cls(torch.empty(1, 0, dtype=torch.long, device=device))


@dataclass(frozen=True)
class Verified:
    """A target forward over the root (the last committed token) of each row and the draft tokens after it.

    Attributes:
        logits: `[rows, 1 + num_drafted, vocab]`; those at index i choose the token after i draft tokens.
        outputs: the model's outputs; their last `1 + num_drafted` tokens are these.
        num_read: tokens a row that went into the forward.
        is_prompt: whether it was the prompt's forward, whose states vanilla reports whole.
    """

    logits: torch.Tensor
    outputs: ModelOutput
    num_read: int
    is_prompt: bool = False

    @property
    def num_drafted(self) -> int:
        """Draft tokens a row that can be judged by it."""
        return self.logits.shape[1] - 1

    def logits_at(self, index: int) -> torch.Tensor:
        """`[rows, vocab]`: those that choose the token after `index` draft tokens."""
        return self.logits[:, index]

    def of_rows(self, rows: slice) -> "Verified":
        """The same for some of the rows; the outputs stay whole."""
        return replace(self, logits=self.logits[rows])

    def hidden_states_at(self, index: int, kind: str = "hidden_states") -> Any:
        """Per layer `[…, 1, hidden]`, as from a forward over that token alone."""
        if self.is_prompt:
            return self.outputs[kind]
        at = self._from_the_end(index)
        # Copies, as a slice would keep the states of the whole draft alive.
        return tuple(_copy(layer[..., layer.shape[-2] - at, :].unsqueeze(-2)) for layer in self.outputs[kind])

    def attentions_at(self, index: int, kind: str = "attentions") -> Any:
        """Per layer `[rows, heads, 1, length]`, without the columns of later draft tokens, whose weight is 0."""
        if self.is_prompt:
            return self.outputs[kind]
        at = self._from_the_end(index)
        num_later = 0 if kind == "cross_attentions" else at - 1
        return tuple(
            layer
            if layer is None
            else _copy(layer[:, :, layer.shape[2] - at, : layer.shape[-1] - num_later][:, :, None])
            for layer in self.outputs[kind]
        )

    def _from_the_end(self, index: int) -> int:
        return self.logits.shape[1] - index


def _copy(states: torch.Tensor) -> torch.Tensor:
    return states.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Outcome:
    """The verdict on a draft: the first `num_judged` tokens were compared, the first `num_accepted` accepted."""

    num_judged: int
    num_accepted: int
    num_committed: int


@dataclass(frozen=True)
class Round:
    """What happened in one round.

    Attributes:
        drafts: one for each row at work.
        outcomes: one for each row at work; rows in lock-step have the same.
        is_lockstep: whether the rows were judged as one.
        num_read: tokens a row that went through the target.
        draft_seconds, verify_seconds, seconds: drafting, the target's forward, the whole round.
    """

    drafts: Sequence[Draft]
    outcomes: Sequence[Outcome]
    is_lockstep: bool
    num_read: int
    draft_seconds: float
    verify_seconds: float
    seconds: float

    @property
    def num_rows(self) -> int:
        """Rows at work."""
        return len(self.drafts)

    @property
    def num_drafted(self) -> int:
        """Draft tokens of the row that has most."""
        return max(draft.num_tokens for draft in self.drafts)

    @property
    def caught_up(self) -> int:
        """Tokens that the source had to read first."""
        return max(draft.caught_up for draft in self.drafts)

    @property
    def verdicts(self) -> list[tuple[Draft, Outcome]]:
        """Drafts with what was judged of them, without padding; rows in lock-step count as one."""
        pairs = [
            (draft, outcome)
            for draft, outcome in zip(self.drafts, self.outcomes, strict=True)
            if draft.num_tokens and not draft.is_padding
        ]
        return pairs[:1] if self.is_lockstep else pairs

    @property
    def tokens_per_row(self) -> float:
        """Committed tokens, on average of the rows."""
        return sum(outcome.num_committed for outcome in self.outcomes) / self.num_rows
