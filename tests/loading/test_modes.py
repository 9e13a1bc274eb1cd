"""Dtypes that differ, devices as far as one machine has them, training mode and gradient checkpointing."""

from typing import Any

import pytest
import torch

import hfspec
from hfspec.host import releases
from tests.loading.tiny import CALLS, assert_exact, assert_same_but_for_ties, noisy_copy, target
from tests.models import both, build, plain_text, prompt

# Before 5.24 layers checkpoint where there is nothing to checkpoint for.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")

NEW = {"max_new_tokens": 24}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("draft_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", [torch.float64, torch.float32], ids=str)
def test_a_draft_in_another_dtype(target_dtype, draft_dtype, call):
    """Whatever the draft computes in, an exact target writes what it would."""
    assert_exact(target(target_dtype), noisy_copy(target(draft_dtype)), call)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("target_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_coarser_target_than_its_draft(target_dtype, call):
    """A half-precision target with a float32 draft: the same but for near-ties."""
    assert_same_but_for_ties(target(target_dtype), noisy_copy(target(torch.float32)), call)


def flags(model: Any) -> dict[str, Any]:
    """All that a call could leave changed."""
    return {
        # `training` and `gradient_checkpointing` among them.
        "switches": [
            {name: value for name, value in vars(module).items() if isinstance(value, bool)}
            for module in model.modules()
        ],
        "requires_grad": [weight.requires_grad for weight in model.parameters()],
        "grad": [weight.grad for weight in model.parameters()],
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "grad_enabled": torch.is_grad_enabled(),
    }


def prepared(model: Any, training: bool, checkpointing: bool, frozen: bool) -> Any:
    model.train(training)
    if checkpointing:
        # Renamed in 5.24.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
def test_modes_are_left_as_they_were(training, checkpointing):
    """In every mode the call gives vanilla's result, and finds and leaves all flags of both models alike."""
    model = prepared(target(), training, checkpointing, frozen=False)
    draft = prepared(noisy_copy(target()), False, checkpointing, frozen=True)
    before = flags(model), flags(draft)
    for call in (NEW, NEW | {"do_sample": True}):
        pair = both(model, draft, prompt(), call, draft_budget=4).assert_same()
        if loses_its_cache(model):
            pair.assert_plain("checkpointing")
        else:
            pair.assert_drafted()
    assert (flags(model), flags(draft)) == before


def loses_its_cache(model: Any) -> bool:
    """Whether vanilla itself writes nonsense in this mode: before 5.24, layers that checkpoint forget the past."""
    return not torch.equal(plain_text(model, prompt(), **NEW), plain_text(target(), prompt(), **NEW))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_draft_in_training_mode(checkpointing):
    """Likewise; a draft that forgets the past (see above) is not asked, and the reason says what to do."""
    draft = prepared(noisy_copy(target()), training=True, checkpointing=checkpointing, frozen=False)
    before = flags(draft)
    pair = both(target(), draft, prompt(), NEW, draft_budget=4).assert_same()
    is_forgetful = checkpointing and releases.CHECKPOINTING_DROPS_CACHE
    pair.assert_plain("checkpointing") if is_forgetful else pair.assert_drafted()
    assert flags(draft) == before


def test_gradients_can_be_taken_afterwards():
    """A training step after a patched call: nothing of the call is in the graph, and every weight gets its gradient."""
    model = prepared(target(), training=True, checkpointing=False, frozen=False)
    with hfspec.patched(model, noisy_copy(target()), draft_budget=4):
        ids = model.generate(prompt(), **NEW)
        assert hfspec.stats(model).last.accepted_tokens > 0
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["a number", "layers"])
def test_dropout_in_training_mode_runs_plain(kind, do_sample):
    """No two forwards agree under dropout, so there is nothing to verify a draft by."""
    model = target(attention_dropout=0.1) if kind == "a number" else build("gpt2")
    call = NEW | {"do_sample": do_sample}
    dry = plain_text(model, prompt(), **call)
    assert not torch.equal(plain_text(model.train(), prompt(), **call), dry), "nothing was dropped"
    both(model, target(), prompt(), call, draft_budget=4).assert_same().assert_plain("dropout")


@pytest.mark.parametrize("call", CALLS)
def test_a_draft_with_dropout_does_not_disturb_the_random_state(call):
    """A draft in training mode draws random numbers; the target's are vanilla's all the same."""
    draft = noisy_copy(target(attention_dropout=0.2)).train()
    state = torch.get_rng_state()
    draft(input_ids=prompt())
    assert not torch.equal(torch.get_rng_state(), state), "this draft draws nothing, so the test would show nothing"
    pair = both(target(), draft, prompt(), call, draft_budget=4).assert_same().assert_drafted()
    assert pair.stats.accepted_tokens > 0
    assert draft.training
