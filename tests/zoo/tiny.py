"""A tiny random model of any architecture, made from its config class.

The sizes of a config are known by their names, so one table shrinks nearly all of them; what an architecture
needs besides stands in `overrides.py`. Layers are kept so that every kind of layer that the default config
has is there once.
"""

import inspect
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo.overrides import GENERATION, NEEDED, OVERRIDES, STAND_INS

VOCAB, PAD, BOS, EOS = 97, 0, 1, 2
_MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
#: Names of sizes, by the size they get.
_NAMES_BY_SIZE = {
    VOCAB: """vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size unpadded_vocab_size
        vocab_size_per_layer_input t2u_vocab_size char_vocab_size""",
    128: """max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions
        max_encoder_position_embeddings max_decoder_position_embeddings original_max_position_embeddings
        model_max_length context_length num_position_embeddings max_speech_positions max_text_positions
        max_pos_emb t2u_max_position_embeddings ngram_vocab_size_base index_topk""",
    32: """hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim
        input_embedding_size output_embedding_size hidden_size_global out_hidden_size output_dim lru_width
        audio_hidden_size backbone_hidden_size projector_hidden_size projector_input_dim projector_output_dim
        cross_hidden_size cross_attention_hidden_size encoder_hidden_size hidden_dim attention_hidden_size
        vector_quantization_hidden_dimension codebook_dim conv_channels subsampling_conv_channels
        nemo_conv_channels downsample_hidden_size latent_size unit_embed_dim lang_embed_dim spkr_embed_dim
        speaker_embedding_dim upsample_initial_channel codevector_dim proj_codevector_dim xvector_output_dim
        output_hidden_size frequency_embedding_size adapter_in_dim adapter_out_dim base_channels
        pronunciation_embed_dim shape_embed_dim classifier_proj_size t2u_variance_predictor_embed_dim
        t2u_variance_predictor_hidden_dim speech_decoder_prenet_units speech_decoder_postnet_units
        ext_pw_out_channel depthwise_separable_out_channel num_conv_pos_embeddings shape_vocab_size
        pronunciation_vocab_size encoder_hash_byte_group_vocab unit_hifi_gan_vocab_size num_centroids
        moe_latent_size audio_vocab_size codebook_size codebook_vocab_size split_ngram_parts output_channels""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dim_ff dff d_inner moe_intermediate_size
        shared_expert_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size
        shared_intermediate_size intermediate_size_mlp dense_intermediate_size expert_ffn_hidden_size mlp_dim
        feed_forward_size ffn_hidden_size speech_encoder_intermediate_size t2u_encoder_ffn_dim
        t2u_decoder_ffn_dim prompt_mid_dim router_hidden_size""",
    16: """kv_lora_rank q_lora_rank o_lora_rank mamba_d_state ssm_state_size state_size d_state
        num_mel_bins feature_size input_feat_per_channel n_mels chunk_size global_head_dim""",
    8: """sliding_window sliding_window_size attention_chunk_size attention_window_size local_attention
        local_attention_window_len window_size head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim
        v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim swa_head_dim
        cross_head_dim d_head mamba_head_dim attention_head_size query_pre_attn_scalar
        hidden_size_per_layer_input laurel_rank adapter_rank gated_norm_rank
        loop_gate_rank local_radius attention_window global_block_size dim_model_base mm_tokens_per_image
        ple_embed_dim hc_lowrank""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        attention_heads num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads
        decoder_num_attention_heads cross_num_attention_heads speech_encoder_attention_heads
        t2u_encoder_attention_heads t2u_decoder_attention_heads conf_num_attention_heads linear_num_heads
        linear_num_value_heads linear_num_key_heads mamba_num_heads num_experts num_local_experts
        n_routed_experts moe_num_experts index_n_heads num_conv_pos_embedding_groups zero_expert_num
        mamba_n_heads block_multiple_of ffn_round_up_to_multiple_of expert_capacity""",
    2: """num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts depth
        encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_hidden_layers n_layer n_layers
        num_layers encoder_num_hidden_layers decoder_num_hidden_layers speech_encoder_layers t2u_encoder_layers
        t2u_decoder_layers conf_num_hidden_layers num_blocks max_window_layers n_input_layers n_output_layers
        n_recurrent_layers num_layers_per_stack num_global_layers num_timestamp_prediction_layers
        encoder_layers_count num_query_groups o_groups n_groups mamba_n_groups centroid_intermediate_top_k""",
    1: """n_group topk_group num_expert_group first_k_dense_replace num_dense_layers pretraining_tp
        num_kv_shared_layers num_lstm_layers num_sparse_encoder_layers num_sparse_decoder_layers
        decoder_sparse_step encoder_sparse_step""",
}
_SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "decoder_layers", "n_layers")
_KV_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "cross_num_key_value_heads": "cross_num_attention_heads",
    "encoder_num_key_value_heads": "encoder_num_attention_heads",
    "decoder_num_key_value_heads": "decoder_num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "num_global_key_value_heads": "num_attention_heads",
}
#: Sizes that a default config may leave open.
_UNSET = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
_NAMED_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_TOKEN_ID = re.compile(r"_token_(id|index)$")


