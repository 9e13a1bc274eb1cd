"""PEFT: a target with adapters, however it is wrapped, decodes with them active; a separate draft never sees them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from packaging import version

import hfspec
from tests.loading.tiny import CALLS, assert_exact, noisy_copy, target
from tests.models import both, build, noisy, plain_text, prompt, prompts

peft = pytest.importorskip("peft")

# PEFT asks 5.24 for a property that has got another name there.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

NEW = {"max_new_tokens": 24}


def config() -> Any:
    return peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def train(model: Any, adapter: str = "default", seed: int = 7) -> None:
    """Give an adapter weights that change the text, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name and f".{adapter}." in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def wrapped(model: Any, seed: int = 7) -> Any:
    """`model`, changed in place by `get_peft_model`, with a trained adapter."""
    outer = peft.get_peft_model(model, config()).to(model.dtype).eval()
    train(outer, seed=seed)
    return outer


def text_without_hfspec(adapt: Any = wrapped) -> torch.Tensor:
    return adapt(target()).generate(input_ids=prompt(), **NEW)


@contextmanager
def generating(outer: Any, inner: Any) -> Iterator[Any]:
    """Calls on `outer`, which wraps the patched `inner`, and asserts that a draft was used."""
    yield lambda: outer.generate(input_ids=prompt(), **NEW)
    last = hfspec.stats(inner).last
    assert last.fallback_reason is None, last.fallback_reason
    assert last.accepted_tokens > 0


@pytest.mark.parametrize("call", CALLS)
def test_a_wrapped_model_that_is_patched_inside(call):
    """Patching `base_model.model` of a PEFT model speeds up the wrapper's `generate()`."""
    outer = wrapped(target())
    inner = outer.base_model.model
    assert not torch.equal(plain_text(inner, prompt(), **call), plain_text(target(), prompt(), **call))
    assert_exact(inner, target(), call)


def test_patched_before_it_is_wrapped():
    """The wrapper calls the patched instance, adapters active; the draft, a model apart, stays as it was."""
    expected = text_without_hfspec()
    model, draft = target(), target()
    before = {name: weight.clone() for name, weight in draft.state_dict().items()}
    hfspec.patch(model, draft, draft_budget=4)
    with generating(wrapped(model), model) as generate:
        assert torch.equal(generate(), expected)
    assert all(torch.equal(weight, before[name]) for name, weight in draft.state_dict().items())


def test_patched_after_it_is_wrapped():
    """The same, in the other order, through the wrapper; and off again."""
    expected = text_without_hfspec()
    outer = wrapped(target())
    inner = hfspec.patch(outer.base_model.model, target(), draft_budget=4)
    with generating(outer, inner) as generate:
        assert torch.equal(generate(), expected)
    hfspec.unpatch(inner)
    assert torch.equal(outer.generate(input_ids=prompt(), **NEW), expected)


def test_the_wrapper_itself_is_refused_with_the_way_out():
    """A PEFT wrapper has no decoding loop of its own, as a target or as a draft; the error names what to pass."""
    outer = wrapped(target())
    for pair in ((outer, target()), (target(), outer)):
        with pytest.raises(hfspec.PatchError, match=r"see its \.get_base_model\(\)"):
            hfspec.patch(*pair)
    assert outer.get_base_model() is outer.base_model.model


def test_a_draft_that_shares_the_adapted_modules():
    """The very object that `get_peft_model` changed in place is no unadapted draft any more: it drafts adapted."""
    base = target()
    outer = wrapped(base)
    inner = outer.base_model.model
    assert inner is base
    pair = both(inner, base, prompt(), NEW, draft_budget=4).assert_same().assert_drafted()
    assert pair.stats.acceptance_rate == 1.0


def test_a_draft_with_an_adapter_of_its_own():
    """A draft trained to follow its target: adapters in both, each its own."""
    outer, draft = wrapped(target()), wrapped(noisy_copy(target()))
    assert_exact(outer.base_model.model, draft.base_model.model, NEW)


