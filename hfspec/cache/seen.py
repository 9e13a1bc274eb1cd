"""Which slots the nodes of a tree see: the text before, and what is on their path."""

from collections.abc import Sequence

import torch

from hfspec.cache.ledger import SpeculativeLayer, SpeculativeSlidingLayer
from hfspec.drafts import Tree


def seen_by_nodes(tree: Tree, text: torch.Tensor, layers: Sequence[SpeculativeLayer]) -> dict[str, torch.Tensor]:
    """For each kind of layer there is, which of the slots that it hands out are seen by a tree's states.

    Args:
        text: `[batch, slots]` bool, which of the slots written so far hold something of a row.

    Returns:
        `[batch, 1, states, slots + states]` bool, by the host's name of the kind; windows have fewer slots.
    """
    num_rows, num_slots = text.shape
    width, depths = tree.depths.shape[1], tree.depths[..., None]
    sees = torch.cat([text[:, None].expand(-1, width, -1), tree.ancestors], dim=-1)
    seen: dict[str, torch.Tensor] = {}
    for layer in layers:
        kind = "sliding_attention" if layer.is_sliding else "full_attention"
        if kind in seen:
            continue
        first = layer.first_visible(num_slots)
        visible = sees[..., first:]
        if isinstance(layer, SpeculativeSlidingLayer):  # such rows are packed: slots are as far apart as positions
            back = num_slots - torch.arange(first, num_slots, device=text.device)
            back = torch.cat([back.expand(num_rows, width, -1) + depths, depths - tree.depths[:, None]], dim=-1)
            visible = visible & (back < layer.sliding_window)
        seen[kind] = visible[:, None]
    return seen
