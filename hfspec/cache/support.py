"""Which models and caches can be sped up, and if not, why not. Looks at configs and objects, never at weights."""

from typing import Any

from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from hfspec import compat

_LOOKING_AHEAD = ("cpmant",)


def model_problem(config: PretrainedConfig) -> str | None:
    """Why a model of this config cannot be sped up (or draft), or `None` if it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models are not sped up yet"
    if config.model_type in _LOOKING_AHEAD:
        return "its attention looks ahead within what is fed at once, so a draft would change the past"
    if not compat.takes_cache(config):
        return "it keeps a state of its own kind, not a key-value cache"
    try:
        cache = compat.empty_cache_for(config)
    except Exception as error:  # a config the host's own cache cannot be built from
        return f"no key-value cache can be made for this model ({error})"
    if not compat.is_full_attention(cache):
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        return f"its cache cannot be rolled back exactly yet (layers: {', '.join(kinds)}; full attention is needed)"
    return None


def cache_problem(cache: Any) -> str | None:
    """Why this cache, made by the host or passed by the user, cannot be rolled back, or `None` if it can."""
    if cache is None:
        return "the model makes its own kind of cache"
    if not isinstance(cache, Cache):
        return f"a cache of type {type(cache).__name__} cannot be rolled back"
    if not compat.is_full_attention(cache):
        kind = type(cache).__name__ + (" (offloaded)" if getattr(cache, "offloading", False) else "")
        return f"a {kind} with other than full-attention layers in memory cannot be rolled back exactly yet"
    return None
