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
        self._padding = [
            [_first(layer, row, count) for layer in self._layers] for row, count in enumerate(self._num_padding)
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
        for layer in self._layers:
            kept = length - layer.first_visible(length)
            # What is handed over is let go of at once.
            whole = [_joined(self._padding[row].pop(0), self._rows[row].layers.pop(0)) for row in range(self.num_rows)]
            layer.fill(*_stacked(whole, kept), length=length)
        self._rows = {}


def _first(layer: SpeculativeLayer, row: int, count: int) -> _States:
    """A copy of what a row has in its first slots, as far back as a window reaches."""
    count = max(0, count - layer.start)
    return layer.keys[row, :, :count].clone(), layer.values[row, :, :count].clone()


def _joined(before: _States, behind: _States) -> _States:
    keys, values = (torch.cat(pair, dim=1) for pair in zip(before, behind, strict=True))
    return keys, values


def _stacked(rows: Sequence[_States], kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `kept` slots of all rows, `[batch, heads, kept, head_dim]`; what a row lacks before them is 0."""

    def fitted(states: torch.Tensor) -> torch.Tensor:
        return pad(states[:, max(0, states.shape[1] - kept) :], (0, 0, max(0, kept - states.shape[1]), 0))

    keys, values = (torch.stack([fitted(states) for states in each]) for each in zip(*rows, strict=True))
    return keys, values
