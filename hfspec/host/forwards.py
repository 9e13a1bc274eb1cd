"""Drives the host's forwards as its own decoding loop does: the prompt, and what comes behind it.

Knows the releases' ways of preparing inputs; knows nothing of drafts.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerationConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from hfspec.host import architectures, releases

#: Tokens of all rows up to which a wide forward keeps the kernel for experts that copies their weights for each token.
_FEW_TOKENS = 4
#: The configs whose experts the host has switched to that kernel, for the call of this thread.
_here = threading.local()


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
    if releases.HAS_PREFILL:
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

    `outputs` is what the forward before has given; it may be empty unless the model `grows_itself`.
    """
    host: Any = model
    model_kwargs = dict(model_kwargs)
    # Token types grow otherwise by many than one by one, which is how vanilla decodes, and how a model's own way of
    # growing its inputs is called.
    has_types = any("token_type" in name and value is not None for name, value in model_kwargs.items())
    if releases.ADVANCES_BY_MANY and not grows_itself(model) and not has_types:
        advanced: dict[str, Any] = host._update_model_kwargs_for_generation(
            outputs, model_kwargs, model.config.is_encoder_decoder, num_new_tokens
        )
        return advanced
    for _ in range(num_new_tokens):
        model_kwargs = host._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder
        )
        # Explicit position ids are never advanced by 4.57: vanilla feeds the prompt's last one for ever.
        if not releases.ADVANCES_BY_MANY and model_kwargs.get("position_ids") is not None:
            position_ids = model_kwargs["position_ids"]
            model_kwargs["position_ids"] = torch.cat([position_ids, position_ids[..., -1:]], dim=-1)
    return model_kwargs


def grows_itself(model: PreTrainedModel) -> bool:
    """Whether a class has a way of its own to grow its inputs, perhaps by what forwards give besides the cache."""
    return type(model)._update_model_kwargs_for_generation is not GenerationMixin._update_model_kwargs_for_generation


def are_alike(one: Any, other: Any) -> bool:
    """Whether inputs of two forwards are the same: nested tensors by their values, caches by identity."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return isinstance(one, bool | int | float | str) and one == other


def prepare_last(
    model: PreTrainedModel, input_ids: torch.Tensor, num_fed: int, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Prepare a forward over the last `num_fed` of `input_ids`, the ones before being in the cache.

    Args:
        input_ids: `[batch, length]`.
        model_kwargs: grown to the same length.
    """
    host: Any = model
    if releases.FEEDS_BY_LENGTH:
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
    for name in (f"{prefix}attention_mask", f"{prefix}position_ids", *releases.TOKEN_TYPES):
        if isinstance(cut.get(name), torch.Tensor):
            cut[name] = cut[name][..., :-1]
    if not releases.FEEDS_BY_LENGTH:
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
    if architectures.takes_position_ids(model):
        kwargs["position_ids"] = position_ids
    for name in releases.TOKEN_TYPES:
        if kwargs.get(name) is not None:  # text goes on as the type that it ended with
            kwargs[name] = kwargs[name][:, -1:].expand(-1, width)
    if not releases.FEEDS_BY_LENGTH:
        kwargs["cache_position"] = torch.arange(num_slots, num_slots + width, device=position_ids.device)
    return kwargs


def prepares_itself(model: PreTrainedModel) -> bool:
    """Whether a class has a way of its own to prepare the inputs of a forward."""
    return type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation


def prepares_simply(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether the host hands ids, positions and mask on to the model as they are, with the same keywords each time."""
    has_types = any(model_kwargs.get(name) is not None for name in releases.TOKEN_TYPES)
    return not prepares_itself(model) and releases.FEEDS_BY_LENGTH and not has_types


def hands_on_positions(model: PreTrainedModel, cache: Any) -> bool:
    """Whether positions and mask that are asked for come to the model: its own preparation may make others.

    Args:
        cache: of the kind that the call uses, with whatever in it.
    """
    if not prepares_itself(model) or not architectures.takes_position_ids(model):
        return True
    ids, position_ids = torch.zeros(2, 2, dtype=torch.long), torch.tensor([[7], [5]])
    kwargs: dict[str, Any] = {releases.CACHE_KEY: cache, "use_cache": True}
    try:
        kwargs = with_slots(model, kwargs, torch.tensor([[1, 1], [0, 1]]), position_ids, num_slots=1)
        given = prepare_last(model, ids, 1, kwargs).get("position_ids")
    except Exception:  # it wants more than every call brings
        return False
    return isinstance(given, torch.Tensor) and given.tolist() == [[7], [5]]  # PaliGemma of 4.57 writes into ours


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


@contextmanager
def decoding(model: PreTrainedModel) -> Iterator[None]:
    """The context in which 5.x runs every forward after the prompt: on accelerators it switches kernels for experts.

    From `grouped_mm`, which reads each expert once, to `batched_mm`, which copies its weights for each token.
    """
    host: Any = model
    if not hasattr(model, "_optimize_model_for_decode"):
        yield
        return
    grouped = [each for each in _configs(model.config) if _experts(each) == "grouped_mm"]
    outer = getattr(_here, "switched", [])
    with host._optimize_model_for_decode():
        _here.switched = [each for each in grouped if _experts(each) == "batched_mm"]
        try:
            yield
        finally:
            _here.switched = outer


@contextmanager
def wide(num_rows: int, width: int) -> Iterator[None]:
    """A forward within `decoding` over `width` tokens a row: where they are many, without copies of the experts.

    A Mixtral would copy some 8 GB a layer for 17 tokens. Single tokens stay with the kernel that vanilla has for them.
    """
    switched: list[Any] = getattr(_here, "switched", [])
    if not switched or width == 1 or num_rows * width <= _FEW_TOKENS:
        yield
        return
    for each in switched:
        each._experts_implementation_internal = "grouped_mm"
    try:
        yield
    finally:
        for each in switched:
            each._experts_implementation_internal = "batched_mm"


def _configs(config: Any) -> list[Any]:
    """A config and those within it."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [config, *(each for part in parts if part is not None for each in _configs(part))]


def _experts(config: Any) -> str | None:
    return getattr(config, "_experts_implementation_internal", None)


def prepare_all(model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Prepare a forward over the whole text `[rows, length]`, as vanilla does without a cache."""
    host: Any = model
    model_inputs: dict[str, Any] = host.prepare_inputs_for_generation(input_ids, **model_kwargs)
    return model_inputs


def row_of_outputs(outputs: Any, row: int) -> Any:
    """One row of an encoder's outputs, as a batch of one; a caller may have passed a bare tuple."""
    if not isinstance(outputs, ModelOutput):
        outputs = BaseModelOutput(last_hidden_state=outputs[0])
    sliced = {
        name: value[row : row + 1] for name, value in outputs.items() if isinstance(value, torch.Tensor) and value.dim()
    }
    return type(outputs)(**sliced)


def compiles_decoding(
    model: PreTrainedModel, model_kwargs: dict[str, Any], generation_config: GenerationConfig
) -> bool:
    """Whether vanilla compiles the forwards after the prompt, as it does for static caches on accelerators."""
    host: Any = model
    return bool(host._valid_auto_compile_criteria(model_kwargs, generation_config))


def forget_prepared_cache(model: PreTrainedModel) -> None:
    """Drop the static cache that 4.57 keeps on the model, where a call was refused before it could be filled."""
    cache = vars(model).get("_cache")
    if cache is not None and not any(layer.is_initialized for layer in getattr(cache, "layers", ())):
        del vars(model)["_cache"]
