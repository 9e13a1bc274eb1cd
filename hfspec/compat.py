"""The only file that knows transformers releases: what differs between them, under one name each.

Facts are found by looking at the installed code, not at its version number, so that a backported
or a newer release is judged by what it does. Each has a test in `tests/host/`.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation import GenerationConfig
from transformers.generation import utils as generation_utils
from transformers.utils import ModelOutput

#: The keyword for the cache in forwards, `generate()` and outputs: `cache` in 5.24, `past_key_values` before.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

#: Both names a user may have used for it.
CACHE_KEYS = ("cache", "past_key_values")

#: 5.x runs the prompt through `_prefill`; 4.57 prepares `cache_position` and calls the model.
_HAS_PREFILL = hasattr(GenerationMixin, "_prefill")

#: 5.x lets `prepare_inputs_for_generation` be told how many of the last ids to feed; 4.57 reads `cache_position`.
_FEEDS_BY_LENGTH = "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

#: 5.x appends `num_new_tokens` to masks and positions at once; 4.57 appends one, and never to positions.
_ADVANCES_BY_MANY = _FEEDS_BY_LENGTH

#: 5.x streams a token after the stopping criteria have seen it, 4.57 before.
STREAMS_AFTER_CRITERIA = hasattr(generation_utils, "StopCheck")

#: The host's decoding loops, each a method that `generate()` looks up on `type(model)`.
SAMPLE_METHOD = "_sample"
OTHER_DECODING_METHODS = {
    "_beam_search": "beam search",
    "_assisted_decoding": "Hugging Face's own assisted generation",
}


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> tuple[ModelOutput, dict[str, Any]]:
    """Run the prompt through the target as vanilla's `_sample` does.

    Args:
        input_ids: `[batch, prompt_length]`.

    Returns:
        The outputs, whose last logits choose the first token, and the model kwargs that went in.
    """
    host: Any = model
    if _HAS_PREFILL:
        is_first = not generation_config.is_assistant
        return host._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=is_first), model_kwargs
    model_kwargs = host._get_initial_cache_position(input_ids.shape[1], input_ids.device, model_kwargs)
    if generation_config.prefill_chunk_size is not None:
        model_kwargs = host._prefill_chunking(input_ids, generation_config, **model_kwargs)
    model_inputs = host.prepare_inputs_for_generation(input_ids, **model_kwargs)
    return model(**model_inputs, return_dict=True), model_kwargs


def advance(
    model: PreTrainedModel, outputs: ModelOutput, model_kwargs: dict[str, Any], num_new_tokens: int
) -> dict[str, Any]:
    """Return `model_kwargs` with mask, positions and token types grown by `num_new_tokens`, as vanilla grows them.

    `outputs` may be empty; where it holds a cache, that cache is taken over.
    """
    host: Any = model
    model_kwargs = dict(model_kwargs)
    # Token types grow otherwise by many than one by one, which is how vanilla decodes.
    has_types = any("token_type" in name and value is not None for name, value in model_kwargs.items())
    if _ADVANCES_BY_MANY and not has_types:
        advanced: dict[str, Any] = host._update_model_kwargs_for_generation(
            outputs, model_kwargs, num_new_tokens=num_new_tokens
        )
        return advanced
    for _ in range(num_new_tokens):
        model_kwargs = host._update_model_kwargs_for_generation(outputs, model_kwargs)
        # Explicit position ids are never advanced by 4.57: vanilla feeds the prompt's last one for ever.
        if not _ADVANCES_BY_MANY and model_kwargs.get("position_ids") is not None:
            position_ids = model_kwargs["position_ids"]
            model_kwargs["position_ids"] = torch.cat([position_ids, position_ids[..., -1:]], dim=-1)
    return model_kwargs


def prepare_last(
    model: PreTrainedModel, input_ids: torch.Tensor, num_fed: int, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Prepare a forward over the last `num_fed` of `input_ids`, the ones before being in the cache.

    Args:
        input_ids: `[batch, length]`.
        model_kwargs: grown to the same length.
    """
    host: Any = model
    if _FEEDS_BY_LENGTH:
        fed: dict[str, Any] = {"next_sequence_length": num_fed}
    else:
        last = model_kwargs["cache_position"][-1:]
        fed = {"cache_position": last + torch.arange(1 - num_fed, 1, dtype=last.dtype, device=last.device)}
    model_inputs: dict[str, Any] = host.prepare_inputs_for_generation(input_ids, **(model_kwargs | fed))
    return model_inputs


def decoding(model: PreTrainedModel) -> AbstractContextManager[None]:
    """The context in which 5.x runs every forward after the prompt (it switches kernels for experts)."""
    host: Any = model
    return host._optimize_model_for_decode() if hasattr(model, "_optimize_model_for_decode") else nullcontext()


def is_full_attention(cache: Cache) -> bool:
    """Whether every layer of `cache` keeps all positions and nothing else, so that cropping undoes a forward.

    A `DynamicCache` made without a config has no layers yet and grows such layers.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def takes_cache(config: Any) -> bool:
    """Whether the causal model of this config takes a key-value cache; unknown configs are given the benefit."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model_class is None or CACHE_KEY in inspect.signature(model_class.forward).parameters


def forget_prepared_cache(model: PreTrainedModel) -> None:
    """Drop the static cache that 4.57 keeps on the model, where a call was refused before it could be filled."""
    cache = vars(model).get("_cache")
    if cache is not None and not any(layer.is_initialized for layer in getattr(cache, "layers", ())):
        del vars(model)["_cache"]


def max_exact_length(config: Any) -> int | None:
    """The length up to which a forward over many tokens computes what forwards over one each do; `None`: any.

    Dynamic and long RoPE choose the frequencies of a whole forward by the furthest position in it.
    """
    config = config.get_text_config(decoder=True)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [scaling, *(each for each in scaling.values() if isinstance(each, dict))]
    if not any(kind.get("rope_type", kind.get("type")) in ("dynamic", "longrope") for kind in kinds):
        return None
    limits = [getattr(config, name, None) for name in ("original_max_position_embeddings", "max_position_embeddings")]
    limits += [kind.get("original_max_position_embeddings") for kind in kinds]
    exact: int = min(limit for limit in limits if limit)
    return exact


def max_positions(config: Any) -> int | None:
    """How many positions a model of this config has, if it says so; some have tables that end there."""
    limit: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit


def empty_cache_for(config: Any) -> Cache:
    """The cache vanilla would make for a model of this config."""
    return DynamicCache(config=config.get_text_config(decoder=True))
