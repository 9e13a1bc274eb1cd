"""The only file that knows transformers releases: what differs between them, under one name each.

Facts are found by looking at the installed code, not at its version number, so that a backported
or a newer release is judged by what it does. Each has a test in `tests/contract/`.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationMixin,
    PreTrainedModel,
    cache_utils,
)
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig
from transformers.generation import utils as generation_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
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

#: Whether position ids that the user gave go on with the text; 4.57 repeats the last one for ever.
ADVANCES_POSITIONS = _ADVANCES_BY_MANY

#: The method that runs the encoder, with its input, the model kwargs and the input's name.
ENCODER_METHOD = next(
    name
    for name in (
        "_prepare_text_encoder_decoder_kwargs_for_generation",
        "_prepare_encoder_decoder_kwargs_for_generation",
    )
    if hasattr(GenerationMixin, name)
)

#: 5.x streams a token after the stopping criteria have seen it, 4.57 before.
STREAMS_AFTER_CRITERIA = hasattr(generation_utils, "StopCheck")

#: Inputs that say of each token what kind it is, and grow with the text.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

#: Inputs with a row for each text.
ROW_INPUTS = ("attention_mask", "position_ids", *_TOKEN_TYPES)

#: Layers of recurrent models, whose state stands for the whole text; none before 5.x.
LINEAR_LAYER: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())

#: Layers whose content depends on how many tokens came at once.
QUANTIZED_LAYER: Any = tuple(
    getattr(cache_utils, name) for name in ("QuantizedLayer", "BaseQuantizedLayer") if hasattr(cache_utils, name)
)

#: The host's layers that can forget their last tokens, however many and whenever (where the release can crop them).
CROPPABLE_LAYERS = frozenset(
    layer
    for layer in (
        getattr(cache_utils, name, None)
        for name in ("DynamicLayer", "DynamicIndexedLayer", "StaticLayer", "StaticIndexedLayer", "DummyLayer")
    )
    if hasattr(layer, "crop")
)

#: Whether this release masks several tokens behind a cache rightly in all its models, and draws no random numbers in
#: evaluation mode (LED's and SeamlessM4T's encoders did).
HAS_EVEN_FORWARDS = CACHE_KEY == "cache"

#: Whether layers drop the cache when a model is in training mode with gradient checkpointing, as long as no
#: gradients are asked for (5.24 keeps it then).
CHECKPOINTING_DROPS_CACHE = "is_grad_enabled" not in inspect.getsource(GradientCheckpointingLayer)

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
            outputs, model_kwargs, model.config.is_encoder_decoder, num_new_tokens
        )
        return advanced
    for _ in range(num_new_tokens):
        model_kwargs = host._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder
        )
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


def cut_last(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `model_kwargs` as they were before they grew by the last token."""
    cut = dict(model_kwargs)
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    for name in (f"{prefix}attention_mask", f"{prefix}position_ids", *_TOKEN_TYPES):
        if isinstance(cut.get(name), torch.Tensor):
            cut[name] = cut[name][..., :-1]
    if not _FEEDS_BY_LENGTH:
        cut["cache_position"] = cut["cache_position"] - 1
    return cut


def with_slots(
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    num_slots: int,
) -> dict[str, Any]:
    """Return `model_kwargs` for a forward over `position_ids.shape[1]` tokens a row behind `num_slots` slots.

    Args:
        mask: `[rows, slots + width]`, or `None`.
        position_ids: `[rows, width]`; left out for models that take none.
    """
    width = position_ids.shape[1]
    kwargs = model_kwargs | {"attention_mask": mask}
    if takes_position_ids(model):
        kwargs["position_ids"] = position_ids
    for name in _TOKEN_TYPES:
        if kwargs.get(name) is not None:  # text goes on as the type that it ended with
            kwargs[name] = kwargs[name][:, -1:].expand(-1, width)
    if not _FEEDS_BY_LENGTH:
        kwargs["cache_position"] = torch.arange(num_slots, num_slots + width, device=position_ids.device)
    return kwargs


def select_rows(model_kwargs: dict[str, Any], rows: Any, num_rows: int) -> dict[str, Any]:
    """Return `model_kwargs` for some rows of the batch: by the host's convention every tensor has rows first."""
    return {
        name: value[torch.as_tensor(rows, device=value.device)]
        if isinstance(value, torch.Tensor)
        and value.dim() > 0
        and value.shape[0] == num_rows
        and name != "cache_position"
        else value
        for name, value in model_kwargs.items()
    }


def num_processes(model: PreTrainedModel) -> int:
    """How many processes share the model's layers, all of which must make the same forwards."""
    return getattr(model, "_tp_size", None) or 1


def has_foreign_forward(model: PreTrainedModel) -> bool:
    """Whether the model's forward is somebody else's code than transformers'."""
    return not model.forward.__module__.startswith("transformers.")


def takes_position_ids(model: PreTrainedModel) -> bool:
    """Whether the model's forward takes position ids."""
    return "position_ids" in inspect.signature(model.forward).parameters


def compiles_decoding(
    model: PreTrainedModel, model_kwargs: dict[str, Any], generation_config: GenerationConfig
) -> bool:
    """Whether vanilla compiles the forwards after the prompt, as it does for static caches on accelerators."""
    host: Any = model
    return bool(host._valid_auto_compile_criteria(model_kwargs, generation_config))


