"""The target's forwards: the prompt, and drafts behind the committed text, with the cache kept level.

Knows nothing of where drafts come from or how they are judged.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from hfspec.cache.ledger import SpeculativeCache, vanilla_cache
from hfspec.cache.rollback import Rollback, StateRollback, keeps_state
from hfspec.cache.rows import Rows
from hfspec.host import architectures, forwards, releases
from hfspec.host.modules import modules_where
from hfspec.host.prepared import Prepared
from hfspec.host.stepping import stepping, stepping_layers
from hfspec.host.verdicts import counts_slots
from hfspec.rounds import Verified
from hfspec.sampling.devices import generator_state


class Target:
    """The patched model in one call, whose rows all go on at the same pace.

    Args:
        cache: the cache to fill, empty or holding earlier turns.
    """

    def __init__(self, prepared: Prepared, cache: Any) -> None:
        self.model = prepared.model
        self._generation_config = prepared.generation_config
        self._model_kwargs = prepared.model_kwargs | {releases.CACHE_KEY: cache}
        self._cache = cache
        # Counts new tokens: the prompt in the cache is its zero.
        self._rollback: Rollback | StateRollback = Rollback(cache, layers=modules_where(prepared.model, keeps_state))
        self._stepping_layers = stepping_layers(prepared.model)
        self._num_new = 0
        #: Why nothing can be verified in one forward, as the prompt's forward has shown; `None` if it can.
        self.problem: str | None = None

    @property
    def num_unread(self) -> int:
        """Committed tokens a row that are not in the cache: one, or more where it had to go back to a checkpoint."""
        return self._num_new - self._rollback.num_read

    def prefill(self, input_ids: torch.Tensor) -> Verified:
        """Read the prompt `[rows, length]`; the logits choose the first token."""
        before = generator_state(input_ids.device)
        outputs, kwargs = forwards.prefill(self.model, input_ids, self._generation_config, self._model_kwargs)
        if not torch.equal(generator_state(input_ids.device), before):
            self.problem = "the model draws random numbers in its forwards"
        elif architectures.has_foreign_forward(self.model) and outputs.logits.shape[1] == 1 < input_ids.shape[1]:
            self.problem = "the model gives logits for the last token only"
        self._model_kwargs = forwards.advance(self.model, outputs, kwargs, num_new_tokens=1)
        self._num_new = 1
        if others := _other_caches(self._model_kwargs):
            self._rollback = Rollback(self._cache, layers=modules_where(self.model, keeps_state), others=others)
        # Only the last position is kept: the logits of a whole prompt can be very large.
        logits = outputs.logits[:, -1:].clone()
        outputs["logits"] = None
        return Verified(logits, outputs, num_read=input_ids.shape[1], is_prompt=True)

    def verify(self, texts: Sequence[torch.Tensor], draft_ids: Sequence[torch.Tensor]) -> Verified:
        """Read what is unread of the committed text, and the drafts behind it, in one forward.

        Args:
            texts: the rows' texts, `[1, length]` each, of one length.
            draft_ids: the rows' drafts, `[1, num_drafted]` each, of one length.
        """
        num_drafted = draft_ids[0].shape[1]
        input_ids, kwargs = self._with_drafts(texts, draft_ids)
        self._rollback.checkpoint()
        num_read = self.num_unread + num_drafted
        model_inputs = forwards.prepare_last(self.model, input_ids, num_read, kwargs)
        return self._forward(model_inputs, num_drafted + 1, num_read)

    def keep(self, num_committed: Sequence[int]) -> None:
        """Bring cache and inputs to the committed text: so many tokens of the last round in each row, all alike.

        The last committed token is not in the cache, as in vanilla.
        """
        self.level_cache(self._num_new + num_committed[0])
        self._model_kwargs = forwards.advance(self.model, ModelOutput(), self._model_kwargs, num_committed[0])

    def level_cache(self, num_new: int) -> None:
        """Bring the cache to the text without its last token, of `num_new` in all; also after an error in mid-round."""
        self._num_new = num_new
        if num_new:
            self._rollback.to(num_new - 1)

    def catch_up(self, input_ids: torch.Tensor) -> bool:
        """Read what a cache that had to go back still lacks of the whole text, so that it is as vanilla's.

        Returns:
            Whether that took a forward.
        """
        num_missing = self.num_unread - 1
        if num_missing > 0:
            kwargs = forwards.cut_last(self.model, self._model_kwargs)
            self._forward(forwards.prepare_last(self.model, input_ids[:, :-1], num_missing, kwargs), 1, num_missing)
        return num_missing > 0

    def cache_for_user(self) -> Any:
        """The cache as vanilla hands it back."""
        return vanilla_cache(self._cache)

    def _with_drafts(
        self, texts: Sequence[torch.Tensor], draft_ids: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The texts with the drafts behind them `[rows, length]`, and the model kwargs grown to that length."""
        input_ids = torch.cat([torch.cat(list(texts)), torch.cat(list(draft_ids))], dim=-1)
        num_drafted = draft_ids[0].shape[1]
        if not num_drafted:
            return input_ids, self._model_kwargs
        return input_ids, forwards.advance(self.model, ModelOutput(), self._model_kwargs, num_drafted)

    def _forward(self, model_inputs: dict[str, Any], num_logits: int, num_read: int) -> Verified:
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = num_logits
        ids = model_inputs.get("input_ids", model_inputs.get("decoder_input_ids"))
        num_rows = 1 if ids is None else len(ids)
        with self._rollback.reading(num_read), stepping(self._stepping_layers), forwards.wide(num_rows, num_read):
            outputs = self.model(**model_inputs, return_dict=True)
        return Verified(outputs.logits[:, -num_logits:], outputs, num_read)


