"""Why a call is not sped up, or its rows must keep in step. Every reason ends a sentence that starts with the call."""

from typing import Any

from transformers.cache_utils import Cache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from hfspec import compat
from hfspec.cache.support import cache_problem, ragged_problem, target_problem
from hfspec.exactness import exactness_problem, rows_problem
from hfspec.prepared import Prepared
from hfspec.sampling.processors import are_row_independent

#: Stopping criteria that look at each row by itself and keep nothing between calls.
_ROW_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


def plain_reason(prepared: Prepared) -> str | None:
    """Why this call cannot be sped up, or `None` if it can."""
    model, config = prepared.model, prepared.generation_config
    if prepared.input_ids.dim() != 2:
        return "it writes several texts at once for every row"
    problem = target_problem(model.config) if prepared.uses_cache else None
    if problem is not None:
        return problem
    if getattr(config, "is_assistant", False):
        return "the model is at work as another model's assistant"
    last = None if config.max_length is None else config.max_length + prepared.num_before
    problem = exactness_problem(model, last)
    if problem is not None:
        return problem
    if config.output_attentions and compat.looks_ahead_for_attentions(model):
        return "asked for attention weights, it looks ahead within what is fed at once"
    if prepared.synced_gpus:
        return "several processes must make the same forwards (synced_gpus)"
    if not prepared.uses_cache:
        if prepared.returns_states and (config.output_attentions or config.output_hidden_states):
            return "without a cache, states of the whole text are wanted for every token"
        return None
    if prepared.keeps_own_state:
        return rows_problem(model.config) if prepared.num_rows > 1 else None
    problem = cache_problem(prepared.cache)
    if problem is not None:
        return problem
    window = compat.shrunk_window(prepared.cache, model.config)
    if window is not None and (last is None or last > window + 1):
        return "a static cache that is smaller than the window changes what a token sees by what comes with it"
    if compat.compiles_decoding(model, prepared.model_kwargs, config):
        return "the host compiles forwards over single tokens for this kind of cache"
    if compat.masks_by_types(model, prepared.cache, prepared.model_kwargs):
        return "over a static cache token types would be taken for a prompt's whenever several tokens come at once"
    if prepared.returns_states and config.output_attentions and _has_odd_attentions(prepared.cache):
        return "attention weights over a windowed or static cache have another shape for several tokens at once"
    return None


def lockstep_reason(prepared: Prepared, cache: Any) -> str | None:
    """Why all rows of a batch must be committed together, token by token, or `None` if each may go at its own pace.

    Args:
        cache: the one the call will use.
    """
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
    if any(_holds_more_than_rows(value) for name, value in prepared.model_kwargs.items() if name != compat.CACHE_KEY):
        return "the model is handed more than tensors with a row for each text"
    if prepared.has_media or prepared.model_kwargs.get("inputs_embeds") is not None:
        return "the prompt is more than text"
    mask = prepared.model_kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=-1) < 0).any())):
        return "prompts are padded elsewhere than at the left, which vanilla's windows take into account"
    position_ids = prepared.model_kwargs.get("position_ids")
    if position_ids is not None and (position_ids.dim() != 2 or not compat.ADVANCES_POSITIONS):
        return "positions are of a kind of their own"
    return ragged_problem(prepared.model, cache)


def _holds_more_than_rows(value: Any) -> bool:
    return isinstance(value, Cache) or (isinstance(value, dict | list | tuple) and len(value) > 0)


def _has_odd_attentions(cache: Any) -> bool:
    return compat.is_static(cache) or any(compat.is_sliding(layer) for layer in compat.text_layers(cache))
