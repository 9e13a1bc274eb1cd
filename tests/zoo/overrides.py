"""What single architectures need besides the common sizes, so that a tiny model of them can be built and run."""

from collections.abc import Callable
from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _kinds(*groups: tuple[str, ...]) -> Callable[[Any], list[str]]:
    """The group of layer types that this release's config knows (releases name them differently), or the last."""

    def choose(default: Any) -> list[str]:
        known = getattr(default, "layer_types", None) or getattr(default, "layers_block_type", None) or []
        return next((list(group) for group in groups if set(group) <= {*known, "full_attention"}), list(groups[-1]))

    return choose


def _where_missing(name: str, value: Any) -> Callable[[Any], Any]:
    """A setting for the releases whose default config leaves it open."""
    return lambda default: value if getattr(default, name, None) is None else None


#: Settings by model type; a dict is for the config of that name inside, a function is called with the default config.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16},
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters=": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dory": {
        "num_hidden_layers": 8,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "sliding_attention", "mlp"] + ["full_attention", "mlp"] * 2,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 16},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "gptj": {"rotary_dim": 4},
    "granite_speech": {"encoder_config": {"context_size": 8}},
    "granitemoehybrid": {
        "layer_types": _kinds(("linear_attention", "full_attention"), ("mamba", "attention")),
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_chunk_size": 16,
    },
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "kyutai_speech_to_text": {
        "codebook_vocab_size": 97,
        "frame_size": 8,
        "codec_config": {"upsample_groups": 16, "upsampling_ratios": [2, 2]},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2}
    },
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 2}},
    "mamba2": {"head_dim": 16},
    "mllama": {"rope_scaling": _where_missing("rope_parameters", {"rope_type": "default"})},
    "phi4_multimodal": {
        "vision_config": _where_missing("vision_config", {}),
        "audio_config": _where_missing("audio_config", {}),
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "num_hidden_layers": 2,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "transfo-xl": {"cutoffs": [20, 40, 60], "d_embed": 32},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "layers_block_type": _kinds(("linear_attention", "hybrid") * 2, ("mamba", "mamba", "hybrid", "mamba")),
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}
_WAVES = {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 8], "num_feat_extract_layers": 2}
OVERRIDES["wav2vec2"] = OVERRIDES["speecht5"] = _WAVES
OVERRIDES["omniasr"] = {"audio_config": _WAVES}
OVERRIDES["gemma3n"] = {"text_config": OVERRIDES["gemma3n_text"]}
OVERRIDES["granite_speech_plus"] = OVERRIDES["granite_speech"]
OVERRIDES["qwen4_exp_text"] = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
OVERRIDES["dots3_note"] = OVERRIDES["dots3_note_text"] = {
    "head_dim": 16,
    "per_layer_config=": {
        "02": {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 8}
    },
}
OVERRIDES["qwen4_exp"] = OVERRIDES["qwen4_exp_text"]
_VIBEVOICE = {"num_filters": 2, "depths": [1] * 7, "hidden_size": 16}
OVERRIDES["vibevoice_asr"] = {
    "acoustic_tokenizer_encoder_config": _VIBEVOICE,
    "semantic_tokenizer_encoder_config": _VIBEVOICE,
}
OVERRIDES["vibevoice"] = {
    "audio_config": _VIBEVOICE,
    "semantic_model_config": _VIBEVOICE,
    "diffusion_head_config": {"latent_size": 16},
}

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
for _type in ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"):
    OVERRIDES[_type] = {"text_config": {"rope_parameters=": _MROPE}}
_HALF = _MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
OVERRIDES["glm4v_moe"] = {"text_config": {"rope_parameters=": _HALF}}
OVERRIDES["ernie4_5_vl_moe"] = {"text_config": {"rope_parameters=": _MROPE | {"mrope_section": [1, 1, 2]}}}
for _type in ("cohere_compass", "qwen4_exp"):
    OVERRIDES[f"image: {_type}"] = {"text_config": OVERRIDES[f"{_type}_text"]}
