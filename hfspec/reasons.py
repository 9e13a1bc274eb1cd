"""Why a call is not sped up, or its rows must keep in step. Every reason ends a sentence that starts with the call."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from hfspec import compat
from hfspec.cache.support import cache_problem, ragged_problem, target_problem
from hfspec.exactness import exactness_problem, inputs_problem, masks_single_tokens_otherwise, rows_problem
from hfspec.prepared import Prepared
from hfspec.sampling.processors import are_row_independent

#: Stopping criteria that look at each row by itself and keep nothing between calls.
_ROW_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


def plain_reason(prepared: Prepared, max_drafted: int) -> str | None:
    """Why this call cannot be sped up by rounds of up to `max_drafted` draft tokens, or `None` if it can."""
    model, config = prepared.model, prepared.generation_config
    if prepared.input_ids.dim() != 2:
        return "it writes several texts at once for every row"
    problem = _own_preparation(model) or (target_problem(model.config) if prepared.uses_cache else None)
    if problem is not None:
        return problem
    if torch.is_grad_enabled():
        return "gradients are recorded through it"
    if getattr(config, "is_assistant", False):
        return "the model is at work as another model's assistant"
    last = None if config.max_length is None else config.max_length + prepared.num_before
    problem = exactness_problem(model, last, max_drafted + 1) or inputs_problem(model.config, prepared.model_kwargs)
    if problem is not None:
        return problem
    if config.output_attentions and compat.looks_ahead_for_attentions(model):
        return "asked for attention weights, it looks ahead within what is fed at once"
    if prepared.synced_gpus:
        return "several processes must make the same forwards (synced_gpus)"
    if not prepared.uses_cache:
        return _uncached_problem(prepared)
    if prepared.keeps_own_state:
        return _state_problem(prepared)
    return _cache_problem(prepared, last)


def _own_preparation(model: PreTrainedModel) -> str | None:
    """Whether somebody else's code makes the inputs of this model's forwards: what it does with several tokens, say."""
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        origin = getattr(model, name).__module__
        if not origin.startswith("transformers."):
            return f"{name}() comes from {origin}, which may count on one new token in every forward"
    return None


def _uncached_problem(prepared: Prepared) -> str | None:
    config = prepared.generation_config
    if prepared.returns_states and (config.output_attentions or config.output_hidden_states):
        return "without a cache, states of the whole text are wanted for every token"
    if prepared.cache is not None and not compat.reads_all(prepared.model.config):
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
    if compat.is_static(cache) and masks_single_tokens_otherwise(model.config):
        return "over a static cache, this model masks a single token otherwise than several"
    window = compat.shrunk_window(cache, model.config)
    if window is not None and (last is None or last > window + 1):
        return "a static cache that is smaller than the window changes what a token sees by what comes with it"
    if compat.compiles_decoding(model, prepared.model_kwargs, config):
        return "transformers compiles forwards over single tokens for this kind of cache"
    if compat.masks_by_types(model, cache, prepared.model_kwargs):
        return "over a static cache token types would be taken for a prompt's whenever several tokens come at once"
    if prepared.returns_states and config.output_attentions and _has_odd_attentions(cache):
        return "attention weights over a windowed or static cache have another shape for several tokens at once"
    return None


def lockstep_reason(prepared: Prepared, cache: Any) -> str | None:
    """Why all rows of a batch must be committed together, token by token, or `None` if each may go at its own pace.

    Args:
        cache: the one the call will use.
    """
    if compat.has_foreign_forward(prepared.model):
        return "the model's forward is not transformers' own, so that nobody knows whether rows may leave"
    if prepared.streamer is not None:
        return "a streamer sees the whole batch token by token"
    if prepared.returns_states:
        return "scores, states or a cache of the whole batch are wanted, those of finished rows included"
    if not are_row_independent(prepared.processors):
        return "a logits processor may look at the whole batch"
    if not all(type(each) in _ROW_CRITERIA for each in prepared.criteria):
        return "a stopping criterion may look at the whole batch"
    if not prepared.ends_by_token and not all(type(each) is MaxLengthCriteria for each in prepared.criteria):
        return "rows that have ended go on until all have, as no token ends them"
    if not prepared.uses_cache or prepared.keeps_own_state:
        return "there is no cache of keys and values"
    if any(_is_unknown(name, value) for name, value in prepared.model_kwargs.items()):
        return "the model is handed more than what is known to have a row for each text"
    if prepared.has_media or prepared.model_kwargs.get("inputs_embeds") is not None:
        return "the prompt is more than text"
    mask = prepared.model_kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=-1) < 0).any())):
        return "prompts are padded elsewhere than at the left, which vanilla's windows take into account"
    position_ids = prepared.model_kwargs.get("position_ids")
    if position_ids is not None and (position_ids.dim() != 2 or not compat.ADVANCES_POSITIONS):
        return "positions are of a kind of their own"
    return ragged_problem(prepared.model, cache)


def _is_unknown(name: str, value: Any) -> bool:
    """Whether a keyword of the model holds what may not have a row for each text, to be left out with it."""
    if name in (compat.CACHE_KEY, *compat.ROW_INPUTS, "cache_position"):
        return False
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, Cache) or (isinstance(value, dict | list | tuple) and len(value) > 0)


def _has_odd_attentions(cache: Any) -> bool:
    return compat.is_static(cache) or any(compat.is_sliding(layer) for layer in compat.text_layers(cache))
