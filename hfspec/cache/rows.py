"""`Rows`: one cache for rows that are read at different paces.

A forward writes the same slots for every row. Where a row keeps fewer of them than another, it has *holes*: slots
that its mask hides, as left padding is hidden, while its tokens' positions go on without a gap. For models that
count slots (windows, ALiBi), and now and then for all, the rows are packed: each row's tokens end to end, at the
right. Masks stay two-dimensional, which every model and every attention implementation takes; trees alone need more.

Counts are known twice: on the host, which decides by them, and on the device, which is not waited for.
"""

from collections.abc import Sequence

import torch

from hfspec.cache.ledger import SpeculativeCache
from hfspec.cache.marks import Mark
from hfspec.cache.rollback import Rollback
from hfspec.cache.seen import seen_by_nodes
from hfspec.drafts import Draft
from hfspec.rounds import Outcomes

#: Holes that may add up before rows are packed: an eighth of the slots, and at least this many.
_BEARABLE_SHARE, _BEARABLE_HOLES = 8, 32


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
        num_hidden: of each row's text, how many ids are never read.
    """

    def __init__(
        self,
        cache: SpeculativeCache,
        positions: Sequence[int],
        device: torch.device,
        mask: torch.Tensor | None = None,
        counts_slots: bool = True,
        num_slots: int = 0,
        num_hidden: Sequence[int] = (),
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
        self._hidden = torch.tensor(list(num_hidden) or [0] * len(self.positions), device=device)
        # The positions on the device; `None` where all rows have one.
        self._next: torch.Tensor | None = None if self._are_even else torch.tensor(self.positions, device=device)

    @property
    def num_slots(self) -> int:
        """Slots written in every row."""
        return self._rollback.num_read

    @property
    def _are_even(self) -> bool:
        return len(set(self.positions)) == 1

    def missing(self, lengths: torch.Tensor) -> torch.Tensor:
        """How many ids of texts of these lengths are unread, `[batch]`, on the device."""
        return lengths - self._hidden - self._device_positions()

    def open(
        self, lengths: Sequence[int], to_the_right: bool = False, counts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Prepare a forward in which row `i` reads `lengths[i]` tokens, filled up to the longest.

        Args:
            to_the_right: whether the tokens stand at the right end, the filling before them, as a prompt's do.
                That parts them from what was read before, so it is for the first forward only.
            counts: `lengths` on the device, `[batch]`, where somebody has them there.

        Returns:
            The mask `[batch, slots + width]` (`None`: nothing to hide) and the position ids `[batch, width]`.
        """
        width = max(lengths)
        columns = torch.arange(width, device=self._device)
        if min(lengths) == width:
            position_ids = (columns + self._start).expand(len(lengths), -1)
            self._write(width)
            self._go(lengths, width)
            return self._mask, position_ids
        counts = (torch.tensor(lengths, device=self._device) if counts is None else counts)[:, None]
        first = width - counts if to_the_right else torch.zeros_like(counts)
        position_ids = (columns - first).clamp(min=0).minimum(counts - 1) + self._start
        self._write(width, (columns >= first) & (columns < first + counts))
        self._has_inner_holes |= not to_the_right
        self._go(lengths, counts[:, 0])
        return self._mask, position_ids

    def open_tree(self, draft: Draft) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Prepare a forward over the root and the nodes of a tree, which see the text and what is on their path.

        Slots are written for all of them; `close` keeps those of the path.

        Returns:
            For full and for windowed layers, where the cache has such, which slots are seen,
            `[batch, 1, states, slots]` bool; and the position ids `[batch, states]`.
        """
        tree, num_rows, width = draft.tree, draft.num_rows, draft.num_tokens + 1
        if tree is None:
            raise ValueError("chains need no tree's mask")
        seen = seen_by_nodes(tree, self._full_mask().bool(), self._cache.layers)
        position_ids = tree.depths + self._start
        self._write(width)
        self._go([width] * num_rows, width)
        return seen, position_ids

    def close(
        self,
        lengths: Sequence[int],
        kept: Sequence[int],
        counts: torch.Tensor | None = None,
        kept_counts: torch.Tensor | None = None,
    ) -> None:
        """After a forward over `lengths[i]` tokens of row `i`, filled up at the right: keep the first `kept[i]`.

        Args:
            counts, kept_counts: the same on the device, `[batch]`, where somebody has them there.
        """
        width = max(lengths)
        slots = [width - each for each in kept]
        rejected = [length - each for length, each in zip(lengths, kept, strict=True)]
        if kept_counts is None:
            self._forget(slots, rejected)
        else:
            self._forget(slots, rejected, width - kept_counts, (width if counts is None else counts) - kept_counts)

    def close_round(self, lengths: Sequence[int], outcomes: Outcomes, counts: torch.Tensor | None = None) -> None:
        """The same after the root and a draft: keep what was committed, a tree's path behind its root."""
        self._gather_paths(max(lengths), outcomes)
        kept = outcomes.num_committed
        is_even = len(set(kept)) == 1 and len(set(lengths)) == 1
        self.close(lengths, kept, counts, None if is_even else outcomes.num_committed_on(self._device))

    def forget(self, counts: Sequence[int], on_device: torch.Tensor | None = None) -> None:
        """Let row `i` forget its last `counts[i]` tokens, which are in its last slots.

        Args:
            on_device: `counts` on the device, `[batch]`, where somebody has them there.
        """
        self._forget(counts, counts, on_device, on_device)

    def hide(self, num_slots: int) -> None:
        """Let every row forget its last tokens, so many, but leave their slots where they are, as holes."""
        self._mask = self._full_mask().clone()
        self._mask[:, self.num_slots - num_slots :] = 0
        self._go([-num_slots] * len(self.positions), -num_slots)
        self._has_inner_holes = True
        self._pack_if_needed()

    def mark(self) -> Mark:
        """How the rows stand, for `back_to`."""
        return Mark(
            self.num_slots,
            self.positions,
            self._num_tokens,
            self._mask,
            self._next,
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
        self._mask, self._next, self._has_inner_holes = mark.mask, mark.on_device, mark.has_inner_holes

    def slots_of(self, row: int) -> torch.Tensor:
        """Where a row's tokens are, in their order, `[tokens]`. Waits for the device, where it has holes."""
        if self._mask is None:
            return torch.arange(self.num_slots, device=self._device)
        return self._mask[row].nonzero()[:, 0]

    def checkpoint(self) -> None:
        """Everything read so far is committed."""
        self._rollback.checkpoint()

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.positions = [self.positions[row] for row in rows]
        self._num_tokens = [self._num_tokens[row] for row in rows]
        indices = torch.tensor(rows, device=self._device)
        self._cache.select_rows(indices)
        self._next = None if self._next is None or self._are_even else self._next[indices]
        self._hidden = self._hidden[indices]
        if self._mask is not None:
            self._mask = self._mask.index_select(0, indices)

    @property
    def _start(self) -> torch.Tensor | int:
        """The position at which the rows go on, `[batch, 1]` where it differs."""
        return self.positions[0] if self._next is None else self._next[:, None]

    def _write(self, width: int, new: torch.Tensor | None = None) -> None:
        """Let a forward fill so many slots more; `new` `[batch, width]` says which hold something, if not all do."""
        if new is not None:
            self._mask = torch.cat([self._full_mask(), new.long()], dim=-1)
        elif self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, width), value=1)
        self._rollback.num_read += width

    def _go(self, steps: Sequence[int], on_device: torch.Tensor | int) -> None:
        """Row `i` goes on by `steps[i]` tokens; `on_device` is the same, one number where all rows go alike."""
        start: torch.Tensor | int = self.positions[0] if self._next is None else self._next
        self.positions = [position + step for position, step in zip(self.positions, steps, strict=True)]
        self._num_tokens = [before + step for before, step in zip(self._num_tokens, steps, strict=True)]
        self._next = None if self._are_even else torch.as_tensor(start + on_device)

    def _device_positions(self) -> torch.Tensor:
        if self._next is not None:
            return self._next
        return torch.full((len(self.positions),), self.positions[0], device=self._device)

    def _gather_paths(self, width: int, outcomes: Outcomes) -> None:
        """Move the slots of accepted nodes behind the root's, where they are not there already."""
        moves = [
            (row, self.num_slots - width + 1 + node, self.num_slots - width + 1 + depth)
            for row, outcome in enumerate(outcomes.rows)
            if not outcome.is_straight
            for depth, node in enumerate(outcome.path)
            if node != depth
        ]
        if moves:
            rows, sources, places = torch.tensor(moves, device=self._device).unbind(dim=1)
            self._cache.move(rows, sources, places)

    def _forget(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        device_slots: torch.Tensor | None = None,
        device_tokens: torch.Tensor | None = None,
    ) -> None:
        wanted = self.num_slots - min(slots)
        self._rollback.to(wanted)
        # A cache that can only go back to a checkpoint forgets more than it was asked to; it holds one row.
        more = wanted - self.num_slots
        self._go([-each - more for each in tokens], -self._on_device(tokens, device_tokens) - more)
        if len(set(slots)) > 1:
            uneven = torch.as_tensor(self._on_device(slots, device_slots) - min(slots))[:, None]
            from_the_end = self.num_slots - torch.arange(self.num_slots, device=self._device)
            self._mask = self._full_mask()[:, : self.num_slots] * (from_the_end > uneven)
            self._has_inner_holes = True
        elif self._mask is not None:
            self._mask = self._mask[:, : self.num_slots]
        self._pack_if_needed()

    def _on_device(self, counts: Sequence[int], known: torch.Tensor | None) -> torch.Tensor | int:
        """Counts as something to reckon with on the device, without a wait where that can be."""
        if len(set(counts)) == 1:
            return counts[0]
        return torch.tensor(counts, device=self._device) if known is None else known

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
