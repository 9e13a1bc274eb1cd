"""The host's caches: their kinds, and what a call's cache says of itself."""

import functools
import os
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from hfspec.host import releases

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


#: Methods of a layer that ours replace, or that a rollback stands on.
_STOOD_UPON = ("update", "lazy_initialization", "get_seq_length", "get_mask_sizes", "crop")
#: Where the host's code is, and torch's, whose decorators it may wear.
_FOLDERS = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (transformers, torch))


def is_changed(kind: type) -> bool:
    """Whether a method of one of the host's cache layers was replaced in place, as key-value compression does."""
    return not _are_the_hosts(*(getattr(kind, name, None) for name in _STOOD_UPON))


@functools.lru_cache(maxsize=64)
def _are_the_hosts(*methods: Any) -> bool:
    return all(method is None or _is_the_hosts(method) for method in methods)


def _is_the_hosts(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    inner = getattr(method, "__wrapped__", None)
    return code is not None and code.co_filename.startswith(_FOLDERS) and (inner is None or _is_the_hosts(inner))


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
    has_types = any(model_kwargs.get(name) is not None for name in releases.TOKEN_TYPES)
    return has_types and is_static(cache) and hasattr(model, "create_masks_for_generate")


def keeps_elsewhere(cache: Any) -> bool:
    """Whether the cache was asked for as one of a fixed size, or as one that is moved off the device."""
    return is_static(cache) or bool(getattr(getattr(cache, "self_attention_cache", cache), "offloading", False))


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