def test_adapters_switched_between_calls():
    """Each call decodes with the adapter that is active then, or with none."""
    outer = wrapped(target())
    outer.add_adapter("other", config())
    outer.to(torch.float64)
    train(outer, "other", seed=8)
    inner = outer.base_model.model

    def texts() -> list[torch.Tensor]:
        found = []
        for adapter in ("default", "other", "default"):
            outer.set_adapter(adapter)
            found.append(outer.generate(input_ids=prompt(), **NEW))
        with outer.disable_adapter():
            found.append(outer.generate(input_ids=prompt(), **NEW))
        return [*found, outer.generate(input_ids=prompt(), **NEW)]

    expected = texts()
    assert len({tuple(text[0].tolist()) for text in expected}) == 3
    with hfspec.patched(inner, target(), draft_budget=4):
        assert all(torch.equal(one, other) for one, other in zip(texts(), expected, strict=True))
        total = hfspec.stats(inner).total
    assert (total.calls, total.speculative_calls) == (5, 5)
    assert total.accepted_tokens > 0


def test_merged_and_unloaded():
    """`merge_and_unload` of a wrapper around a patched model hands back the patched model, weights merged."""
    expected = wrapped(target()).merge_and_unload().generate(prompt(), **NEW)
    model = hfspec.patch(target(), target(), draft_budget=4)
    merged = wrapped(model).merge_and_unload()
    assert merged is model
    with generating(merged, model) as generate:
        assert torch.equal(generate(), expected)


def test_adapters_added_by_transformers_itself():
    """`model.add_adapter`, transformers' own integration, before and after patching."""
    needed = getattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0")
    if version.parse(peft.__version__) < version.parse(needed):
        pytest.skip(f"this release of transformers needs peft {needed} or newer")

    def adapt(model: Any) -> Any:
        model.add_adapter(config(), adapter_name="default")
        train(model.to(torch.float64))
        return model.eval()

    expected = text_without_hfspec(adapt)
    first_adapted = adapt(target())
    both(first_adapted, target(), prompt(), NEW, draft_budget=4).assert_same().assert_drafted()
    first_patched = adapt(hfspec.patch(target(), target(), draft_budget=4))
    with generating(first_patched, first_patched) as generate:
        assert torch.equal(generate(), expected)
    first_patched.disable_adapters()
    plain = plain_text(target(), prompt(), **NEW)
    assert torch.equal(first_patched.generate(prompt(), **NEW), plain)


PROMPT_LEARNING = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
}


@pytest.mark.filterwarnings("ignore:.*(Position ids|past_key_values)")  # PEFT's own
@pytest.mark.parametrize("lengths", [(7,), (7, 4, 9)], ids=["one row", "rows"])
@pytest.mark.parametrize("kind", PROMPT_LEARNING)
def test_virtual_tokens_are_put_in_by_peft(kind, lengths):
    """It makes the inputs of every forward then: plain, with the reason, and the text is vanilla's."""
    texts = []
    for is_fast in (False, True):
        torch.manual_seed(3)
        outer = peft.get_peft_model(build(), PROMPT_LEARNING[kind]()).eval()
        inner = outer.get_base_model()
        if is_fast:
            hfspec.patch(inner, noisy(), draft_budget=4)
        texts.append(outer.generate(**prompts(*lengths), max_new_tokens=12))
    assert torch.equal(*texts)
    assert "comes from peft" in hfspec.stats(inner).last.fallback_reason


def test_an_adapter_for_each_row():
    """PEFT counts the rows of every forward then: they keep in step, and the text is vanilla's, early ends included."""
    names = {"adapter_names": ["default", "__base__", "default"]}
    call = prompts(7, 4, 9) | names | NEW | {"pad_token_id": 0}
    texts = []
    for is_fast in (False, True):
        inner = build()
        outer = wrapped(inner)
        if is_fast:
            hfspec.patch(inner, noisy(), draft_budget=4)
        text = outer.generate(**call)
        texts += [text, outer.generate(**call, eos_token_id=int(text[0, 13]))]
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[3])
    last = hfspec.stats(inner).last
    assert last.fallback_reason is None
    assert last.accepted_tokens > 0
    assert any("forward hook" in reason for reason in last.lockstep_reasons)
