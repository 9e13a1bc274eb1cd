"""The target's forwards where each row goes on at its own pace: chains behind two-dimensional masks, and trees.

Inputs are made here, without the host: ids, positions and mask say all that a decoder needs of a text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hfspec.cache.ledger import SpeculativeCache
from hfspec.cache.rows import Rows
from hfspec.host import architectures, forwards
from hfspec.host.prepared import Prepared
from hfspec.host.verdicts import counts_slots
from hfspec.rounds import Draft, Outcomes, Verified
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
        self._lengths: list[int] = []
        self._counts: torch.Tensor | None = None
        self._num_slots_before = 0
        #: Whether the host makes nothing of a forward's inputs but what is replaced here.
        self._template: dict[str, Any] | None = None

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
        return verified

    def verify(self, texts: Texts, draft: Draft) -> Verified:
        """Read each row's last token and draft in one forward; drafts may differ in length, and be trees."""
        rows = self._the_rows()
        self._lengths = [1 + length for length in draft.lengths]
        width = draft.num_tokens + 1
        has_gaps = min(self._lengths) < width
        is_tree = draft.parents is not None
        token_ids = draft.token_ids.clamp(min=0) if has_gaps or is_tree else draft.token_ids
        input_ids = torch.cat([texts.last([1] * draft.num_rows), token_ids], dim=1)
        rows.checkpoint()
        num_before = self._num_slots_before = rows.num_slots
        if is_tree:
            self._lengths = [width] * draft.num_rows
            self._counts = None
            seen, position_ids = rows.open_tree(draft)
            mask: Any = {kind: self._as_taken(each) for kind, each in seen.items()}
            mask = mask if len(mask) > 1 else next(iter(mask.values()))
        else:
            self._counts = (draft.token_ids >= 0).sum(dim=1) + 1 if has_gaps else None
            mask, position_ids = rows.open(self._lengths, counts=self._counts)
        verified = self._forward(self._inputs(input_ids, mask, position_ids, num_before), width, width)
        return replace(verified, tree=draft.tree) if is_tree else verified

    def keep(self, outcomes: Outcomes) -> None:
        """Keep of each row's tokens of the last round those that were committed, but for the last."""
        self._the_rows().close_round(self._lengths, outcomes, self._counts)
        self._num_new += max(outcomes.num_committed)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        num_rows = len(self._the_rows().positions)
        self._the_rows().select(rows)
        self._model_kwargs = forwards.select_rows(self._model_kwargs, rows, num_rows)
        self._template = None

    def level_cache(self, num_new: int) -> None:
        """Nothing to do: rounds leave it level, and after an error nobody sees it."""

    def _inputs(self, input_ids: torch.Tensor, mask: Any, position_ids: torch.Tensor, num_slots: int) -> dict[str, Any]:
        kwargs = forwards.with_slots(self.model, self._model_kwargs, mask, position_ids, num_slots)
        return forwards.prepare_last(self.model, input_ids, input_ids.shape[1], kwargs)

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
