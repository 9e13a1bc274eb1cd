"""GGUF files: unpacked while loading, and kept in their blocks (5.24 and later)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.loading.tiny import CALLS, assert_exact
from tests.models import VOCAB, build

gguf = pytest.importorskip("gguf")

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(model: Any, file: Path, kind: str) -> None:
    """Write a Qwen2 model as GGUF, its matrices quantised as `kind` says."""
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{index}>" for index in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    for name, weight in model.state_dict().items():
        wanted = gguf.GGMLQuantizationType[kind if weight.dim() == 2 else "F32"]
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(weight.float().numpy(), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    stem, part = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{part}"
    _, _, layer, stem = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[stem]}.{part}"


def load(file: Path, dtype: torch.dtype, **how: Any) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, **how)
    loaded.generation_config.eos_token_id = loaded.generation_config.bos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded.eval()


def original() -> Any:
    return build("qwen2", dtype=torch.float32, hidden_size=64, intermediate_size=128)


@pytest.fixture(params=["Q8_0", "Q4_0"])
def file(request, tmp_path):
    """A model file whose matrices are in blocks."""
    written = tmp_path / "model.gguf"
    write(original(), written, request.param)
    return written


@pytest.fixture
def packed(file, monkeypatch) -> Any:
    """The model with the host's own packed layers, which hold the file's blocks: bytes for parameters.

    The host loads so where it has a kernel for the device (from the hub, none for CPUs) and only some
    architectures, all of them hybrid; so its layers are put in by its own function here. On CPUs they unpack
    their blocks in every forward.
    """
    utils = pytest.importorskip("transformers.integrations.gguf.utils", reason="this release always unpacks")
    model = original()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    named = {name: tensors[_gguf_name(name)] for name, weight in model.state_dict().items() if weight.dim() == 2}
    plan = {name: tensor.tensor_type.value for name, tensor in named.items()}
    if not set(plan.values()) <= utils.GGML_BLOCK.keys():
        pytest.skip("this release does not keep blocks of this kind")
    layers = utils.replace_with_gguf_modules(model, plan, SimpleNamespace(supports=lambda _: True))
    for name, layer in layers.items():
        layer.weight.data = torch.from_numpy(named[name].data.copy())
    with torch.no_grad():  # those that a packed layer replaced were new
        for name, weight in original().state_dict().items():
            if name not in layers:
                model.state_dict()[name].copy_(weight)
    # Up to so many rows the kernel would be asked for the product.
    monkeypatch.setattr(utils, "MAX_GEMV_ROWS", 0)
    assert model.get_input_embeddings().weight.dtype == torch.uint8
    return model.eval()


def dense(file: Path) -> Any:
    """The file's model, unpacked to common weights."""
    config = getattr(transformers, "GgufConfig", None)
    return load(file, torch.float32, **({"quantization_config": config(dequantize=True)} if config else {}))


@pytest.mark.parametrize("call", CALLS)
def test_an_unpacked_target(file, call):
    """Weights unpacked while loading are weights like others."""
    model = dense(file)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert_exact(model, original(), call)


@pytest.mark.parametrize("call", CALLS)
def test_an_unpacked_draft(file, call):
    assert_exact(original().double(), dense(file), call)


@pytest.mark.parametrize("call", CALLS)
def test_a_packed_target(packed, call):
    """Blocks, not weights: bytes for parameters, also in the embedding."""
    assert_exact(packed, original(), call)


@pytest.mark.parametrize("call", CALLS)
def test_a_packed_draft(packed, call):
    assert_exact(original().double(), packed, call)


def test_a_packed_pair(packed):
    assert_exact(packed, packed, {"max_new_tokens": 24})


def test_a_draft_by_name_beside_a_packed_target(packed, tmp_path):
    """A draft given as a path is loaded in the dtype that the target computes in, not in that of its blocks."""
    original().save_pretrained(tmp_path / "draft")
    assert_exact(packed, tmp_path / "draft", {"max_new_tokens": 24})