def looks_ahead_for_attentions(model: PreTrainedModel) -> bool:
    """Whether a model that is asked for its attention weights sees what comes later in the same forward.

    Falcon then adds the mask to its scores; 4.57 makes one for that, 5.x one of booleans unless attention is eager.
    """
    makes_masks = hasattr(model.base_model, "_update_causal_mask")
    return model.config.model_type == "falcon" and model.config._attn_implementation != "eager" and not makes_masks


def decoding(model: PreTrainedModel) -> AbstractContextManager[None]:
    """The context in which 5.x runs every forward after the prompt (it switches kernels for experts)."""
    host: Any = model
    return host._optimize_model_for_decode() if hasattr(model, "_optimize_model_for_decode") else nullcontext()


def reads_all(config: Any) -> bool:
    """Whether the model knows no cache, so that vanilla feeds it the whole text for every token."""
    return str(config.model_type) == "openai-gpt"


def state_key(config: Any) -> str | None:
    """The keyword of a state that is no cache of the host's kind, made by the model itself; `None` for other models."""
    keys = {"minimax": CACHE_KEY, "rwkv": "state", "xlstm": CACHE_KEY}
    return keys.get(config.model_type) if CACHE_KEY == "cache" else None


def prepare_all(model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Prepare a forward over the whole text `[rows, length]`, as vanilla does without a cache."""
    host: Any = model
    model_inputs: dict[str, Any] = host.prepare_inputs_for_generation(input_ids, **model_kwargs)
    return model_inputs


def is_sliding(layer: Any) -> bool:
    """Whether a cache layer drops what is far back."""
    return bool(getattr(layer, "is_sliding", False))


def text_layers(cache: Any) -> list[Any]:
    """The layers that grow with the text, if any; what an encoder-decoder model keeps of the encoder does not."""
    layers: list[Any] = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    return layers


def is_empty(cache: Any) -> bool:
    """Whether nothing has been written into a cache yet."""
    return not any(
        getattr(layer, "is_initialized", False) or any(getattr(layer, "has_previous_state", {}).values())
        for layer in text_layers(cache)
    )


def is_static(cache: Any) -> bool:
    """Whether the cache has its full size from the beginning."""
    return any(isinstance(layer, cache_utils.StaticLayer) for layer in text_layers(cache))


def masks_by_types(model: PreTrainedModel, cache: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether the host makes the mask before the forward, and from token types, as for Gemma 3 over a static cache.

    It takes several tokens at once for a prompt then.
    """
    has_types = any(model_kwargs.get(name) is not None for name in _TOKEN_TYPES)
    return has_types and is_static(cache) and hasattr(model, "create_masks_for_generate")


def keeps_elsewhere(cache: Any) -> bool:
    """Whether the cache was asked for as one of a fixed size, or as one that is moved off the device."""
    return is_static(cache) or bool(getattr(getattr(cache, "self_attention_cache", cache), "offloading", False))


def row_of_outputs(outputs: Any, row: int) -> Any:
    """One row of an encoder's outputs, as a batch of one; a caller may have passed a bare tuple."""
    if not isinstance(outputs, ModelOutput):
        outputs = BaseModelOutput(last_hidden_state=outputs[0])
    sliced = {
        name: value[row : row + 1] for name, value in outputs.items() if isinstance(value, torch.Tensor) and value.dim()
    }
    return type(outputs)(**sliced)


def takes_cache(config: Any) -> bool:
    """Whether the causal model of this config takes a key-value cache; unknown configs are given the benefit."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model_class is None or CACHE_KEY in inspect.signature(model_class.forward).parameters


def forget_prepared_cache(model: PreTrainedModel) -> None:
    """Drop the static cache that 4.57 keeps on the model, where a call was refused before it could be filled."""
    cache = vars(model).get("_cache")
    if cache is not None and not any(layer.is_initialized for layer in getattr(cache, "layers", ())):
        del vars(model)["_cache"]


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its ids: its embedding's device; `meta` where weights are brought in for each forward."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # models with an embedding of their own kind
        weight = None
    device: torch.device = (next(model.parameters()) if weight is None else weight).device
    return device


def max_positions(config: Any) -> int | None:
    """How many positions a model of this config has, if it says so; some have tables that end there."""
    config = config.get_text_config(decoder=True)
    names = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "max_seq_len")
    limits = (getattr(config, name, None) for name in names)
    return next((limit for limit in limits if isinstance(limit, int)), None)


def shrunk_window(cache: Any, config: Any) -> int | None:
    """The size of a static cache that is smaller than the model's window, which vanilla then takes to be as small."""
    window = getattr(config.get_text_config(decoder=True), "sliding_window", None) or 0
    layers = [layer for layer in text_layers(cache) if isinstance(layer, cache_utils.StaticLayer) and is_sliding(layer)]
    return min((layer.max_cache_len for layer in layers if layer.max_cache_len < window), default=None)


def max_slots(cache: Any) -> int | None:
    """How many tokens a cache of fixed size has room for, if it is one that does not slide."""
    layers = [layer for layer in text_layers(cache) if isinstance(layer, cache_utils.StaticLayer)]
    return min((layer.max_cache_len for layer in layers if not is_sliding(layer)), default=None)


def empty_cache_for(config: Any) -> Cache:
    """The cache vanilla would make for a model of this config."""
    text_config = config.get_text_config(decoder=True)
    cache = DynamicCache(config=text_config)
    return EncoderDecoderCache(cache, DynamicCache()) if config.is_encoder_decoder else cache


def auto_class(config: Any) -> Any:
    """The class that loads a model of this config as one that writes text."""
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    writes_from_text = type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return AutoModelForSeq2SeqLM if writes_from_text else AutoModelForSpeechSeq2Seq
