"""The nouns that pass between the parts of a round besides its `Draft`: budget, verified logits, outcomes.

Knows no part that makes or uses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers.utils import ModelOutput

from hfspec.drafts import Draft, Tree


@dataclass
class RoundBudget:
    """What one round may draft.

    Attributes:
        num_tokens: the most draft tokens a row (nodes, of a tree); 0 asks for a plain round.
        reads_confidence: whether `allows_another` wants to be asked after each token. That needs the
            confidence on the host, so it is false where reading it would stall a device.
        why_plain: why the round is to be a plain one.
        allows_trees: whether a node may have several children; where not, a tree is cut to its first path.
    """

    num_tokens: int
    reads_confidence: bool = False
    why_plain: str = ""
    allows_trees: bool = False

    def allows_another(self, *confidences: float) -> bool:
        """Say that a token was drafted with this confidence, one a row; ask whether to draft one more."""
        return True


@dataclass(frozen=True)
class Verified:
    """A target forward over the root (the last committed token) of each row and the draft behind it.

    Attributes:
        logits: `[rows, 1 + nodes, vocab]`; those of state `i` choose the token after the root (0) or node `i - 1`.
        outputs: the model's outputs; their last `1 + nodes` tokens are these.
        num_read: tokens a row that went into the forward.
        is_prompt: whether it was the prompt's forward, whose states vanilla reports whole.
        tree: of the draft, if it is one; of a single row where attentions are asked for.
    """

    logits: torch.Tensor
    outputs: ModelOutput
    num_read: int
    is_prompt: bool = False
    tree: Tree | None = None

    @property
    def num_drafted(self) -> int:
        """Draft tokens a row that can be judged by it."""
        return self.logits.shape[1] - 1

    def hidden_states_at(self, index: int, kind: str = "hidden_states") -> Any:
        """Per layer `[…, 1, hidden]`, as from a forward over that token alone."""
        if self.is_prompt:
            return self.outputs[kind]
        at = self._from_the_end(index)
        # Copies, as a slice would keep the states of the whole draft alive.
        return tuple(_copy(layer[..., layer.shape[-2] - at, :].unsqueeze(-2)) for layer in self.outputs[kind])

    def attentions_at(self, index: int, kind: str = "attentions") -> Any:
        """Per layer `[rows, heads, 1, slots]`, as from a forward over that token alone: later slots are not there."""
        if self.is_prompt:
            return self.outputs[kind]
        at = self._from_the_end(index)
        layers = self.outputs[kind]
        if self.tree is not None:  # what is before the root, and the way from there
            way = self.tree.ancestors[0, index].nonzero()[:, 0]
            num_states = self.logits.shape[1]
            return tuple(
                None
                if layer is None
                else torch.cat([layer[:, :, -at, :-num_states], layer[:, :, -at, way - num_states]], dim=-1)[:, :, None]
                for layer in layers
            )
        num_later = 0 if kind == "cross_attentions" else at - 1
        return tuple(
            layer
            if layer is None
            else _copy(layer[:, :, layer.shape[2] - at, : layer.shape[-1] - num_later][:, :, None])
            for layer in layers
        )

    def _from_the_end(self, index: int) -> int:
        return self.logits.shape[1] - index


def _copy(states: torch.Tensor) -> torch.Tensor:
    return states.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Outcome:
    """The verdict on one row's draft, on the host.

    Attributes:
        num_judged: draft tokens that were compared along the path: those accepted and, if any, the one rejected.
        path: the accepted nodes, from the root on; of a chain 0, 1, 2, …
        token_ids: the committed tokens: the path's, then the target's own (none where an accepted token ended the
            text).
        has_ended: whether the text is over.
    """

    num_judged: int
    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    has_ended: bool = False

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were taken over."""
        return len(self.path)

    @property
    def num_committed(self) -> int:
        """Tokens that the text has grown by."""
        return len(self.token_ids)

    @property
    def states(self) -> list[int]:
        """The states of a `Verified` from which the committed tokens were chosen: the root's, then the path's."""
        return [0, *(node + 1 for node in self.path)][: self.num_committed]

    @property
    def is_straight(self) -> bool:
        """Whether the accepted nodes are the draft's first, so that their slots are where they belong."""
        return self.path == tuple(range(len(self.path)))


@dataclass(frozen=True)
class Outcomes(Sequence[Outcome]):
    """The verdicts on all rows at work.

    Attributes:
        rows: one each.
        on_device: `[rows]`, how many tokens each has committed, on the target's device for who must not wait for it.
    """

    rows: tuple[Outcome, ...]
    on_device: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        return self.rows[row]

    @cached_property
    def num_committed(self) -> list[int]:
        """Tokens that each text has grown by."""
        return [outcome.num_committed for outcome in self.rows]

    def cut(self, num_tokens: int) -> "Outcomes":
        """The same after the first tokens only."""
        return Outcomes(
            tuple(
                Outcome(min(each.num_judged, num_tokens), each.path[:num_tokens], each.token_ids[:num_tokens])
                for each in self.rows
            )
        )

    def num_committed_on(self, device: torch.device) -> torch.Tensor:
        """The same, `[rows]`, on a device."""
        if self.on_device is None:
            return torch.tensor(self.num_committed, device=device)
        return self.on_device.to(device)


@dataclass(frozen=True)
class Round:
    """What happened in one round.

    Attributes:
        draft: what was proposed.
        outcomes: one for each row at work; rows in step have committed as many each.
        is_in_step: whether the rows were judged as one.
        at_work: the rows that had not ended before; of rows in step the others get padding.
        num_read: tokens a row that went through the target.
        caught_up: tokens a row that the source had to read first, beyond the one or two that a round leaves unread.
        draft_seconds, verify_seconds, seconds: drafting, the target's forward, the whole round.
    """

    draft: Draft
    outcomes: Sequence[Outcome]
    num_read: int
    draft_seconds: float
    verify_seconds: float
    seconds: float
    is_in_step: bool = False
    at_work: Sequence[int] = field(default_factory=tuple)
    caught_up: int = 0

    @cached_property
    def num_drafted(self) -> int:
        """Draft tokens of the row at work that has most."""
        return max(self.draft.lengths[row] for row in self.at_work)

    @property
    def num_rows(self) -> int:
        """Rows in the forwards."""
        return self.draft.num_rows

    @property
    def verdicts(self) -> list[tuple[tuple[float, ...], Outcome]]:
        """Confidences of a row's draft with what was judged of it; rows in step count as one.

        Of a tree none: what was judged at a depth is whether any of its nodes there is right.
        """
        confidences = self.draft.confidences if self.draft.parents is None else None
        has_confidences = isinstance(confidences, torch.Tensor)
        found = [
            (tuple(confidences[row].tolist()) if has_confidences else (), self.outcomes[row])  # type: ignore[index,union-attr]
            for row in self.at_work
            if self.draft.lengths[row]
        ]
        return found[:1] if self.is_in_step else found

    @property
    def tokens_per_row(self) -> float:
        """Committed tokens, on average of the rows."""
        return sum(outcome.num_committed for outcome in self.outcomes) / len(self.outcomes)
