"""bitsandbytes, torchao and torch's own dynamic int8, as targets and as drafts.

Three kinds of arithmetic. Weights alone quantised, or activations token by token: a token's numbers are its own, and
only rounding depends on how many are fed at once (coarse rounding, where activations are). Activations scaled over
all tokens of a forward, or LLM.int8's outliers: a token's numbers depend on its neighbours, so that a draft cannot
be verified exactly, and such targets run plain.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from hfspec.host import caches, releases
from tests.loading.tiny import CALLS, assert_exact, assert_same_but_for_ties, reload, target
from tests.models import both, prompt

pytestmark = [
    # What these packages say of their own and torch's old interfaces while they are imported and used.
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning"),
]

NEW = {"max_new_tokens": 24}


def bitsandbytes(tmp_path: Any, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return reload(target(torch.float32), tmp_path, dtype=dtype, quantization_config=BitsAndBytesConfig(**how))


def torchao(tmp_path: Any, name: str, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    pytest.importorskip("torchao")
    from torchao import quantization

    config = TorchAoConfig(getattr(quantization, name)(**how))
    return reload(target(torch.float32), tmp_path, dtype=dtype, quantization_config=config)


def per_tensor() -> Any:
    pytest.importorskip("torchao")
    from torchao.quantization import PerTensor

    return PerTensor()


def dynamic(model: Any, dtype: torch.dtype = torch.qint8) -> Any:
    quantize: Any = torch.ao.quantization.quantize_dynamic
    return quantize(copy.deepcopy(model), {torch.nn.Linear}, dtype=dtype)


#: Ways to load `target()` whose tokens do not depend on each other.
BY_TOKEN = {
    "int8 without outliers": lambda folder: bitsandbytes(folder, load_in_8bit=True, llm_int8_threshold=0.0),
    "nf4": lambda folder: bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": lambda folder: bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "nf4 twice, in bf16": lambda folder: bitsandbytes(
        folder,
        torch.bfloat16,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    "torchao int8 weights": lambda folder: torchao(folder, "Int8WeightOnlyConfig"),
    "torchao int8 by token": lambda folder: torchao(folder, "Int8DynamicActivationInt8WeightConfig"),
    "float16 weights": lambda folder: dynamic(target(torch.float32), torch.float16),
}
#: That among them which rounds activations to 8 bits within float32.
COARSE = "torchao int8 by token"
#: Ways whose tokens do, and words of the reason.
BY_FORWARD = {
    "LLM.int8": (lambda folder: bitsandbytes(folder, load_in_8bit=True), "llm_int8_threshold=0"),
    "torchao int8 by tensor": (
        lambda folder: torchao(folder, "Int8DynamicActivationInt8WeightConfig", granularity=per_tensor()),
        "one scale",
    ),
    "dynamic int8": (lambda folder: dynamic(target(torch.float32)), "one scale"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", [how for how in BY_TOKEN if how != COARSE])
def test_a_quantised_target(tmp_path, how, call):
    """The quantised target's own tokens, but for near-ties, with its unquantised self as the draft."""
    assert_same_but_for_ties(BY_TOKEN[how](tmp_path), target(torch.float32), call)


@pytest.mark.parametrize("call", CALLS)
def test_coarse_steps_are_no_rounding(tmp_path, call):
    """Float32's noise becomes a step of 8 bits here and there: the tokens are vanilla's, plain once that was seen."""
    pair = both(BY_TOKEN[COARSE](tmp_path), target(torch.float32), prompt(), call, draft_budget=4).assert_same()
    reason = pair.stats.fallback_reason
    assert reason is None or "does not give what forwards over one give" in reason


@pytest.mark.parametrize("call", CALLS)
def test_int8_weights_are_exact(tmp_path, call):
    """Where only weights are quantised and the rest is float32, float32's promise holds: the same tokens."""
    assert_exact(BY_TOKEN["torchao int8 weights"](tmp_path), target(torch.float32), call)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", BY_FORWARD)
def test_a_target_whose_tokens_depend_on_their_neighbours(tmp_path, how, call):
    """Such a target runs plain, and the reason says why (and, if there is one, the way out)."""
    load, words = BY_FORWARD[how]
    both(load(tmp_path), target(torch.float32), prompt(), call, draft_budget=4).assert_same().assert_plain(words)


@pytest.mark.parametrize("how", BY_FORWARD)
def test_they_do_depend_on_them(tmp_path, how):
    """The fact behind the reason: fed together, tokens get other logits than singly, by far more than rounding."""
    apart, exact = (_far_apart(load) for load in (BY_FORWARD[how][0](tmp_path), target(torch.float32)))
    assert exact < 1e-4
    assert apart > 0.1


@pytest.mark.parametrize("how", BY_TOKEN)
def test_elsewhere_it_is_rounding(tmp_path, how):
    """The fact behind speeding up the others: what differs there is a step of a coarse number here and there."""
    assert _far_apart(BY_TOKEN[how](tmp_path)) < 0.1


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", [*BY_TOKEN, *BY_FORWARD])
def test_a_quantised_draft(tmp_path, how, call):
    """Every one of them may draft: an exact target writes what it would."""
    draft = BY_TOKEN[how](tmp_path) if how in BY_TOKEN else BY_FORWARD[how][0](tmp_path)
    assert_exact(target(), draft, call)


def _far_apart(model: Any) -> float:
    """How much logits of a text fed eight tokens at a time differ from those fed singly, in standard deviations."""
    ids = prompt(40)
    logits = []
    for width in (1, 8):
        cache = caches.empty_cache_for(model.config)
        with torch.no_grad():
            parts = [model(input_ids=part, **{releases.CACHE_KEY: cache}).logits for part in ids.split(width, dim=1)]
        logits.append(torch.cat(parts, dim=1).float())
    one_by_one, together = logits
    return float((together - one_by_one).abs().max() / one_by_one.std())
