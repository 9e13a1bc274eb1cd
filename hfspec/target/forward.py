"""The target's forwards: the prompt, and a draft behind the committed text, with the cache kept level.

Knows nothing of where drafts come from or how they are judged.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationConfig
from transformers.utils import ModelOutput

from hfspec import compat
from hfspec.cache.ledger import SpeculativeCache, rollback_cache
from hfspec.rounds import Verified


class Target:
    """The patched model in one call.

    Args:
        cache: the cache to fill, empty or holding earlier turns.
        model_kwargs: what vanilla's `_sample` was given, the cache included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        cache: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model = model
        self._generation_config = generation_config
        self._model_kwargs = model_kwargs | {compat.CACHE_KEY: cache}
        self._cache = cache
        self._num_prompt_slots = 0

    def prefill(self, input_ids: torch.Tensor) -> Verified:
        """Read the prompt `[1, length]`; the logits choose the first token."""
        outputs, kwargs = compat.prefill(self.model, input_ids, self._generation_config, self._model_kwargs)
        self._model_kwargs = compat.advance(self.model, outputs, kwargs, num_new_tokens=1)
        self._num_prompt_slots = self._cache.get_seq_length()
        # Only the last position is kept: the logits of a whole prompt can be very large.
        logits = outputs.logits[:, -1:].clone()
        outputs["logits"] = None
        return Verified(logits, outputs, is_prompt=True)

    def verify(self, input_ids: torch.Tensor, draft_ids: torch.Tensor) -> Verified:
        """Read the last committed token and the draft `[1, num_drafted]` in one forward."""
        num_drafted = draft_ids.shape[1]
        kwargs = self._model_kwargs
        if num_drafted:
            input_ids = torch.cat([input_ids, draft_ids], dim=-1)
            kwargs = compat.advance(self.model, ModelOutput(), kwargs, num_drafted)
        model_inputs = compat.prepare_last(self.model, input_ids, num_drafted + 1, kwargs)
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = num_drafted + 1
        outputs = self.model(**model_inputs, return_dict=True)
        return Verified(outputs.logits[:, -num_drafted - 1 :], outputs)

    def keep(self, num_new: int, num_committed: int) -> None:
        """Bring cache and inputs to the committed text.

        Args:
            num_new: all tokens committed so far; the last is not in the cache, as in vanilla.
            num_committed: those of this round.
        """
        self.level_cache(num_new)
        self._model_kwargs = compat.advance(self.model, ModelOutput(), self._model_kwargs, num_committed)

    def level_cache(self, num_new: int) -> None:
        """Bring the cache to the text without its last token, also after an error in mid-round."""
        if num_new:
            rollback_cache(self._cache, self._num_prompt_slots + num_new - 1)

    def cache_for_user(self) -> Any:
        """The cache as vanilla hands it back: the user's own object, or a plain `DynamicCache`."""
        return self._cache.to_vanilla() if isinstance(self._cache, SpeculativeCache) else self._cache