@dataclass(frozen=True)
class Species:
    """One row of the host's tables: a kind of task, a model type, and the class that is loaded for it."""

    kind: str
    model_type: str
    class_name: str

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.model_type}"

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.class_name)

    def override(self, table: dict[str, Any], default: Any) -> Any:
        """What a table says of this row, or else of this model type."""
        return table.get(self.name, table.get(self.model_type, default))


def all_species() -> list[Species]:
    """Everything in the installed release's tables of models that write text; of images, what no other table has."""
    elsewhere = {pair for kind, mapping in _MAPPINGS.items() if kind != "image" for pair in mapping.items()}
    return [
        Species(kind, model_type, class_name)
        for kind, mapping in _MAPPINGS.items()
        for model_type, class_name in mapping.items()
        if kind != "image" or (model_type, class_name) not in elsewhere
    ]


def tiny_config(species: Species) -> PretrainedConfig:
    """The smallest config of this architecture that still has all its kinds of layers."""
    config_class, model_class = CONFIG_MAPPING[species.model_type], species.model_class
    if not issubclass(config_class, model_class.config_class):
        config_class = model_class.config_class
    if hasattr(config_class, "from_encoder_decoder_configs"):
        return _of_two_models(species, config_class)
    default = config_class(**species.override(NEEDED, {}))
    small = _shrunk(default, species.override(OVERRIDES, {}))
    if species.kind == "causal" and "is_decoder" in small:
        small["is_decoder"] = True
    config = config_class(**small)
    for name, settings in species.override(STAND_INS, {}).items():
        part_class = CONFIG_MAPPING[settings["model_type"]]
        vars(config)[name] = part_class(**_shrunk(part_class(), {}) | settings)
    return config


def _of_two_models(species: Species, config_class: Any) -> PretrainedConfig:
    """An encoder and a decoder, each of an architecture of its own."""
    encoder_type = "wav2vec2" if species.kind == "speech" else "bert"
    encoder_class, decoder_class = CONFIG_MAPPING[encoder_type], CONFIG_MAPPING["bert"]
    encoder = encoder_class(**_shrunk(encoder_class(), OVERRIDES.get(encoder_type, {})))
    decoder = decoder_class(**_shrunk(decoder_class(), {}))
    return config_class.from_encoder_decoder_configs(encoder, decoder, pad_token_id=PAD, decoder_start_token_id=BOS)


