"""`Rows`: one cache for rows that are read at different paces (DESIGN §5).

A forward writes the same slots for every row. Where a row keeps fewer of them than another, it has *holes*: slots
that its mask hides, as left padding is hidden, while its tokens' positions go on without a gap. For models that
count slots (windows, ALiBi), and now and then for all, the rows are packed: each row's tokens end to end, at the
right. Masks stay two-dimensional, which every model and every attention implementation takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hfspec.cache.ledger import SpeculativeCache
from hfspec.cache.rollback import Rollback

#: Holes that may add up before rows are packed: an eighth of the slots, and at least this many.
_BEARABLE_SHARE, _BEARABLE_HOLES = 8, 32


@dataclass(frozen=True)
class Mark:
    """How the rows stood at one time."""

    num_slots: int
    positions: list[int]
    num_tokens: list[int]
    mask: torch.Tensor | None
    has_inner_holes: bool
    num_packs: int


class Rows:
    """Which slots of a cache hold which row's tokens, and at what position each row goes on.

    Args:
        cache: a `SpeculativeCache`; with recurrent layers for a single row only.
        positions: for each row, the position of the token it reads next.
        device: where masks and positions are wanted.
        mask: `[batch, slots]`, 0 where a slot holds nothing of the row; `None` where every slot does.
        num_slots: slots that the cache holds already.
        counts_slots: whether the model takes the distance between slots for a distance in the text, so that
            holes must be closed at once.
    """

    def __init__(
        self,
        cache: SpeculativeCache,
        positions: Sequence[int],
        device: torch.device,
        mask: torch.Tensor | None = None,
        counts_slots: bool = True,
        num_slots: int = 0,
    ) -> None:
        self.positions = list(positions)
        self._cache = cache
        self._device = device
        self._mask = mask
        self._rollback = Rollback(cache, num_slots if mask is None else mask.shape[1])
        self._num_tokens = [num_slots] * len(self.positions) if mask is None else mask.sum(dim=-1).tolist()
        self._counts_slots = counts_slots
        self._has_inner_holes = False
        self._num_packs = 0

    @property
    def num_slots(self) -> int:
        """Slots written in every row."""
        return self._rollback.num_read

    def open(self, lengths: Sequence[int], to_the_right: bool = False) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Prepare a forward in which row `i` reads `lengths[i]` tokens, filled up to the longest.

        Args:
            to_the_right: whether the tokens stand at the right end, the filling before them, as a prompt's do.
                That parts them from what was read before, so it is for the first forward only.

        Returns:
            The mask `[batch, slots + width]` (`None`: nothing to hide) and the position ids `[batch, width]`.
        """
        width = max(lengths)
        if self._mask is None and len({*zip(self.positions, lengths, strict=True)}) == 1:
            return None, self._open_evenly(width)
        columns = torch.arange(width, device=self._device)
        counts = torch.tensor(lengths, device=self._device)[:, None]
        first = width - counts if to_the_right else torch.zeros_like(counts)
        steps = (columns - first).clamp(min=0).minimum(counts - 1)
        position_ids = torch.tensor(self.positions, device=self._device)[:, None] + steps

        if self._mask is not None or min(lengths) < width:
            self._has_inner_holes |= min(lengths) < width and not to_the_right
            new = (columns >= first) & (columns < first + counts)
            self._mask = torch.cat([self._full_mask(), new.long()], dim=-1)
        self._rollback.num_read += width
        self.positions = [position + length for position, length in zip(self.positions, lengths, strict=True)]
        self._num_tokens = [before + length for before, length in zip(self._num_tokens, lengths, strict=True)]
        return self._mask, position_ids

    def _open_evenly(self, width: int) -> torch.Tensor:
        """Where all rows are alike there is nothing to hide, and the position ids are known without the device."""
        start = self.positions[0]
        num_rows = len(self.positions)
        self._rollback.num_read += width
        self.positions = [start + width] * num_rows
        self._num_tokens = [before + width for before in self._num_tokens]
        return torch.arange(start, start + width, device=self._device).expand(num_rows, -1)

    def close(self, lengths: Sequence[int], kept: Sequence[int]) -> None:
        """After a forward over `lengths[i]` tokens of row `i`, filled up at the right: keep the first `kept[i]`."""
        width = max(lengths)
        rejected = [length - each for length, each in zip(lengths, kept, strict=True)]
        self._forget([width - each for each in kept], rejected)

    def forget(self, counts: Sequence[int]) -> None:
        """Let row `i` forget its last `counts[i]` tokens, which are in its last slots."""
        self._forget(counts, counts)

    def hide(self, num_slots: int) -> None:
        """Let every row forget its last tokens, so many, but leave their slots where they are, as holes."""
        self._mask = self._full_mask().clone()
        self._mask[:, self.num_slots - num_slots :] = 0
        self.positions = [position - num_slots for position in self.positions]
        self._num_tokens = [number - num_slots for number in self._num_tokens]
        self._has_inner_holes = True
        self._pack_if_needed()

    def mark(self) -> Mark:
        """How the rows stand, for `back_to`."""
        return Mark(
            self.num_slots,
            self.positions,
            self._num_tokens,
            self._mask,
            self._has_inner_holes,
            self._num_packs,
        )

    def back_to(self, mark: Mark) -> None:
        """Be as when marked, whatever was read since, even in part; unless rows were packed, which leaves no holes."""
        if mark.num_packs != self._num_packs:
            return
        for layer in self._cache.layers:
            layer.rollback(mark.num_slots)
        self._rollback.num_read = mark.num_slots
        self.positions, self._num_tokens = mark.positions, mark.num_tokens
        self._mask, self._has_inner_holes = mark.mask, mark.has_inner_holes

    def checkpoint(self) -> None:
        """Everything read so far is committed."""
        self._rollback.checkpoint()

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.positions = [self.positions[row] for row in rows]
        self._num_tokens = [self._num_tokens[row] for row in rows]
        indices = torch.tensor(rows, device=self._device)
        self._cache.select_rows(indices)
        if self._mask is not None:
            self._mask = self._mask.index_select(0, indices)

    def _forget(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        wanted = self.num_slots - min(slots)
        self._rollback.to(wanted)
        # A cache that can only go back to a checkpoint forgets more than it was asked to; it holds one row.
        more = wanted - self.num_slots
        self.positions = [position - each - more for position, each in zip(self.positions, tokens, strict=True)]
        self._num_tokens = [number - each - more for number, each in zip(self._num_tokens, tokens, strict=True)]
        uneven = [each - min(slots) for each in slots]
        if any(uneven):
            from_the_end = self.num_slots - torch.arange(self.num_slots, device=self._device)
            kept = from_the_end > torch.tensor(uneven, device=self._device)[:, None]
            self._mask = self._full_mask()[:, : self.num_slots] * kept
            self._has_inner_holes = True
        elif self._mask is not None:
            self._mask = self._mask[:, : self.num_slots]
        self._pack_if_needed()

    def _full_mask(self) -> torch.Tensor:
        if self._mask is not None:
            return self._mask
        return torch.ones(len(self.positions), self.num_slots, dtype=torch.long, device=self._device)

    def _pack_if_needed(self) -> None:
        """Move every row's tokens to the right end of as few slots as hold the longest row."""
        longest = max(self._num_tokens)
        num_holes = self.num_slots - longest
        must_pack = self._counts_slots and self._has_inner_holes
        if self._mask is None or not (must_pack or num_holes > max(_BEARABLE_HOLES, self.num_slots // _BEARABLE_SHARE)):
            return
        # A stable sort puts hidden slots first and leaves the others in their order.
        order = self._mask.argsort(dim=-1, stable=True)[:, num_holes:]
        self._cache.arrange(order)
        self._mask = self._mask.gather(1, order)
        self._rollback.num_read = longest
        self._has_inner_holes = False
        self._num_packs += 1
