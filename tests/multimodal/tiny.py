"""Tiny models that see and hear, their drafts, and prompts with pictures in them; all made in memory.

Weights are float64 with a wide initialisation, as in `tests.models`.
"""

import copy
import functools
import inspect
import math
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, WhisperConfig, WhisperForCausalLM, WhisperForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models import PAD, VOCAB

#: Ids that no text of ours has: those that frame a picture, and the one that stands for its parts.
VISION_START, VISION_END, VIDEO, IMAGE = 90, 91, 95, 96
#: Text ids are below.
_FIRST_MEDIA_ID = 90

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_MROPE_BASE = 10000.0
_MROPE = {"rope_type": "default", "type": "default", "mrope_section": [2, 1, 1], "rope_theta": _MROPE_BASE}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}


def _llava(layers: int) -> dict[str, Any]:
    return {
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16} | _VISION,
        "text_config": {"model_type": "llama"} | _TEXT | {"num_hidden_layers": layers},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    }


def _qwen2_vl(layers: int) -> dict[str, Any]:
    text = _TEXT | {"num_hidden_layers": layers, "rope_scaling": _MROPE, "rope_theta": _MROPE_BASE}
    vision = _QWEN_VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    return {"text_config": text, "vision_config": vision} | _QWEN_IDS


def _qwen2_5_vl(layers: int) -> dict[str, Any]:
    text = _TEXT | {"num_hidden_layers": layers, "rope_scaling": _MROPE, "rope_theta": _MROPE_BASE}
    vision = {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 16}
    vision |= {"fullatt_block_indexes": [1]}
    return {"text_config": text, "vision_config": _QWEN_VISION | vision} | _QWEN_IDS


def _gemma3(layers: int) -> dict[str, Any]:
    text = _TEXT | {
        "num_hidden_layers": layers,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "layer_types": (["sliding_attention", "full_attention"] * 2)[-layers:],
    }
    return {
        "text_config": {"model_type": "gemma3_text"} | text,
        "vision_config": {"model_type": "siglip_vision_model"} | _VISION,
        "mm_tokens_per_image": 4,
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_END,
        "image_token_index": IMAGE,
        "tie_word_embeddings": False,
    }


def _idefics3(layers: int) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama"} | _TEXT | {"num_hidden_layers": layers},
        "vision_config": {"model_type": "idefics3_vision"} | _VISION,
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
    }


#: What the text model of these is where there is nothing to see.
_CAUSAL_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"}
#: Name: the class, how its config is made, and how many ids stand for a picture.
SEEING = {
    "llava": ("LlavaForConditionalGeneration", _llava, 4),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", _qwen2_vl, 4),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl, 4),
    "gemma3": ("Gemma3ForConditionalGeneration", _gemma3, 4),
    "idefics3": ("Idefics3ForConditionalGeneration", _idefics3, 1),
}


@functools.cache
def seeing(arch: str, seed: int = 0, layers: int = 2) -> Any:
    """A random model that reads pictures, for tests that leave it as they found it."""
    class_name, settings, _ = SEEING[arch]
    model_class = getattr(transformers, class_name)
    model = _random(model_class, model_class.config_class(**settings(layers)), seed)
    # Trained models do not write what stands for a picture.
    model.generation_config.suppress_tokens = [VISION_START, VISION_END, VIDEO, IMAGE]
    return model


