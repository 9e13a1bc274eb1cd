"""Which models and caches can be sped up, and if not, why not. Looks at configs and objects, never at weights."""

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache

from hfspec import compat
from hfspec.cache.ledger import SpeculativeCache, SpeculativeLayer
from hfspec.exactness import config_problem

#: They take no position ids, but work them out from the mask (or need none: ALiBi counts slots between tokens).
_POSITIONS_FROM_MASK = ("biogpt", "bloom", "mpt", "opt", "xglm")

#: They fail with a mask behind a cache in older releases.
_MASKS_ALIKE = ("ctrl", "recurrent_gemma")

#: Their recurrent state is not in the cache, but on the model.
_STATE_IN_LAYERS = ("recurrent_gemma",)


def target_problem(config: PretrainedConfig) -> str | None:
    """Why a model of this config cannot be sped up, or `None` if it can."""
    if compat.reads_all(config) or compat.state_key(config) is not None:
        return config_problem(config)  # as a target it can do without a cache that goes back
    return model_problem(config)


def draft_problem(config: PretrainedConfig, target_config: PretrainedConfig) -> str | None:
    """Why a model of this config cannot draft for such a target, or `None` if it can. Tokenizers are another matter."""
    if config.model_type in _STATE_IN_LAYERS:
        return "it keeps its state in its own layers, where the target or another call may be at work"
    if config.is_encoder_decoder and not target_config.is_encoder_decoder:
        return "it has an encoder, and this target brings nothing that it could read"
    return model_problem(config)


def model_problem(config: PretrainedConfig) -> str | None:
    """Why a model of this config cannot draft with a cache that goes back, or `None` if it can."""
    problem = config_problem(config)
    if problem is not None:
        return problem
    if not compat.takes_cache(config) or compat.state_key(config) is not None:
        return "it keeps a state of its own kind, not a key-value cache"
    try:
        cache = compat.empty_cache_for(config)
    except Exception as error:  # a config the host's own cache cannot be built from
        return f"no cache can be made for this model ({error})"
    return cache_problem(cache)


def cache_problem(cache: Any) -> str | None:
    """Why this cache, made by the host or passed by the user, cannot be brought back, or `None` if it can."""
    if cache is None:
        return "the model makes its own kind of cache"
    if isinstance(cache, EncoderDecoderCache):
        return cache_problem(cache.self_attention_cache)
    if not isinstance(cache, Cache) or not _is_the_hosts(type(cache)):
        return f"a cache of type {type(cache).__name__} is not the host's: nobody knows how to bring it back"
    foreign = sorted({type(layer).__name__ for layer in cache.layers if not _is_the_hosts(type(layer))})
    if foreign:
        return f"its cache has layers of a kind that nobody knows how to bring back ({', '.join(foreign)})"
    if any(isinstance(layer, compat.QUANTIZED_LAYER) for layer in cache.layers):
        return "a quantized cache rounds its content by how many tokens come at once: no two ways of decoding agree"
    return None


def ragged_problem(model: PreTrainedModel, cache: Cache) -> str | None:
    """Why the rows of a batch must go on at one pace with this cache, or `None` if each may go at its own."""
    if isinstance(cache, EncoderDecoderCache):
        return "a decoder behind an encoder takes a token's slot for its position"
    if not isinstance(cache, SpeculativeCache):
        return "a cache of fixed size, or of the caller's own, holds one length for all rows"
    if not all(isinstance(layer, SpeculativeLayer) for layer in cache.layers):
        return "recurrent layers hold one state for a whole row, which cannot wait for another"
    config = model.config.get_text_config(decoder=True)
    if model.config.model_type == "git":
        return "the model widens masks by the places of its image"
    if config.model_type in _MASKS_ALIKE and not compat.HAS_EVEN_FORWARDS:
        return "in this release of transformers the model cannot have masks of its own for each row behind a cache"
    if model.config.model_type == "voxtral_realtime":
        return "the model hears a stream, and keeps more caches than this one"
    if config.model_type == "llama4_text" and getattr(config, "attn_temperature_tuning", False):
        return "the model scales attention by a token's slot"
    if not compat.takes_position_ids(model) and config.model_type not in _POSITIONS_FROM_MASK:
        return "the model takes a token's slot for its position"
    return None


def counts_slots(model: PreTrainedModel, cache: Cache) -> bool:
    """Whether the model may take the distance between slots for a distance in the text.

    Only a model with rotary positions and full attention surely does not.
    """
    config = model.config.get_text_config(decoder=True)
    is_rotary = any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta"))
    has_alibi = bool(getattr(config, "alibi", False))
    return not is_rotary or has_alibi or any(compat.is_sliding(layer) for layer in cache.layers)


def _is_the_hosts(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("transformers", "hfspec")