def build(species: Species, seed: int, dtype: torch.dtype, gain: float = 2.0) -> Any:
    """A random model in evaluation mode, the same for the same arguments; what the host warns of here is its own."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = species.model_class(tiny_config(species))
        _randomise(model, gain)
    model.generation_config = _generation_config(model.config, species.override(GENERATION, {}))
    return model.to(dtype).eval()


def _shrunk(default: PretrainedConfig, override: dict[str, Any]) -> dict[str, Any]:
    """Keywords that make a tiny config of the same class, as far as names tell."""
    config_class = type(default)
    values = default.to_dict()
    parameters = inspect.signature(config_class.__init__).parameters
    small: dict[str, Any] = {}
    next_id = VOCAB - 1
    num_layers, kept = _layers(values)
    keywords = {written: name for name, written in config_class.attribute_map.items() if name in parameters}
    for written, value in values.items():
        name = written if written in parameters else keywords.get(written)
        if name is None or name in ("id2label", "label2id"):
            continue
        part = vars(default).get(written)
        if isinstance(part, PretrainedConfig):
            inner = override.get(name, {})
            small[name] = {"model_type": part.model_type} | _shrunk(part, inner if isinstance(inner, dict) else {})
        elif name in ("is_decoder", "is_encoder_decoder"):
            small[name] = value
        elif name in _NAMED_IDS:
            small[name] = _NAMED_IDS[name]
        elif name == "decoder_start_token_id":
            small[name] = PAD if value == values.get("pad_token_id") else BOS
        elif _TOKEN_ID.search(name) and isinstance(value, int):
            small[name] = next_id
            next_id -= 1
        elif name == "tie_word_embeddings":
            small[name] = False  # else a text of random weights repeats its last token
        elif value is None and name in _UNSET:
            small[name] = _UNSET[name]
        elif name in _KV_HEADS and isinstance(value, int):
            small[name] = 4 if value == values.get(_KV_HEADS[name]) else 2
        elif isinstance(value, list | tuple) and len(value) == num_layers > 2:
            small[name] = [_small(name, value[index]) for index in kept]
        elif name in _LAYER_COUNTS and value == num_layers:
            small[name] = len(kept)
        elif isinstance(value, dict) and "mrope_section" in value:
            small[name] = value | {"mrope_section": [2, 1, 1]}
        elif name in _SIZES:
            small[name] = _small(name, value)
    if values.get("per_layer_config"):
        small["per_layer_config"] = _per_layer(values, small, kept)
    for name, value in override.items():
        if callable(value):
            chosen = value(default)
            small |= {} if chosen is None else {name: chosen}
        elif name.endswith("="):
            small[name[:-1]] = value
        elif not isinstance(value, dict):
            small[name] = value
    for name, value in override.items():
        if isinstance(value, dict) and isinstance(small.get(name), dict):
            small[name] |= {each: value[each] for each in value if not isinstance(value[each], dict)}
    return small


def _small(name: str, value: Any) -> Any:
    """A size as small as its name allows; zeros, flags and what is no size stay."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return min(_SIZES.get(name, value), value)
    return value


def _per_layer(values: dict[str, Any], small: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """Settings of single layers, in the same proportion to the common setting as by default."""
    settings = {int(index): layer for index, layer in values["per_layer_config"].items()}
    return {
        f"{new:02d}": {name: small[name] * size // values[name] for name, size in settings[old].items()}
        for new, old in enumerate(kept)
        if old in settings
    }


def _layers(values: dict[str, Any]) -> tuple[int, list[int]]:
    """The default number of layers, and the layers to keep: the first of each kind, two at least."""
    num_layers = next((values[name] for name in _LAYER_COUNTS if isinstance(values.get(name), int)), 0)
    lists = [
        value
        for value in values.values()
        if isinstance(value, list | tuple) and len(value) == num_layers and num_layers > 1 and isinstance(value[0], str)
    ]
    kinds = list(zip(*lists, strict=True)) if lists else [()] * num_layers
    kept = [index for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    while len(kept) < min(2, num_layers):
        kept.append(kept[-1] + 1)
    return num_layers, kept


def _randomise(model: Any, gain: float) -> None:
    """Wide random matrices, so that the likeliest token changes along a text; vectors stay as the host made them."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or name.endswith(("A_log", "dt_bias")):
                continue
            num_inputs = math.prod(weight.shape[1:]) if "conv" in name else weight.shape[-1]
            weight.copy_(torch.randn(weight.shape) * gain / math.sqrt(num_inputs))


def _generation_config(config: PretrainedConfig, more: dict[str, Any]) -> GenerationConfig:
    text = config.get_text_config(decoder=True)
    start = getattr(config, "decoder_start_token_id", getattr(text, "decoder_start_token_id", None))
    if start is None and config.is_encoder_decoder:
        start = BOS
    return GenerationConfig(**{"pad_token_id": PAD, "bos_token_id": BOS, "decoder_start_token_id": start} | more)
