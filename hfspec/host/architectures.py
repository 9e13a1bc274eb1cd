"""What a model of transformers is and takes: traits that are read from its class, its config and its code."""

import functools
import inspect
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

from hfspec.host import releases
from hfspec.host.modules import all_modules

#: Packages whose modules and hooks keep nothing that has a row for each text (but for PEFT's adapters by row).
_KNOWN_PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "hfspec",
    "kernels",
    "peft",
    "torch",
    "torchao",
    "transformers",
)


def num_processes(model: PreTrainedModel) -> int:
    """How many processes share the model's layers, all of which must make the same forwards."""
    return getattr(model, "_tp_size", None) or 1


def foreign_code(model: PreTrainedModel) -> str | None:
    """Where the code of somebody else is in the model's forwards, if anywhere: in a forward of its own, or a hook."""
    for module in all_modules(model):
        forward = vars(module).get("forward", type(module).forward)
        if not _is_known(origin := _origin(forward)):
            return f"the {type(module).__name__}'s forward is not transformers' own ({origin})"
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not _is_known(origin := _origin(hook)) or origin.startswith("peft.tuners."):
                return f"a forward hook is on the {type(module).__name__} ({origin})"
    return None


def _is_known(origin: str) -> bool:
    return origin.split(".")[0] in _KNOWN_PACKAGES


def _origin(function: Any) -> str:
    """Where a function was written."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def attention_of(model: PreTrainedModel) -> str | None:
    """The name of the kernel that the model's text layers attend with."""
    name: str | None = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    return name


def takes_position_ids(model: PreTrainedModel) -> bool:
    """Whether the model's forward takes position ids."""
    return "position_ids" in inspect.signature(model.forward).parameters


def looks_ahead_for_attentions(model: PreTrainedModel) -> bool:
    """Whether a model that is asked for its attention weights sees what comes later in the same forward.

    Falcon then adds the mask to its scores; 4.57 makes one for that, 5.x one of booleans unless attention is eager.
    """
    makes_masks = hasattr(model.base_model, "_update_causal_mask")
    return model.config.model_type == "falcon" and model.config._attn_implementation != "eager" and not makes_masks


def reads_all(config: Any) -> bool:
    """Whether the model knows no cache, so that vanilla feeds it the whole text for every token."""
    return str(config.model_type) == "openai-gpt"


def state_key(config: Any) -> str | None:
    """The keyword of a state that is no cache of the host's kind, made by the model itself; `None` for other models."""
    keys = {"minimax": releases.CACHE_KEY, "rwkv": "state", "xlstm": releases.CACHE_KEY}
    return keys.get(config.model_type) if releases.CACHE_KEY == "cache" else None


def takes_cache(config: Any) -> bool:
    """Whether the causal model of this config takes a key-value cache; unknown configs are given the benefit."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model_class is None or releases.CACHE_KEY in inspect.signature(model_class.forward).parameters


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its ids: its embedding's device; `meta` where weights are brought in for each forward."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # models with an embedding of their own kind
        weight = None
    device: torch.device = (next(model.parameters()) if weight is None else weight).device
    return device


def max_positions(config: Any) -> int | None:
    """How many positions a model of this config has, if it has a table of them that ends; rotary positions do not."""
    config = config.get_text_config(decoder=True)
    if is_rotary(config):
        return None
    names = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "max_seq_len")
    limits = (getattr(config, name, None) for name in names)
    return next((limit for limit in limits if isinstance(limit, int)), None)


def is_rotary(config: Any) -> bool:
    """Whether a text model of this config works its positions out, by rotation, as far as the text goes."""
    return any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta"))


def auto_class(config: Any) -> Any:
    """The class that loads a model of this config as one that writes text."""
    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    writes_from_text = type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return AutoModelForSeq2SeqLM if writes_from_text else AutoModelForSpeechSeq2Seq
