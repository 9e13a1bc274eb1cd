"""The host's forwards: which kernel experts are run by."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

import hfspec
from hfspec.host import forwards
from tests.models import VOCAB, OnForward, Scripted, plain_text, prompts

pytestmark = pytest.mark.skipif(
    not hasattr(PreTrainedModel, "get_experts_implementation"), reason="this release has one way to run experts"
)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}


class Largest(TorchDispatchMode):
    """Notes the most elements that a tensor picked out of others by number has had."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.index:
            self.num_elements = max(self.num_elements, result.numel())
        return result


@pytest.fixture
def mixtral(monkeypatch):
    """A tiny Mixtral whose decoding switches kernels as it does on an accelerator."""

    @contextlib.contextmanager
    def as_on_a_device(model):
        model.set_experts_implementation("batched_mm")
        try:
            yield
        finally:
            model.set_experts_implementation("grouped_mm")

    monkeypatch.setattr(MixtralForCausalLM, "_optimize_model_for_decode", as_on_a_device)
    config = MixtralConfig(
        vocab_size=VOCAB,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        **SIZES,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MixtralForCausalLM(config).float().eval()
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.mark.parametrize("num_rows", [1, 3])
def test_wide_forwards_do_not_copy_experts_for_each_token(mixtral, num_rows):
    """At most what few tokens take, or vanilla's own step; single tokens are read by vanilla's kernel."""
    call = prompts(*[7] * num_rows) | {"max_new_tokens": 20, "do_sample": False}
    expected = plain_text(mixtral, call["input_ids"], **{k: v for k, v in call.items() if k != "input_ids"})
    seen = []

    def before(module, args, kwargs):
        seen.append((kwargs["input_ids"].shape[1], mixtral.config._experts_implementation))

    source = Scripted(expected, accepts=[9, 0, 1])
    with hfspec.patched(mixtral, source, draft_budget=12), Largest() as largest:
        hook = OnForward(mixtral, before)
        text = mixtral.generate(**call)
        hook.remove()
    assert torch.equal(text, expected)
    assert {kind for width, kind in seen[1:] if width > 4} == {"grouped_mm"}
    of_a_token = 2 * SIZES["hidden_size"] * 2 * SIZES["intermediate_size"]
    assert largest.num_elements <= max(num_rows, 4) * of_a_token
    assert mixtral.config._experts_implementation == "grouped_mm"


def test_single_tokens_are_read_by_vanillas_kernel(mixtral):
    """Plain rounds are vanilla's forwards."""
    with forwards.decoding(mixtral):
        for num_rows, width, kind in [(1, 1, "batched_mm"), (16, 1, "batched_mm"), (1, 5, "grouped_mm")]:
            with forwards.wide(num_rows, width):
                assert mixtral.config._experts_implementation == kind
        with pytest.raises(RuntimeError), forwards.wide(1, 17):
            raise RuntimeError
        assert mixtral.config._experts_implementation == "batched_mm"
    with forwards.wide(1, 17):
        assert mixtral.config._experts_implementation == "grouped_mm"


def test_a_kernel_that_the_user_chose_stays(mixtral, monkeypatch):
    """Only what the host has switched for decoding is switched back."""
    monkeypatch.setattr(MixtralForCausalLM, "_optimize_model_for_decode", lambda model: contextlib.nullcontext())
    mixtral.set_experts_implementation("batched_mm")
    with forwards.decoding(mixtral), forwards.wide(1, 17):
        assert mixtral.config._experts_implementation == "batched_mm"
