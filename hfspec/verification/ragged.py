"""The target's forwards where each row goes on at its own pace: chains behind two-dimensional masks, and trees.

Inputs are made here, without the host: ids, positions and mask say all that a decoder needs of a text.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hfspec.cache.ledger import SpeculativeCache
from hfspec.cache.marks import Mark
from hfspec.cache.parked import ParkedRows
from hfspec.cache.rows import Rows
from hfspec.drafts import Draft
from hfspec.host import architectures, forwards
from hfspec.host.prepared import Prepared
from hfspec.host.verdicts import counts_slots
from hfspec.rounds import Outcomes, Verified
from hfspec.texts import Texts
from hfspec.verification.target import Target


class RaggedTarget(Target):
    """The patched model in a call whose rows go on each at its own pace, and leave when they have ended.

    Needs a `SpeculativeCache` of attention layers (see `verdicts.ragged_problem`).
    """

    def __init__(self, prepared: Prepared, cache: SpeculativeCache) -> None:
        super().__init__(prepared, cache)
        self._cache: SpeculativeCache
        self._rows: Rows | None = None
        # Where the cache is handed back whole: the rows that have left, and what belongs to all of them.
        self._returns_cache = prepared.returns_states
        self._parked: ParkedRows | None = None
        self._kwargs_of_all: dict[str, Any] = {}
        self._at_work = list(range(prepared.num_rows))
        self._lengths: list[int] = []
        self._counts: torch.Tensor | None = None
        self._marks: list[Mark] = []
        self._num_steps = 0
        # What the host makes of a forward's inputs, where it makes nothing of ids, positions and mask.
        self._template: dict[str, Any] | None = None
        self._takes_positions = architectures.takes_position_ids(prepared.model)

    @property
    def num_unread(self) -> int:
        """Always one: such a cache goes back to any point."""
        return 1

    def prefill(self, input_ids: torch.Tensor) -> Verified:
        """Read the prompts `[rows, length]`, padded as vanilla wants them."""
        verified = super().prefill(input_ids)
        kwargs = self._model_kwargs
        num_rows, num_slots = input_ids.shape[0], self._cache.get_seq_length()
        mask = kwargs.get("attention_mask")  # 5.24 drops one that hides nothing
        mask = None if mask is None else mask[:, :-1].to(input_ids.device, torch.long)
        positions = [num_slots] * num_rows if mask is None else mask.sum(dim=-1).tolist()
        if kwargs.get("position_ids") is not None:
            positions = kwargs["position_ids"][:, -1].expand(num_rows).tolist()
        is_counting = counts_slots(self.model, self._cache)
        self._rows = Rows(self._cache, positions, input_ids.device, mask, is_counting, num_slots)
        if self._returns_cache and (num_rows > 1 or mask is not None):
            self._parked = ParkedRows(self._cache, input_ids.device, mask, num_rows, is_counting)
            self._kwargs_of_all = kwargs
        return verified

    def verify(self, texts: Texts, draft: Draft) -> Verified:
        """Read each row's last token and draft in one forward; drafts may differ in length, and be trees."""
        rows = self._the_rows()
        if self._num_steps and draft.num_rows > 1:
            rows.hide(self._num_steps)
            self._num_steps = 0
        else:
            self.rewind()  # a single row has no holes
        rows.checkpoint()
        self._marks.append(rows.mark())
        self._lengths = [1 + length for length in draft.lengths]
        has_gaps, is_tree = min(self._lengths) <= draft.num_tokens, draft.parents is not None
        token_ids = draft.token_ids.clamp(min=0) if has_gaps or is_tree else draft.token_ids
        input_ids = torch.cat([texts.last([1] * draft.num_rows), token_ids], dim=1)
        if is_tree:
            return self._read_tree(input_ids, draft)
        return self._read(input_ids, (draft.token_ids >= 0).sum(dim=1) + 1 if has_gaps else None)

    def step(self, texts: Texts, draft: Draft, index: int) -> Verified:
        """Read one token of each row; whose draft has no such token reads another, and its logits mean nothing.

        A `verify` that follows finds what the steps have read still in the cache, but hidden, as what was rejected is
        in the rounds to come: what comes out is then proved to depend on the mask and the positions that it is given.
        """
        rows = self._the_rows()
        if index == 0:
            rows.checkpoint()
            self._marks = [rows.mark()]
        self._num_steps = index + 1
        self._lengths = [1] * draft.num_rows
        token_ids = draft.token_ids[:, index - 1 : index].clamp(min=0) if index else texts.last(self._lengths)
        return self._read(token_ids)

    def rewind(self) -> None:
        """Go back to where the round began, whatever has become of its forwards."""
        for mark in reversed(self._marks):
            self._the_rows().back_to(mark)
        self._marks, self._num_steps = [], 0

    def keep(self, outcomes: Outcomes) -> None:
        """Keep of each row's tokens of the last round those that were committed, but for the last."""
        self._the_rows().close_round(self._lengths, outcomes, self._counts)
        self._marks, self._num_steps = [], 0
        self._num_new += max(outcomes.num_committed)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        num_rows = len(self._the_rows().positions)
        self._park(set(range(num_rows)) - set(rows))
        self._at_work = [self._at_work[row] for row in rows]
        self._the_rows().select(rows)
        self._model_kwargs = forwards.select_rows(self._model_kwargs, rows, num_rows)
        self._template = None

    def go_on_with(self, rows: Sequence[int]) -> None:
        """Read on for these rows of the batch, of those that have ended; needs a call whose cache is handed back."""
        if self._parked is None:
            raise RuntimeError("nothing is kept of rows that have ended")
        self._park(range(len(self._at_work)))
        self._at_work = list(rows)
        self._rows = self._parked.bring_back(rows)
        self._model_kwargs = forwards.select_rows(self._kwargs_of_all, rows, self._parked.num_rows)
        self._template = None

    def cache_for_user(self) -> Any:
        """The cache as vanilla hands it back, once every row has read as much."""
        if self._parked is not None:
            self._park(range(len(self._at_work)))
            self._parked.bring_all_back()
        return super().cache_for_user()

    def _park(self, rows: Iterable[int]) -> None:
        """Keep what was read of these rows, counted among those at work, if the cache is handed back."""
        if self._parked is not None:
            for row in sorted(rows):
                self._parked.put(self._at_work[row], self._the_rows(), row)

    def recover(self, texts: Texts) -> None:
        """Nothing to do: a cache of the caller's is not handed here."""

    def level_cache(self, num_new: int) -> None:
        """Nothing to do: rounds leave it level, and after an error nobody sees it."""

    def _read(self, input_ids: torch.Tensor, counts: torch.Tensor | None = None) -> Verified:
        """Read each row's first ids `[rows, width]`, `counts` `[rows]` of them, or all."""
        width, num_before = input_ids.shape[1], self._the_rows().num_slots
        self._counts = counts
        mask, position_ids = self._the_rows().open(self._lengths, counts=counts)
        return self._forward(self._inputs(input_ids, mask, position_ids, num_before), width, width)

    def _read_tree(self, input_ids: torch.Tensor, draft: Draft) -> Verified:
        """Read the root and the nodes of each row's tree, `[rows, states]`."""
        width, num_before = input_ids.shape[1], self._the_rows().num_slots
        self._lengths, self._counts = [width] * len(input_ids), None
        seen, position_ids = self._the_rows().open_tree(draft)
        masks: dict[str, Any] = {kind: self._as_taken(each) for kind, each in seen.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        verified = self._forward(self._inputs(input_ids, mask, position_ids, num_before), width, width)
        return replace(verified, tree=draft.tree)

    def _reading(self, num_read: int) -> AbstractContextManager[None]:
        return nullcontext()  # who goes on after a forward that has failed rewinds

    def _inputs(self, input_ids: torch.Tensor, mask: Any, position_ids: torch.Tensor, num_slots: int) -> dict[str, Any]:
        """The keywords of a forward. The host makes those of the first; later ones differ by what is known here."""
        if self._template is None:
            kwargs = forwards.with_slots(self.model, self._model_kwargs, mask, position_ids, num_slots)
            inputs = forwards.prepare_last(self.model, input_ids, input_ids.shape[1], kwargs)
            is_moved = inputs["input_ids"].device != input_ids.device  # by the host, to where the model is
            if not is_moved and forwards.prepares_simply(self.model, self._model_kwargs):
                self._template = inputs
            return inputs
        inputs = self._template | {"input_ids": input_ids}
        inputs.pop("attention_mask", None)
        if mask is not None:
            inputs["attention_mask"] = mask
        if self._takes_positions:
            inputs["position_ids"] = position_ids
        return inputs

    def _as_taken(self, seen: torch.Tensor) -> torch.Tensor:
        """A mask as the host makes it for this kind of attention: eager adds it to scores, sdpa takes booleans.

        Adding is safe in whatever dtype a layer, or autocast, makes its scores: softmax is float32. Sdpa would want
        a mask of that very dtype.
        """
        if architectures.attention_of(self.model) == "sdpa":
            return seen
        dtype = self.model.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

    def _the_rows(self) -> Rows:
        if self._rows is None:
            raise RuntimeError("prefill comes first")
        return self._rows
