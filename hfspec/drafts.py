"""`Draft` and `Tree`: what is proposed in one round, for all rows, and its shape. Knows nobody who makes or uses it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


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
    """A row's confidences `[1, nodes]`; what are no numbers stay as they are, for who checks drafts to find out."""
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
