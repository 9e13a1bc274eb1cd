"""What the tests here share: models saved and loaded again, the calls, and the check for coarse arithmetic."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfspec
from tests.models import both, build, prompt

#: Greedy, and sampled under a seed.
CALLS = (
    pytest.param({"max_new_tokens": 24}, id="greedy"),
    pytest.param({"max_new_tokens": 24, "do_sample": True}, id="seeded"),
)
#: Wide enough for the blocks that packages quantise in.
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def target(dtype: Any = torch.float64, seed: int = 0, **sizes: Any) -> Any:
    """The target of these tests, always the same weights."""
    return build("llama", seed=seed, dtype=dtype, **(SIZES | sizes))


def noisy_copy(model: Any, scale: float = 0.02) -> Any:
    """A good draft for `model`: its weights with a little noise."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1000)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return draft


def reload(model: Any, folder: Path, **how: Any) -> Any:
    """Save `model` and load it again in some way."""
    model.save_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **({"dtype": model.dtype} | how))
    return loaded.eval()


def assert_exact(model: Any, draft: Any, call: dict[str, Any]) -> None:
    """The same tokens, the same random numbers, and tokens that were drafted and accepted."""
    pair = both(model, draft, prompt(), call, draft_budget=4).assert_same().assert_drafted()
    assert pair.stats.accepted_tokens > 0


def assert_same_but_for_ties(model: Any, draft: Any, call: dict[str, Any]) -> None:
    """As `assert_exact`, for arithmetic so coarse that rounding may decide between two tokens that are nearly tied."""
    with hfspec.patched(model, draft, draft_budget=4):
        verdict = hfspec.verify(model, prompt(), **call)
        last = hfspec.stats(model).last
    assert verdict.identical or verdict.near_tie, verdict.summary()
    assert last.fallback_reason is None, last.fallback_reason
    assert last.accepted_tokens > 0
