"""Whether a forward over several tokens gives what vanilla's forwards over single tokens give, but for rounding.

It is what speculation stands on, and what some models do not keep: they scale what they read by all of it, they
look ahead, their positions change with the length. Such targets run plain. (Recurrent layers that start anew are
fed token by token, see `stepping`.)
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hfspec.host import releases
from hfspec.host.modules import all_modules

_CODES = "it writes several codebooks at once, not one text"
#: By the type of the text model's config, or of the whole. Each was found by comparing such forwards (`tests/zoo`).
_BY_TYPE = {
    "blt": "it joins bytes to patches by what comes at once",
    "cpmant": "its attention looks ahead within what is fed at once, so a draft would change the past",
    "dia": _CODES,
    "fsmt": "its decoder takes positions for the last token only",
    "kyutai_speech_to_text": _CODES,
    "moshi": _CODES,
    "musicgen_decoder": _CODES,
    "musicgen_melody_decoder": _CODES,
    "prophetnet": "behind a cache it takes single tokens only",
    "unlimited_ocr_text": "its window lets several tokens at once see further back than one",
    "xlm": "it puts a mask token behind every text, so that nothing it has read can be kept",
}
#: The same, in releases whose masks for several tokens behind a cache are not those for one (4.57 and 5.17).
_UNEVEN = (
    "big_bird",
    "encoder-decoder",
    "git",
    "megatron-bert",
    "qwen4_exp",
    "qwen4_exp_text",
    "rembert",
    "roc_bert",
    "roformer",
    "speech-encoder-decoder",
)
#: How many slots attention picks, in the configs that say so: of GLM and DeepSeek, and of Doge.
_PICKED_SLOTS = ("index_topk", "keep_window_size")
#: Those whose experts take so many tokens of a forward (`expert_capacity`) and leave out the others.
_LIMITED_EXPERTS = ("switch_transformers",)
#: Those that leave the mask of the cache's slots out of forwards over single tokens.
_UNMASKED = ("gpt_neo", "led", "nllb-moe")
#: Those whose attention depends on where positions begin, and otherwise so for several tokens.
_POSITIONS_FROM_ZERO = ("deepseek_v4",)
#: Those whose forwards over single tokens mix the rows of a batch, while their forwards over several do not.
_MIX_ROWS = ("rwkv",)
#: Made to write only by `is_decoder`.
_ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
#: They count as positions the ids that are not padding, of those that come at once.
_POSITIONS_FROM_IDS = ("m2m_100", "nllb-moe", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "speecht5", "trocr")


def last_draft_id(config: PretrainedConfig) -> int | None:
    """The id behind which nothing can be verified in the same forward, if there is one.

    A model that works positions out from the ids gives those behind a padding id other ones than vanilla.
    """
    text_config = config.get_text_config(decoder=True)
    if not {config.model_type, text_config.model_type} & set(_POSITIONS_FROM_IDS):
        return None
    found: int | None = text_config.pad_token_id
    return found


def config_problem(config: PretrainedConfig) -> str | None:
    """Why no model of this config can be verified in one forward, or `None`. Looks at no weights."""
    text_config = config.get_text_config(decoder=True)
    for each in (text_config, config):
        if each.model_type in _BY_TYPE:
            return _BY_TYPE[each.model_type]
        if each.model_type in _ENCODERS and not getattr(each, "is_decoder", False):
            return "its attention looks both ways, as is_decoder is not set in its config"
        if each.model_type in _UNEVEN and not releases.HAS_EVEN_FORWARDS:
            return "in this release of transformers it masks several tokens behind a cache otherwise than one"
        if getattr(each, "second_expert_policy", "all") != "all":
            return "its experts are drawn at random in every forward"
    return None


def rows_problem(config: PretrainedConfig) -> str | None:
    """Why a batch of such a model cannot be verified in one forward, where a single text can, or `None`."""
    if config.model_type in _MIX_ROWS:
        return "its forwards over single tokens mix the rows of a batch, and others do not"
    return None


def inputs_problem(config: PretrainedConfig, model_kwargs: Mapping[str, Any]) -> str | None:
    """Why a call with these inputs cannot be verified in one forward, where others of such a model can, or `None`."""
    # Only for the models concerned: a look into a tensor waits for the device.
    if config.model_type in _POSITIONS_FROM_ZERO:
        position_ids = model_kwargs.get("position_ids")
        if position_ids is not None and int(position_ids.max()) >= position_ids.shape[-1]:
            return "where positions begin later, its attention differs between one token and several"
    if masks_single_tokens_otherwise(config):
        mask = model_kwargs.get("decoder_attention_mask")
        if mask is not None and not bool(mask.all()):
            return "its decoder leaves the mask out of forwards over single tokens"
    return None


def masks_single_tokens_otherwise(config: PretrainedConfig) -> bool:
    """Whether a single token sees slots that a mask hides, where several tokens do not."""
    return config.model_type in _UNMASKED


def exactness_problem(model: PreTrainedModel, max_length: int | None, max_width: int) -> str | None:
    """Why this target cannot be verified in forwards over up to `max_width` tokens, or `None`.

    Args:
        max_length: that the text may get.
    """
    if model.config.model_type in _LIMITED_EXPERTS and model.config.expert_capacity < max_width:
        return f"its experts leave out tokens when more than {model.config.expert_capacity} come at once"
    for limit, what in _exact_lengths(model.config):
        if max_length is None or max_length > limit:
            return f"{what} beyond {limit} tokens, and this call may get there"
    return config_problem(model.config) or next(filter(None, map(_module_problem, all_modules(model))), None)


def _exact_lengths(config: PretrainedConfig) -> list[tuple[int, str]]:
    """Lengths up to which a forward over many tokens computes what forwards over one each do, and what changes then.

    Dynamic and long RoPE choose the frequencies of a whole forward by the furthest position in it. Sparse attention
    picks the best slots once there are more than it takes, and breaks ties by how many tokens come at once.
    """
    config = config.get_text_config(decoder=True)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [scaling, *(each for each in scaling.values() if isinstance(each, dict))]
    lengths: list[tuple[int, str]] = []
    if any(kind.get("rope_type", kind.get("type")) in ("dynamic", "longrope") for kind in kinds):
        names = ("original_max_position_embeddings", "max_position_embeddings")
        limits = [getattr(config, name, None) for name in names]
        limits += [kind.get("original_max_position_embeddings") for kind in kinds]
        lengths.append((min(limit for limit in limits if limit), "its position encoding changes"))
    picked = (getattr(config, name, None) for name in _PICKED_SLOTS)
    lengths += [(number, "its attention picks slots") for number in picked if isinstance(number, int)]
    return lengths


def _module_problem(module: torch.nn.Module) -> str | None:
    if module.training and getattr(module, "gradient_checkpointing", False) and releases.CHECKPOINTING_DROPS_CACHE:
        return "gradient checkpointing in training mode drops the cache"
    if module.training and _draws(module):
        return "the model is in training mode with random dropout or noise: no two forwards agree"
    if _splits_by_outliers(module):
        return (
            "its 8-bit layers single out columns by the outliers of all tokens in a forward (LLM.int8), so that a "
            "token's logits depend on its neighbours; loaded with llm_int8_threshold=0.0 it can be sped up"
        )
    if _scales_over_tokens(module):
        return (
            "its quantised layers use one scale for all tokens of a forward, so that a token's logits depend on "
            "its neighbours; with a scale for each token (PerRow in torchao) it can be sped up"
        )
    return None


def _draws(module: torch.nn.Module) -> bool:
    """Whether a module has a dropout, jitter or noise above 0, as a layer or as a number that it keeps."""
    return any(
        value > 0
        for name, value in vars(module).items()
        if isinstance(value, float)
        and (isinstance(module, torch.nn.Dropout) or any(word in name for word in ("drop", "jitter", "noise")))
    )


def _splits_by_outliers(module: torch.nn.Module) -> bool:
    """Whether this is a layer of bitsandbytes' LLM.int8."""
    state: Any = getattr(module, "state", None)
    return _is_a(module, "bitsandbytes.nn", "Linear8bitLt") and bool(state.threshold > 0)


def _scales_over_tokens(module: torch.nn.Module) -> bool:
    """Whether this layer quantises what it reads by one number that it takes from all of it."""
    if _is_a(module, "torch.ao.nn.quantized.dynamic", "Linear"):
        packed: Any = module._packed_params
        return bool(packed.dtype == torch.qint8)
    # torchao: the layer is a common one, its weight is not.
    weight: Any = getattr(module, "weight", None)
    reading = getattr(weight, "act_quant_kwargs", None)
    is_fixed = getattr(weight, "act_quant_scale", None) is not None
    return type(getattr(reading, "granularity", None)).__name__ == "PerTensor" and not is_fixed


def _is_a(module: torch.nn.Module, package: str, name: str) -> bool:
    """Whether `module` is of that class, which is not imported for this: where nobody has, nothing is of it."""
    found = getattr(sys.modules.get(package), name, None)
    return found is not None and isinstance(module, found)
