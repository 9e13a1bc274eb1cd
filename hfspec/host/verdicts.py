"""Why a call is not sped up, or its rows must keep in step. Every reason ends a sentence that starts with the call."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from hfspec.cache.ledger import SpeculativeCache, SpeculativeLayer
from hfspec.host import architectures, caches, forwards, releases
from hfspec.host.exactness import (
    config_problem,
    exactness_problem,
    inputs_problem,
    masks_single_tokens_otherwise,
    rows_problem,
)
from hfspec.host.prepared import Prepared
from hfspec.sampling.processors import are_row_independent

#: They take no position ids, but work them out from the mask (or need none: ALiBi counts slots between tokens).
_POSITIONS_FROM_MASK = ("biogpt", "bloom", "mpt", "opt", "xglm")

#: They fail with a mask behind a cache in older releases.
_MASKS_ALIKE = ("ctrl", "recurrent_gemma")

#: Their recurrent state is not in the cache, but on the model.
_STATE_IN_LAYERS = ("recurrent_gemma",)

#: Stopping criteria that look at each row by itself and keep nothing between calls.
ROW_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)
#: Attention that takes an additive mask `[batch, 1, tokens, slots]`.
_MASKED_ATTENTION = ("eager", "sdpa")
#: They limit or bias attention by slots, whatever mask they are given.
_COUNTS_INSIDE = ("bloom", "gpt_neo", "mpt")


def plain_reason(prepared: Prepared, max_drafted: int) -> str | None:
    """Why this call cannot be sped up by rounds of up to `max_drafted` draft tokens, or `None` if it can."""
    model, config = prepared.model, prepared.generation_config
    if prepared.input_ids.dim() != 2:
        return "it writes several texts at once for every row"
    problem = _own_preparation(model) or (target_problem(model.config) if prepared.uses_cache else None)
    if problem is not None:
        return problem
    if any(isinstance(value, Iterator) for value in prepared.model_kwargs.values()):
        return "an input comes piece by piece while the text is written"
    if torch.is_grad_enabled():
        return "gradients are recorded through it"
    if getattr(config, "is_assistant", False):
        return "the model is at work as another model's assistant"
    last = None if config.max_length is None else config.max_length + prepared.num_before
    problem = exactness_problem(model, last, max_drafted + 1) or inputs_problem(model.config, prepared.model_kwargs)
    if problem is not None:
        return problem
    if config.output_attentions and architectures.looks_ahead_for_attentions(model):
        return "asked for attention weights, it looks ahead within what is fed at once"
    if prepared.ends_by_token and prepared.pad_id is None:
        return "a token may end it, and there is no padding id for what comes behind"
    if prepared.synced_gpus:
        return "several processes must make the same forwards (synced_gpus)"
    if not prepared.uses_cache:
        return _uncached_problem(prepared)
    if prepared.keeps_own_state:
        return _state_problem(prepared)
    return _cache_problem(prepared, last)


def _own_preparation(model: PreTrainedModel) -> str | None:
    """Whether somebody else's code makes the inputs of forwards, and does not say that it knows of several new tokens.

    Where it does, the forwards that it prepares are proved as all are.
    """
    for name, count in releases.PREPARES_BY.items():
        method = getattr(model, name)
        is_foreign = not method.__module__.startswith("transformers.")
        if is_foreign and count not in inspect.signature(method).parameters:
            return f"{name}() comes from {method.__module__}, which may count on one new token in every forward"
    return None


def _uncached_problem(prepared: Prepared) -> str | None:
    config = prepared.generation_config
    if prepared.returns_states and (config.output_attentions or config.output_hidden_states):
        return "without a cache, states of the whole text are wanted for every token"
    if prepared.cache is not None and not architectures.reads_all(prepared.model.config):
        return "with use_cache=False, the cache that is passed gets the whole text again for every token"
    return None


def _state_problem(prepared: Prepared) -> str | None:
    """What stands against a model that makes a state of its own kind."""
    if type(prepared.cache).__module__.startswith("transformers.models."):
        return "a state of the model's own kind is passed, which it writes into and which cannot be brought back"
    if prepared.returns_states and prepared.generation_config.output_attentions:
        return "attention weights are wanted of a model that has a state in their place"
    return rows_problem(prepared.model.config) if prepared.num_rows > 1 else None


def _cache_problem(prepared: Prepared, last: int | None) -> str | None:
    model, config, cache = prepared.model, prepared.generation_config, prepared.cache
    problem = cache_problem(cache)
    if problem is not None:
        return problem
    if caches.is_static(cache) and masks_single_tokens_otherwise(model.config):
        return "over a static cache, this model masks a single token otherwise than several"
    window = caches.shrunk_window(cache, model.config)
    if window is not None and (last is None or last > window + 1):
        return "a static cache that is smaller than the window changes what a token sees by what comes with it"
    if forwards.compiles_decoding(model, prepared.model_kwargs, config):
        return (
            "transformers compiles forwards over single tokens for a cache of fixed size on this device; with "
            "disable_compile=True in the generation config the call can be sped up"
        )
    if caches.masks_by_types(model, cache, prepared.model_kwargs):
        return "over a static cache token types would be taken for a prompt's whenever several tokens come at once"
    if prepared.returns_states and config.output_attentions and _has_odd_attentions(cache):
        return "attention weights over a windowed or static cache have another shape for several tokens at once"
    return None


def lockstep_reason(prepared: Prepared) -> str | None:
    """What of the call keeps all rows of a batch together, token by token, or `None`; `apart_problem` may, besides."""
    if (code := architectures.foreign_code(prepared.model)) is not None:
        return f"{code}, and may hold something for each row, so that nobody knows whether rows may leave"
    if prepared.streamer is not None:
        return "a streamer sees the whole batch token by token"
    config = prepared.generation_config
    if prepared.returns_states and (config.output_hidden_states or config.output_attentions):
        return "states of every token are wanted, those of the padding behind finished rows included"
    if not are_row_independent(prepared.processors):
        return "a logits processor may look at the whole batch"
    if not all(type(each) in ROW_CRITERIA for each in prepared.criteria):
        return "a stopping criterion may look at the whole batch"
    if not prepared.ends_by_token and not all(type(each) is MaxLengthCriteria for each in prepared.criteria):
        return "rows that have ended go on until all have, as no token ends them"
    if not prepared.pad_is_readable:
        return "rows that have ended are to be fed a padding id that the model does not have"
    return None


def apart_problem(prepared: Prepared, cache: Any) -> str | None:
    """Why the target's forwards cannot be made of ids, positions and mask alone, or `None` if they can.

    That is what rows of different lengths need, and trees.
    """
    if not prepared.uses_cache or prepared.keeps_own_state:
        return "there is no cache of keys and values"
    problem = ragged_problem(prepared.model, cache)
    if problem is not None:
        return problem
    if prepared.has_media or prepared.model_kwargs.get("inputs_embeds") is not None:
        return "the prompt is more than text"
    if not forwards.hands_on_positions(prepared.model, cache):
        return "the model's own preparation of its inputs makes positions of its own"
    if any(_is_unknown(name, value) for name, value in prepared.model_kwargs.items()):
        return "the model is handed more than what is known to have a row for each text"
    mask = prepared.model_kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=-1) < 0).any())):
        return "prompts are padded elsewhere than at the left, which vanilla's windows take into account"
    position_ids = prepared.model_kwargs.get("position_ids")
    if position_ids is not None and (position_ids.dim() != 2 or not releases.ADVANCES_POSITIONS):
        return "positions are of a kind of their own"
    is_padded = mask is not None and prepared.generation_config.output_attentions and not bool(mask.all())
    if is_padded and prepared.returns_states:
        return "attention weights are wanted over padding, too"
    return None


def tree_problem(model: PreTrainedModel, cache: Cache) -> str | None:
    """Why a draft for this model must be a chain, or `None` if it may be a tree with a mask and positions of its own.

    Args:
        cache: one that `ragged_problem` has nothing against.
    """
    config = model.config.get_text_config(decoder=True)
    attention = architectures.attention_of(model)
    if attention not in _MASKED_ATTENTION:
        return f"attention of the kind {attention!r} takes no mask for each token"
    if not architectures.takes_position_ids(model):
        return "the model works positions out by itself"
    if config.model_type in _COUNTS_INSIDE or getattr(config, "alibi", False):
        return "the model takes the distance between slots for a distance in the text"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "the model's attention is chunked by slots"
    return None


def _is_unknown(name: str, value: Any) -> bool:
    """Whether a keyword of the model holds what may not have a row for each text, to be left out with it."""
    if name in (releases.CACHE_KEY, *releases.ROW_INPUTS, "cache_position"):
        return False
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, Cache) or (isinstance(value, dict | list | tuple) and len(value) > 0)


def _has_odd_attentions(cache: Any) -> bool:
    return caches.is_static(cache) or any(caches.is_sliding(layer) for layer in caches.text_layers(cache))


def target_problem(config: PretrainedConfig) -> str | None:
    """Why a model of this config cannot be sped up, or `None` if it can."""
    if architectures.reads_all(config) or architectures.state_key(config) is not None:
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
    if not architectures.takes_cache(config) or architectures.state_key(config) is not None:
        return "it keeps a state of its own kind, not a key-value cache"
    try:
        cache = caches.empty_cache_for(config)
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
    if any(isinstance(layer, caches.QUANTIZED_LAYER) for layer in cache.layers):
        return "a quantized cache rounds its content by how many tokens come at once: no two ways of decoding agree"
    return None


def ragged_problem(model: PreTrainedModel, cache: Cache) -> str | None:
    """Why the rows of a batch must go on at one pace with this cache, or `None` if each may go at its own."""
    if isinstance(cache, EncoderDecoderCache):
        return "a decoder behind an encoder takes a token's slot for its position"
    if caches.is_changed(DynamicLayer):
        return "transformers' own cache layers were changed in place, which nobody knows to work row by row"
    if not isinstance(cache, SpeculativeCache):
        return "a cache of fixed size, or of the caller's own, holds one length for all rows"
    if not all(isinstance(layer, SpeculativeLayer) for layer in cache.layers):
        return "recurrent layers hold one state for a whole row, which cannot wait for another"
    config = model.config.get_text_config(decoder=True)
    if model.config.model_type == "git":
        return "the model widens masks by the places of its image"
    if config.model_type in _MASKS_ALIKE and not releases.HAS_EVEN_FORWARDS:
        return "in this release of transformers the model cannot have masks of its own for each row behind a cache"
    if model.config.model_type == "voxtral_realtime":
        return "the model hears a stream, and keeps more caches than this one"
    if config.model_type == "llama4_text" and getattr(config, "attn_temperature_tuning", False):
        return "the model scales attention by a token's slot"
    if not architectures.takes_position_ids(model) and config.model_type not in _POSITIONS_FROM_MASK:
        return "the model takes a token's slot for its position"
    return None


def counts_slots(model: PreTrainedModel, cache: Cache) -> bool:
    """Whether the model may take the distance between slots for a distance in the text.

    Only a model with rotary positions and full attention surely does not.
    """
    config = model.config.get_text_config(decoder=True)
    has_alibi = bool(getattr(config, "alibi", False))
    return not architectures.is_rotary(config) or has_alibi or any(caches.is_sliding(layer) for layer in cache.layers)


def _is_the_hosts(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("transformers", "hfspec")
