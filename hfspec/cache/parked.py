"""`ParkedRows`: rows of a cache set aside as they leave, and brought back where the whole cache is handed back.

A row is kept without its holes. What vanilla's cache has in the places of a prompt's left padding is kept from the
prompt's forward on, as rows may be packed in the meantime.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from hfspec.cache.ledger import SpeculativeCache, SpeculativeLayer
from hfspec.cache.rows import Rows

#: Keys and values of one row in one layer, `[heads, tokens, head_dim]` each.
_States = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Row:
    """One row: how many tokens it has read, the position of the next, and its last tokens' states in each layer."""

    num_tokens: int
    position: int
    layers: list[_States]


class ParkedRows:
    """The rows of a batch that are not in the cache now.

    Args:
        cache: with the prompt in it, and nothing else.
        device: where masks and positions are wanted.
        mask: `[rows, prompt_length]`, 0 at padding, which is at the left; `None` where there is none.
        counts_slots: as for `Rows`.
    """

    def __init__(
        self,
        cache: SpeculativeCache,
        device: torch.device,
        mask: torch.Tensor | None,
        num_rows: int,
        counts_slots: bool,
    ) -> None:
        self.num_rows = num_rows
        self._cache = cache
        self._device = device
        # Layers that share another's states are never written.
        self._layers: list[SpeculativeLayer] = [layer for layer in cache.layers if layer.is_initialized]
        self._counts_slots = counts_slots
        self._rows: dict[int, _Row] = {}
        self._num_padding = [0] * num_rows if mask is None else (mask == 0).sum(dim=-1).tolist()
        most = max(self._num_padding)
        # Of each layer, from its first slot on: that is 0, or as far back as a window reaches.
        self._starts = [layer.start for layer in self._layers]
        self._padding = [
            [_first(states, most - layer.start) for states in (layer.keys, layer.values)] for layer in self._layers
        ]

    def put(self, row: int, rows: Rows, at: int) -> None:
        """Set a row of the batch aside, which is row `at` of those in the cache."""
        slots = rows.slots_of(at)
        layers = []
        for layer in self._layers:
            wanted = slots.to(layer.keys.device)
            if layer.start:
                wanted = wanted[wanted >= layer.start] - layer.start
            layers.append((layer.keys[at].index_select(1, wanted), layer.values[at].index_select(1, wanted)))
        self._rows[row] = _Row(len(slots), rows.positions[at], layers)

    def bring_back(self, rows: Sequence[int]) -> Rows:
        """Let the cache hold these rows, and no others: each at the right, so that it can be read on."""
        back = [self._rows[row] for row in rows]
        most = max(row.num_tokens for row in back)
        for index, layer in enumerate(self._layers):
            kept = most - layer.first_visible(most)
            layer.fill(*_stacked([row.layers[index] for row in back], kept), length=most)
        holes, mask = [most - row.num_tokens for row in back], None
        if any(holes):
            first = torch.tensor(holes, device=self._device)[:, None]
            mask = (torch.arange(most, device=self._device) >= first).long()
        return Rows(self._cache, [row.position for row in back], self._device, mask, self._counts_slots, most)

    def bring_all_back(self) -> None:
        """Let the cache be vanilla's: a token of any row is where it is in the padded text."""
        length = self._rows[0].num_tokens + self._num_padding[0]
        for index, layer in enumerate(self._layers):
            kept = length - layer.first_visible(length)
            whole = [self._with_padding(row, index) for row in range(self.num_rows)]
            layer.fill(*_stacked(whole, kept), length=length)
            for row in self._rows.values():
                del row.layers[0]
        self._rows = {}

    def _with_padding(self, row: int, index: int) -> _States:
        """A row in one layer, those before which have been handed over already."""
        num_padding = max(0, self._num_padding[row] - self._starts[index])
        before = [each[row, :, :num_padding] for each in self._padding[index]]
        keys, values = (torch.cat(pair, dim=1) for pair in zip(before, self._rows[row].layers[0], strict=True))
        return keys, values


def _first(states: torch.Tensor, count: int) -> torch.Tensor:
    """A copy of the first slots of `[batch, heads, slots, head_dim]`."""
    return states[..., : max(0, count), :].clone()


def _stacked(rows: Sequence[_States], kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `kept` slots of all rows, `[batch, heads, kept, head_dim]`; what a row lacks before them is 0."""

    def fitted(states: torch.Tensor) -> torch.Tensor:
        return pad(states[:, max(0, states.shape[1] - kept) :], (0, 0, max(0, kept - states.shape[1]), 0))

    keys, values = (torch.stack([fitted(states) for states in each]) for each in zip(*rows, strict=True))
    return keys, values
