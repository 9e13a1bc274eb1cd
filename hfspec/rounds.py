"""The nouns that pass between the parts of a round, each for all rows: budget, draft, verified logits, outcomes.

Knows no part that makes or uses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers.utils import ModelOutput


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
class Draft:
    """What is proposed in one round, for all rows at work: a chain each, or a tree.

    `Draft(torch.tensor([[5, 7]]))` proposes 5 and behind it 7, in a batch of one row.

    Attributes:
        token_ids: `[rows, nodes]`, int64, on the target's device; -1 where a row has no such node. Nodes that are
            missing are a chain's last; of a tree they have no children.
        parents: `[rows, nodes]`, int64: the node that each follows, -1 the root (the last committed token), always
            below the node's own index. `None`: chains, each node following the one before.
        probs: `[rows, nodes, vocab]`, the distribution each token was really drawn from; for children of one node,
            drawn without replacement, the one that was left by those before. `None` if they were chosen, not drawn
            (argmax, lookup), which counts as a distribution with all its weight on the token. For a single row
            `[nodes, vocab]` will do.
        confidences: `[rows, nodes]`, how sure the source is of each token, 0 … 1, in any scale of its own, or `None`.
            For a single row a tuple of numbers will do.
        lengths: how many nodes each row has; all of them, if not said.
        depth: the most nodes on a path from the root; as many as there are nodes, if not said.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor | None = None
    probs: torch.Tensor | None = None
    confidences: torch.Tensor | Sequence[float] | None = None
    lengths: tuple[int, ...] = ()
    depth: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.confidences, list | tuple):
            object.__setattr__(self, "confidences", _of_one_row(self.confidences))
        if isinstance(self.probs, torch.Tensor) and self.probs.dim() == 2:
            object.__setattr__(self, "probs", self.probs[None])
        if isinstance(self.token_ids, torch.Tensor) and self.token_ids.dim() == 2:
            num_rows, num_nodes = self.token_ids.shape
            object.__setattr__(self, "lengths", self.lengths or (num_nodes,) * num_rows)
            object.__setattr__(self, "depth", self.depth or num_nodes)

    @property
    def num_rows(self) -> int:
        """Rows at work."""
        return self.token_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """The most nodes that a row has."""
        return self.token_ids.shape[1]

    def cut(self, lengths: Sequence[int]) -> "Draft":
        """The same without what comes behind the first `lengths[i]` nodes of row `i`."""
        lengths = tuple(min(pair) for pair in zip(self.lengths, lengths, strict=True))
        if lengths == self.lengths:
            return self
        most = max(lengths)
        token_ids = self.token_ids[:, :most]
        if min(lengths) < most:
            token_ids = token_ids.clone()
            for row, length in enumerate(lengths):
                token_ids[row, length:] = -1

        def first(values: Any) -> Any:
            return None if values is None else values[:, :most]

        parents, probs, confidences = map(first, (self.parents, self.probs, self.confidences))
        return Draft(token_ids, parents, probs, confidences, lengths, min(self.depth, most))

    def no_deeper(self, depths: Sequence[int]) -> "Draft":
        """The same tree without the nodes below depth `depths[i]` of row `i`: they become nodes that are none."""
        if self.tree is None or self.parents is None:
            return self.cut(depths)
        if min(depths) >= self.depth:
            return self
        is_below = self.tree.depths[:, 1:] > torch.tensor(depths, device=self.parents.device)[:, None]
        token_ids, parents = (each.masked_fill(is_below, -1) for each in (self.token_ids, self.parents))
        return Draft(token_ids, parents, self.probs, self.confidences, self.lengths, min(self.depth, max(depths)))

    def first_paths(self) -> "Draft":
        """Chains: of each row's tree the path of first children. Looks at the shape on the host."""
        if self.parents is None:
            return self
        shapes = zip(self.parents.tolist(), self.lengths, strict=True)
        paths = [_first_path(parents[:length]) for parents, length in shapes]
        most = max(map(len, paths))
        order = torch.tensor([path + [0] * (most - len(path)) for path in paths], device=self.token_ids.device)

        def along(values: Any) -> Any:
            if values is None:
                return None
            index = order.view(*order.shape, *(1,) * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
            return values.gather(1, index.to(values.device))

        whole = (most,) * len(paths)
        chains = Draft(along(self.token_ids), None, along(self.probs), along(self.confidences), whole)
        return chains.cut([len(path) for path in paths])

    def of_row(self, row: int) -> "Draft":
        """One row's."""

        def mine(values: Any) -> Any:
            return None if values is None else values[row : row + 1]

        shares = (self.token_ids, self.parents, self.probs, self.confidences)
        token_ids, parents, probs, confidences = map(mine, shares)
        return Draft(token_ids, parents, probs, confidences, (self.lengths[row],), self.depth)

    @cached_property
    def tree(self) -> "Tree | None":
        """Who descends from whom; `None` for chains."""
        return None if self.parents is None else Tree.of(self.parents)

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Draft":
        """A draft of no tokens: a plain round."""
        return cls(torch.empty(num_rows, 0, dtype=torch.long, device=device))


def _of_one_row(confidences: Sequence[float]) -> Any:
    """A row's confidences `[1, nodes]`; what are no numbers stay as they are, and are found out by who checks drafts."""
    if not confidences:
        return None
    is_number = all(isinstance(each, float | int) for each in confidences)
    return torch.tensor([confidences], dtype=torch.float32) if is_number else confidences


def _first_path(parents: list[int]) -> list[int]:
    path: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return path


@dataclass(frozen=True)
class Tree:
    """The shape of a draft, over *states*: 0 is the root, `1 + n` is node `n`.

    Attributes:
        parents: `[rows, states]`, the state before each; the root's is itself.
        ancestors: `[rows, states, states]` bool: state `i` has `j` on its path from the root, itself included.
        depths: `[rows, states]`, 0 for the root.
    """

    parents: torch.Tensor
    ancestors: torch.Tensor
    depths: torch.Tensor

    @classmethod
    def of(cls, parents: torch.Tensor) -> "Tree":
        """Work it out from a draft's `parents` `[rows, nodes]`, without waiting for the device."""
        states = torch.nn.functional.pad(parents + 1, (1, 0))
        num_states = states.shape[1]
        reach = torch.eye(num_states, device=parents.device).expand(len(states), -1, -1).clone()
        reach.scatter_(2, states[:, :, None], 1.0)
        for _ in range((num_states - 1).bit_length()):  # each step doubles how far up it sees
            reach = (reach @ reach).clamp_(max=1.0)
        ancestors = reach > 0
        return cls(states, ancestors, ancestors.sum(dim=-1) - 1)


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
        return tuple(_copy(layer[:, layer.shape[1] - at][:, None]) for layer in self.outputs[kind])

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
    #: Draft tokens of the row that has most.
    num_drafted: int = 0

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