@functools.cache
def whisper(seed: int = 0, layers: int = 2) -> Any:
    """A random model that hears; ten seconds of sound are one segment."""
    config = WhisperConfig(
        vocab_size=VOCAB_OF_SPEECH,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=SEGMENT // 2,
        max_target_positions=96,
        pad_token_id=EOT,
        bos_token_id=EOT,
        eos_token_id=EOT,
        decoder_start_token_id=SOT,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    model = _random(WhisperForConditionalGeneration, config, seed)
    model.generation_config = speech_settings()
    return model


#: Whisper's ids: text is below the end of text; then what begins a text, and the times.
EOT, SOT, LANG_EN, LANG_DE, TRANSLATE, TRANSCRIBE, START_OF_PREV, NO_SPEECH, NO_TIMESTAMPS = range(60, 69)
VOCAB_OF_SPEECH = NO_TIMESTAMPS + 1 + 60
#: Frames of one segment.
SEGMENT = 100


def speech_settings() -> GenerationConfig:
    """What a released Whisper brings as its `generation_config`."""
    return GenerationConfig(
        decoder_start_token_id=SOT,
        pad_token_id=EOT,
        bos_token_id=EOT,
        eos_token_id=EOT,
        max_length=40,
        return_timestamps=False,
        is_multilingual=True,
        lang_to_id={"<|en|>": LANG_EN, "<|de|>": LANG_DE},
        task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=START_OF_PREV,
        max_initial_timestamp_index=20,
        begin_suppress_tokens=[EOT],
    )


@functools.cache
def whisper_decoder(seed: int = 0, layers: int = 1) -> Any:
    """A decoder for another Whisper's encoder: the host's `WhisperForCausalLM`, as a small distilled draft."""
    config = copy.deepcopy(whisper().config)
    config.decoder_layers = layers
    return _random(WhisperForCausalLM, config, seed)


def noisy_copy(model: Any, scale: float = 0.02) -> Any:
    """A good draft: the same model with a little noise on its weights."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1000)
    with torch.no_grad():
        for weight in model.parameters():
            weight += (
                scale * weight.std(correction=0) * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            )
    return model


@functools.cache
def language_model(arch: str, vocab_size: int = VOCAB) -> Any:
    """A causal model of the same text weights, that sees nothing: the draft a text-only release would be."""
    seen = seeing(arch)
    text_config = copy.deepcopy(seen.config.get_text_config())
    name = _CAUSAL_TYPES.get(text_config.model_type, text_config.model_type)
    if name != text_config.model_type:
        kept = text_config.to_dict()
        text_config = CONFIG_MAPPING[name](**{key: kept[key] for key in _TEXT if key in kept})
    text_config.vocab_size = vocab_size
    text_config.tie_word_embeddings = False
    text = _random(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(text_config)], text_config, seed=0)
    inner = seen.model.text_model if hasattr(seen.model, "text_model") else seen.model.language_model
    own = {f"model.{key}": weight for key, weight in inner.state_dict().items()} | {
        "lm_head.weight": seen.lm_head.weight
    }
    with torch.no_grad():
        for key, weight in text.state_dict().items():
            weight.copy_(own[key][: len(weight)])
    return text


def widened(model: Any) -> Any:
    """The same model with one more id than the target has, which it likes best."""
    model = copy.deepcopy(model)
    old = model.lm_head.weight.data
    model.lm_head = torch.nn.Linear(old.shape[1], len(old) + 1, bias=False, dtype=old.dtype)
    with torch.no_grad():
        model.lm_head.weight[:-1] = old
        model.lm_head.weight[-1] = 10 * old[5]
    model.config.vocab_size += 1
    return model


def pictures(arch: str, *texts_before: int, num_pictures: int = 1, seed: int = 0) -> dict[str, Any]:
    """One prompt a number: so many text ids, pictures, five text ids; padded at the left."""
    generator = torch.Generator().manual_seed(seed)
    _, _, num_places = SEEING[arch]
    framed = [VISION_START, *[IMAGE] * num_places, VISION_END] * num_pictures
    rows = [[*_ids(before, generator), *framed, *_ids(5, generator)] for before in texts_before]
    inputs = _padded(rows)
    is_image = (inputs["input_ids"] == IMAGE).long()
    num_images = len(rows) * num_pictures
    if arch.startswith("qwen"):
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * num_images)
        inputs["pixel_values"] = torch.randn(16 * num_images, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
    else:
        inputs["pixel_values"] = torch.randn(num_images, 3, 8, 8, generator=generator, dtype=torch.float64)
    if arch == "idefics3":
        inputs["pixel_values"] = inputs["pixel_values"].unflatten(0, (len(rows), num_pictures))
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inspect.signature(type(seeing(arch)).forward).parameters:
            inputs[name] = is_image
    return inputs


def text_only(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts without pictures, padded at the left."""
    generator = torch.Generator().manual_seed(seed)
    return _padded([_ids(length, generator) for length in lengths])


def sounds(rows: int = 1, frames: int = SEGMENT, seed: int = 0) -> torch.Tensor:
    """Log-mel features `[rows, bins, frames]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, frames, generator=generator, dtype=torch.float64)


def _padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def _ids(number: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, _FIRST_MEDIA_ID, (number,), generator=generator).tolist()


def _random(model_class: Any, config: Any, seed: int, gain: float = 2.0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config._attn_implementation = "sdpa"
        model = model_class(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1:
                    weight.normal_(
                        std=gain / math.sqrt(math.prod(weight.shape[1:]) if "conv" in name else weight.shape[-1])
                    )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.to(torch.float64).eval()
