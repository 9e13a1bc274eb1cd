"""Why a call is not sped up, or its rows must keep in step. Every reason ends a sentence that starts with the call."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from hfspec import compat
from hfspec.cache.support import cache_problem, model_problem, ragged_problem
from hfspec.prepared import Prepared
from hfspec.sampling.processors import are_row_independent

#: Stopping criteria that look at each row by itself and keep nothing between calls.
_ROW_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


def plain_reason(prepared: Prepared) -> str | None:
    """Why this call cannot be sped up, or `None` if it can."""
    model, config = prepared.model, prepared.generation_config
    problem = model_problem(model.config)
    if problem is not None:
        return problem
    if getattr(config, "is_assistant", False):
        return "the model is at work as another model's assistant"
    if model.training and _drops_units(model):
        return "the model is in training mode with random dropout or noise: no two forwards agree"
    exact = compat.max_exact_length(model.config)
    if exact is not None and (config.max_length is None or config.max_length > exact):
        return f"its position encoding changes beyond {exact} tokens, and this call may get there"
    if prepared.synced_gpus:
        return "several processes must make the same forwards (synced_gpus)"
    if not prepared.model_kwargs.get("use_cache"):
        return "use_cache=False leaves nothing to continue from"
    problem = cache_problem(prepared.cache)
    if problem is not None:
        return problem
    if compat.compiles_decoding(model, prepared.model_kwargs, config):
        return "the host compiles forwards over single tokens for this kind of cache"
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
    if prepared.has_media or prepared.model_kwargs.get("inputs_embeds") is not None:
        return "the prompt is more than text"
    position_ids = prepared.model_kwargs.get("position_ids")
    if position_ids is not None and (position_ids.dim() != 2 or not compat.ADVANCES_POSITIONS):
        return "positions are of a kind of their own"
    return ragged_problem(prepared.model, cache)


def _has_odd_attentions(cache: Any) -> bool:
    return compat.is_static(cache) or any(compat.is_sliding(layer) for layer in compat.text_layers(cache))


def _drops_units(model: PreTrainedModel) -> bool:
    """Whether some module in training mode has a dropout, jitter or noise above 0, as a layer or a number it keeps."""
    return any(
        value > 0
        for module in model.modules()
        if module.training
        for name, value in vars(module).items()
        if isinstance(value, float)
        and (isinstance(module, torch.nn.Dropout) or any(word in name for word in ("drop", "jitter", "noise")))
    )
