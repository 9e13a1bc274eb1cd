"""What the host has prepared when it would begin to decode: the arguments of its `_sample`, and what they imply."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import LogitsProcessorList, PretrainedConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationConfig

from hfspec.host import architectures, caches, releases
from hfspec.host.exactness import last_draft_id

#: Inputs that stand in places of the text, which a draft model that reads only text leaves out.
MEDIA_INPUTS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
#: The same, when the host has encoded them before it decodes.
_ENCODED_MEDIA = "mm_encoder_outputs"


@dataclass(frozen=True)
class Prepared:
    """One call, as the host hands it over.

    Attributes:
        model: the patched model.
        input_ids: `[rows, prompt_length]`; of an encoder-decoder model, the decoder's.
        model_kwargs: what goes into the forwards, the cache included.
        streamer: told of the prompt already; gets every token, and the end.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: Any = None
    synced_gpus: bool = False

    @property
    def num_rows(self) -> int:
        """Rows in the batch, several sequences for one prompt included."""
        return self.input_ids.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the ids are, and the logits are wanted."""
        return self.input_ids.device

    @property
    def cache(self) -> Any:
        """The cache that the host made, or the user passed."""
        return self.model_kwargs.get(releases.CACHE_KEY)

    @property
    def uses_cache(self) -> bool:
        """Whether vanilla reads only the newest token in each forward, and not the whole text again."""
        return bool(self.model_kwargs.get("use_cache")) and not architectures.reads_all(self.model.config)

    @property
    def keeps_own_state(self) -> bool:
        """Whether the model makes a state of its own kind in the prompt's forward."""
        return architectures.state_key(self.model.config) is not None

    @property
    def encoder_outputs(self) -> Any:
        """Of an encoder-decoder model; `None` for others."""
        return self.model_kwargs.get("encoder_outputs") if self.model.config.is_encoder_decoder else None

    @property
    def ends_by_token(self) -> bool:
        """Whether a token can end a row; only then does vanilla fill up finished rows with padding."""
        return any(hasattr(each, "eos_token_id") for each in self.criteria)

    @property
    def pad_id(self) -> int | None:
        """What finished rows get; `None` if vanilla goes on writing them."""
        pad: torch.Tensor | None = self.generation_config._pad_token_tensor
        return int(pad) if self.ends_by_token and pad is not None else None

    @property
    def pad_is_readable(self) -> bool:
        """Whether the model could read the padding that finished rows get."""
        size = getattr(self.model.get_input_embeddings(), "num_embeddings", self.vocab_size)
        return self.pad_id is None or 0 <= self.pad_id < size

    @property
    def returns_states(self) -> bool:
        """Whether the caller gets more than the tokens."""
        return bool(self.generation_config.return_dict_in_generate)

    @cached_property
    def vocab_size(self) -> int:
        """The width of the logits."""
        width = getattr(self.model.get_output_embeddings(), "out_features", None)
        return width if isinstance(width, int) else int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def max_length(self) -> int | None:
        """The length no draft may reach beyond: where the text ends, or the target's positions do."""
        places = [architectures.max_positions(self.model.config), caches.max_slots(self.cache)]
        # The last token is never read.
        limits = [None if number is None else number + 1 - self.num_before for number in places]
        return min((limit for limit in (*limits, self.criteria.max_length) if limit is not None), default=None)

    @cached_property
    def num_before(self) -> int:
        """Places taken before the text begins.

        By embeddings, by earlier turns whose ids were not passed again, or by positions that begin later.
        """
        if self.model.config.is_encoder_decoder:
            return 0
        embeds, mask, position_ids = map(self.model_kwargs.get, ("inputs_embeds", "attention_mask", "position_ids"))
        num_ids, places = self.input_ids.shape[1], [0]
        if embeds is not None:
            places.append(int(embeds.shape[1]))
        if mask is not None:
            places.append(int(mask.shape[-1]) - num_ids)
        else:  # 5.24 keeps only the length of a mask that hides nothing
            places.append((getattr(self.generation_config, "_mask_length", None) or 0) - num_ids)
        if position_ids is not None and position_ids.numel():
            places.append(int(position_ids.max()) + 1 - num_ids)
        return max(places)

    @cached_property
    def last_draft_id(self) -> int | None:
        """The id behind which the target cannot verify anything in the same forward, if there is one."""
        return last_draft_id(self.model.config)

    @property
    def has_media(self) -> bool:
        """Whether images, videos or sounds stand in places of the text."""
        return not self.model.config.is_encoder_decoder and any(
            _is_given(self.model_kwargs.get(name)) for name in (*MEDIA_INPUTS, _ENCODED_MEDIA)
        )

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """The ids that stand in a text for images, videos and sounds."""
        return _media_token_ids(self.model.config)

    def padding_mask(self, row: int) -> torch.Tensor | None:
        """Which of a row's prompt ids `[1, prompt_length]` are no padding, if not all."""
        prefix = "decoder_" if self.model.config.is_encoder_decoder else ""
        mask: torch.Tensor | None = self.model_kwargs.get(f"{prefix}attention_mask")
        if mask is None or mask.shape != self.input_ids.shape:
            return None
        is_read = mask[row : row + 1].bool()
        return None if bool(is_read.all()) else is_read

    def text_mask(self, row: int) -> torch.Tensor | None:
        """Which of a row's prompt ids `[1, prompt_length]` are text, if not all: padding is not, nor images' places.

        Those of earlier turns, whose images are in the cache alone, are none either.
        """
        ids, mask = self.input_ids[row : row + 1], self.padding_mask(row)
        is_text = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        for token_id in _media_token_ids(self.model.config):
            is_text = is_text & (ids != token_id)
        return None if bool(is_text.all()) else is_text


def _is_given(value: Any) -> bool:
    """Whether an input is there; 5.24 passes dicts that may hold nothing."""
    return any(_is_given(each) for each in value.values()) if isinstance(value, dict) else value is not None


def _media_token_ids(config: PretrainedConfig) -> tuple[int, ...]:
    """The ids that stand in a text for images, videos and sounds."""
    names = [f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")]
    found = (getattr(config, name, None) for name in names)
    return tuple(token_id for token_id in found if isinstance(token_id, int))