class StateTarget(Target):
    """The patched model in one call, where it makes a state of its own kind, which its forwards write into."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared, prepared.cache)
        self._key = architectures.state_key(self.model.config) or releases.CACHE_KEY

    def prefill(self, input_ids: torch.Tensor) -> Verified:
        """Read the prompt; the state comes with the outputs."""
        verified = super().prefill(input_ids)
        self._model_kwargs[self._key] = verified.outputs[self._key]
        self._rollback = StateRollback(self._model_kwargs, self._key)
        return verified

    def keep(self, num_committed: Sequence[int]) -> None:
        """Bring state and inputs to the committed text."""
        self.level_cache(self._num_new + num_committed[0])
        state = self._model_kwargs[self._key]
        grown = forwards.advance(self.model, ModelOutput(), self._model_kwargs, num_committed[0])
        self._model_kwargs.update(grown | {self._key: state})

    def cache_for_user(self) -> Any:
        """The state, as vanilla hands it back."""
        return self._model_kwargs[self._key]

    def _forward(self, model_inputs: dict[str, Any], num_logits: int, num_read: int) -> Verified:
        verified = super()._forward(model_inputs, num_logits, num_read)
        self._model_kwargs[self._key] = verified.outputs[self._key]
        return verified


class UncachedTarget(Target):
    """The patched model in one call without a cache: every forward reads the whole text, as vanilla's do."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared, prepared.cache)
        self._stepping_layers = []  # nothing goes on from a state: vanilla's forwards are as wide

    @property
    def num_unread(self) -> int:
        """One, as nothing is put off: all is read again anyway."""
        return 1

    def verify(self, texts: Sequence[torch.Tensor], draft_ids: Sequence[torch.Tensor]) -> Verified:
        """Read the rows' texts and the drafts behind them in one forward."""
        width = draft_ids[0].shape[1] + 1
        return self._forward(forwards.prepare_all(self.model, *self._with_drafts(texts, draft_ids)), width, width)

    def level_cache(self, num_new: int) -> None:
        """Nothing to level."""
        self._num_new = num_new

    def cache_for_user(self) -> Any:
        """What vanilla hands back: nothing, or what was passed."""
        return self._cache


class RaggedTarget(Target):
    """The patched model in a call whose rows go on each at its own pace, and leave when they have ended.

    Needs a `SpeculativeCache` of attention layers (see `support.ragged_problem`).
    """

    def __init__(self, prepared: Prepared, cache: SpeculativeCache) -> None:
        super().__init__(prepared, cache)
        self._rows: Rows | None = None
        self._lengths: list[int] = []

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
        mask = None if mask is None else mask[:, :-1].to(input_ids.device)
        positions = [num_slots] * num_rows if mask is None else mask.sum(dim=-1).tolist()
        if kwargs.get("position_ids") is not None:
            positions = kwargs["position_ids"][:, -1].expand(num_rows).tolist()
        is_counting = counts_slots(self.model, self._cache)
        self._rows = Rows(self._cache, positions, input_ids.device, mask, is_counting, num_slots)
        return verified

    def verify(self, texts: Sequence[torch.Tensor], draft_ids: Sequence[torch.Tensor]) -> Verified:
        """Read each row's last token and draft in one forward; drafts may differ in length."""
        rows = self._the_rows()
        self._lengths = [1 + each.shape[1] for each in draft_ids]
        width = max(self._lengths)
        filled = [
            pad(torch.cat([text[:, -1:], draft], dim=-1), (0, width - 1 - draft.shape[1]))
            for text, draft in zip(texts, draft_ids, strict=True)
        ]
        rows.checkpoint()
        num_before = rows.num_slots
        mask, position_ids = rows.open(self._lengths)
        kwargs = forwards.with_slots(self.model, self._model_kwargs, mask, position_ids, num_before)
        model_inputs = forwards.prepare_last(self.model, torch.cat(filled), width, kwargs)
        return self._forward(model_inputs, width, width)

    def keep(self, num_committed: Sequence[int]) -> None:
        """Keep of each row's tokens of the last round those that were committed, but for the last."""
        self._the_rows().close(self._lengths, num_committed)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        num_rows = len(self._the_rows().positions)
        self._the_rows().select(rows)
        self._model_kwargs = forwards.select_rows(self._model_kwargs, rows, num_rows)

    def level_cache(self, num_new: int) -> None:
        """Nothing to do: nobody will see this cache."""

    def _the_rows(self) -> Rows:
        if self._rows is None:
            raise RuntimeError("prefill comes first")
        return self._rows


def _other_caches(model_kwargs: dict[str, Any]) -> list[Any]:
    """What else forwards write into besides the cache: the caches of an encoder that hears a stream, say."""
    return [
        value
        for name, value in model_kwargs.items()
        if name not in releases.CACHE_KEYS and (isinstance(value, Cache) or type(value).__name__.endswith("Cache"))
    ]