OVERRIDES["step3p7"] = {"text_config": {"sliding_window": 8}}
OVERRIDES["inkling2"] = OVERRIDES["inkling2_loop"] = {"vision_config": {"text_hidden_size": 32}}
OVERRIDES["molmo2"] = {"adapter_config": {"vision_feature_layer": [1, 0]}}
OVERRIDES["nemotron_h_omni"] = {"vision_config": {"video_temporal_patch_size": 2}}
OVERRIDES["chameleon"] = OVERRIDES["emu3"] = {"vocabulary_map=": {"<image>": 96}}
OVERRIDES["kosmos-2.5"] = {
    "text_config": {"embed_dim": 32, "layers": 2},
    "vision_config": {"patch_embed_hidden_size": 32, "max_num_patches": 16},
    "latent_query_num": 4,
}
OVERRIDES["blip"] = {"vision_config": {"image_size": 32, "patch_size": 16}}
OVERRIDES["kosmos-2"] = {"text_config": {"embed_dim": 32, "layers": 2}, "latent_query_num": 4}
OVERRIDES["idefics"] = {
    "vision_config": {"embed_dim": 32, "image_size": 32, "patch_size": 16},
    "additional_vocab_size": 1,
    "use_resampler": False,
}

#: What a config class needs to be made at all.
NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 30,
        }
    },
}

#: Inner models of another library, and a config of the host's own that stands in for each.
STAND_INS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3n": {
        "vision_config": {
            "model_type": "siglip_vision_model",
            "rms_norm_eps": 1e-6,
            "vocab_size": 8,
            "vocab_offset": 97,
        }
    }
}

#: Sounds or pictures instead of text: the input's name and the shape of one row.
FEATURES: dict[str, tuple[str, tuple[int, ...]]] = {
    "blip": ("pixel_values", (3, 32, 32)),
    "idefics": ("pixel_values", (1, 3, 32, 32)),
    "canary": ("input_features", (16, 16)),
    "cohere_asr": ("input_features", (16, 16)),
    "kyutai_speech_to_text": ("input_values", (1, 30 * 8)),
    "moonshine": ("input_values", (4000,)),
    "moonshine_streaming": ("input_values", (4000,)),
    "pop2piano": ("input_features", (12, 32)),
    "speech: seamless_m4t": ("input_features", (64, 160)),
    "speech: seamless_m4t_v2": ("input_features", (64, 160)),
    "speech-encoder-decoder": ("input_values", (4000,)),
    "speech_to_text": ("input_features", (64, 16)),
    "speecht5": ("input_values", (4000,)),
    "voxtral_realtime": ("input_features", (16, 8 * 40)),
    "speech: whisper": ("input_features", (16, 256)),
}

#: Those that are given a text besides.
WITH_TEXT = ("blip", "idefics", "voxtral_realtime")

#: A mask of pictures that they want for each id of the text.
PICTURE_MASKS = {"idefics": "image_attention_mask"}

#: Rows of token ids for one text (as many as there are sound codebooks).
ROWS_PER_TEXT = {"musicgen": 4, "musicgen_melody": 4}

#: More keywords of `generate()`.
CALLS: dict[str, dict[str, Any]] = {
    "pop2piano": {"composer": "composer1"},
}

#: Settings of the model's own `generation_config`.
GENERATION: dict[str, dict[str, Any]] = {
    "musicgen": {"decoder_start_token_id": 97, "pad_token_id": 97, "num_return_sequences": 1},
    "musicgen_melody": {"decoder_start_token_id": 97, "pad_token_id": 97, "num_return_sequences": 1},
    "pop2piano": {"composer_to_feature_token": {f"composer{number}": number for number in range(1, 22)}},
}

#: Models that cannot draft for one of their own kind, in ways that their configs do not tell.
SCRIPTED = ("recurrent_gemma", "voxtral_realtime")
