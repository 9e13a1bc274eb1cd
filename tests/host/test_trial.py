"""Proof before trust: when a forward over several tokens is proved, what a proof finds, and what it holds for."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import hfspec
from hfspec.host import caches, releases
from hfspec.host.trial import Trial, arithmetic, difference, rounding
from hfspec.proof import Proof
from tests.models import RECURRENT, both, build, noisy, plain_text, prompt, prompts

NEW = {"max_new_tokens": 12}


def counted(model: Any, ids: torch.Tensor | None = None, **call: Any) -> Any:
    """The counts of one call of a patched model."""
    model.generate(prompt() if ids is None else ids, **(NEW | call))
    return hfspec.stats(model).last


def of_class(kind: type, **sizes: Any) -> Any:
    model = build(attn="sdpa", **sizes)
    model.__class__ = kind
    return model


class WrongAtTheEnd(LlamaForCausalLM):
    """Adds something to the last position's logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits[:, -1, 7] += 6.0
        return outputs


class WrongByALittle(LlamaForCausalLM):
    """A thousandth of the logits' size, wherever more than one token comes behind a cache."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if 1 < kwargs["input_ids"].shape[1] < 7:
            outputs["logits"] = outputs.logits * 1.001
        return outputs


class Raises(LlamaForCausalLM):
    """Takes prompts and single tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if 1 < kwargs["input_ids"].shape[1] < 7:
            raise NotImplementedError("one token at a time")
        return super().forward(*args, **kwargs)


class FailsInTheMiddle(LlamaForCausalLM):
    """The same, once the first layer has written its keys and values."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_wide = 1 < kwargs["input_ids"].shape[1] < 7

        def fail(*_: Any) -> None:
            if is_wide:
                raise NotImplementedError("one token at a time")

        handle = self.model.layers[1].register_forward_pre_hook(fail)
        try:
            return super().forward(*args, **kwargs)
        finally:
            handle.remove()


class TooFew(LlamaForCausalLM):
    """Gives two logits at most."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs["logits"] = outputs.logits[:, -2:]
        return outputs


WRONG = {
    WrongAtTheEnd: "differ by up to 6",
    WrongByALittle: "does not give",
    Raises: "raises NotImplementedError: one token at a time",
    FailsInTheMiddle: "raises NotImplementedError",
    TooFew: "gives logits for 2 tokens",
}
CALLS: dict[str, Any] = {
    "one row": lambda: {"inputs": prompt()},
    "rows": lambda: prompts(7, 4, 9),
    "rows alike": lambda: {"inputs": torch.cat([prompt(seed=seed) for seed in range(3)])},
    "sampled": lambda: {"inputs": prompt(), "do_sample": True},
    "no cache": lambda: {"inputs": prompt(), "use_cache": False},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", WRONG)
def test_no_token_comes_from_a_forward_that_is_wrong(kind, call):
    """Plain from the first round on, this call and the next, with what was seen as the reason."""
    model, make = of_class(kind), CALLS[call]
    if call == "no cache" and kind not in (WrongAtTheEnd, TooFew):
        pytest.skip("without a cache all forwards are over several tokens")
    pair = both(model, noisy(attn="sdpa"), None, lambda: make() | NEW, draft_budget=4)
    pair.assert_same().assert_plain(WRONG[kind])
    assert pair.stats.proof.problem == pair.stats.fallback_reason
    assert "not proved" in str(pair.stats)


def test_a_wrong_forward_is_tried_once():
    """The next call is the host's own; a model that stands otherwise is tried anew."""
    model = of_class(WrongAtTheEnd)
    with hfspec.patched(model, noisy(attn="sdpa"), draft_budget=4):
        assert counted(model).trials == 1
        second = counted(model)
        assert (second.trials, second.target_forward_passes) == (0, 0)
        assert second.fallback_reason == hfspec.stats(model).proof.problem
        model.__class__ = type(hfspec.patch(build(attn="sdpa"), noisy(attn="sdpa"), draft_budget=4))
        assert counted(model).drafted_tokens > 0


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mistral", "t5", *RECURRENT[:1]])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_proof_is_made_once(arch, num_rows):
    """Two forwards over one token each, and none in the calls after."""
    attn = "eager" if arch == "t5" else "sdpa"
    model, draft = build(arch, attn=attn), build(arch, attn=attn)
    ids = torch.cat([prompt(seed=seed) for seed in range(num_rows)])
    with hfspec.patched(model, draft, draft_budget=3):
        first, second = counted(model, ids), counted(model, ids)
        proof = hfspec.stats(model).proof
    assert first.trials >= 1
    assert first.trial_forwards >= 2 * first.trials
    assert (second.trials, second.trial_forwards) == (0, 0)
    assert proof.problem is None
    assert proof.difference <= proof.tolerance
    assert first.new_tokens == second.new_tokens


def test_it_is_made_again_as_texts_grow():
    """At twice the length that was proved, and four times, and so on; no more after a long text."""
    model = build()
    with hfspec.patched(model, build(), draft_budget=3):
        long = counted(model, prompt(8), max_new_tokens=120)
        assert long.trials == 4  # at a text of 12 tokens with its draft, 24, 48 and 96
        assert hfspec.stats(model).proof.length >= 96
        assert counted(model, prompt(90), max_new_tokens=8).trials == 0
        assert counted(model, prompt(220), max_new_tokens=8).trials == 1


def test_it_is_made_again_as_drafts_grow():
    """A forward eight times as wide is another."""
    model = build()
    with hfspec.patched(model, build()):
        assert counted(model, draft_budget=1, max_new_tokens=40).trials >= 1
        assert counted(model, draft_budget=14, max_new_tokens=20).trials == 0
        assert counted(model, draft_budget=15, max_new_tokens=20).trials == 1


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def _module(model: Any) -> None:
    model.model.layers[0].mlp = type("Other", (type(model.model.layers[0].mlp),), {})(model.config).double()


def _forward(model: Any) -> None:
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def _attention(model: Any) -> None:
    model.set_attn_implementation("sdpa")


def _setting(model: Any) -> None:
    model.config.rms_norm_eps = 1e-5


def _dtype(model: Any) -> None:
    model.float()


def _mode(model: Any) -> None:
    model.train()


@pytest.mark.parametrize("change", [_hook, _module, _forward, _attention, _setting, _dtype, _mode])
def test_a_model_that_is_another_is_proved_anew(change):
    """Whatever may make another forward of it."""
    model = build()
    with hfspec.patched(model, build(), draft_budget=3):
        assert counted(model).trials
        assert not counted(model).trials
        change(model)
        assert counted(model).trials
        assert not counted(model).trials


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_global_hooks_and_adapters():
    """They stand in no module of the model, or change only which weights are read."""
    peft = pytest.importorskip("peft")
    model = build()
    outer = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    with hfspec.patched(model, build(), draft_budget=3):
        assert counted(model).trials
        assert not counted(model).trials
        with outer.disable_adapter():
            assert counted(model).trials
        assert not counted(model).trials
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            assert counted(model).trials
        finally:
            handle.remove()


def test_other_values_need_no_other_proof():
    """Training changes weights between calls."""
    model = build()
    with hfspec.patched(model, build(), draft_budget=3):
        assert counted(model).trials
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.01)
        assert not counted(model).trials


def test_another_cache_is_another_call():
    """Static layers are written otherwise, and mask otherwise."""
    model = build()
    with hfspec.patched(model, build(), draft_budget=3):
        assert counted(model).trials
        for expected in (1, 0):
            cache = StaticCache(config=model.config, max_cache_len=64)
            found = counted(model, disable_compile=True, **{releases.CACHE_KEY: cache})
            assert min(found.trials, 1) == expected


def test_rows_that_cannot_leave_gaps_keep_in_step():
    """Where only their own paces turn out wrong, the next call keeps rows in step, and is proved by itself."""

    class TakesSlots(LlamaForCausalLM):
        """Takes no notice of the positions that it is given."""

        def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            positions = torch.arange(input_ids.shape[1])[None] + kwargs[releases.CACHE_KEY].get_seq_length()
            return super().forward(input_ids=input_ids, position_ids=positions, **kwargs)

    TakesSlots.forward.__module__ = LlamaForCausalLM.forward.__module__  # nobody's code, as far as can be seen
    ids = torch.cat([prompt(seed=seed) for seed in range(3)])
    expected = plain_text(of_class(TakesSlots), ids, **NEW)
    model = of_class(TakesSlots)
    with hfspec.patched(model, noisy(attn="sdpa"), draft_budget=4):
        assert torch.equal(model.generate(ids, **NEW), expected)
        assert "does not give" in hfspec.stats(model).fallback_reason
        assert torch.equal(model.generate(ids, **NEW), expected)
        last = hfspec.stats(model).last
    assert last.fallback_reason is None
    assert last.drafted_tokens > 0
    assert any("at their own paces" in why for why in last.lockstep_reasons)


def test_memory_that_ran_out_is_no_proof():
    """A batch that is too large says nothing about the next one."""
    model = build()
    forward = model.forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) == 3 and kwargs["input_ids"].shape[1] == 5:
            raise torch.OutOfMemoryError("out of memory")
        return forward(*args, **kwargs)

    ids = torch.cat([prompt(seed=seed) for seed in range(3)])
    with hfspec.patched(model, noisy(), draft_budget=4):
        model.forward = replaced
        assert "OutOfMemoryError" in counted(model, ids).fallback_reason
        assert hfspec.stats(model).proof is None
        del model.forward


def test_a_copy_is_proved_by_itself():
    """What is known of one model is not known of another."""
    model = hfspec.patch(build(), build(), draft_budget=3)
    assert counted(model).trials
    assert counted(copy.deepcopy(model)).trials


def test_findings_are_few_and_the_longest_reach_stays():
    """Models as they stood are forgotten, the oldest first; a proof of a shorter text takes nothing back."""
    trial: Any = Trial()
    for number in range(200):
        trial.note(number, Proof(10, 3))
    assert trial.of(0) is None
    trial.note(199, Proof(5, 8))
    assert (trial.last.length, trial.last.width) == (10, 8)
    assert trial.last.covers(19, 63)
    assert not trial.last.covers(20, 2)
    assert not trial.last.covers(2, 64)


def test_differences():
    """Infinities and NaN of both differ by nothing, of one by everything; masked logits are no size."""
    inf, nan, low = torch.inf, torch.nan, torch.finfo(torch.float32).min
    one = torch.tensor([[1.0, -inf, low], [nan, nan, nan], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    other = torch.tensor([[1.5, -inf, low], [nan, nan, nan], [1.0, nan, 3.0], [1.0, -inf, 3.0]])
    assert difference(one, other).tolist() == [0.5, 0.0, inf, inf]
    assert rounding(one, 0.5).tolist() == [0.5, 0.0, 1.5, 1.5]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "float32"),
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
    ],
)
def test_the_numbers_that_a_model_is_made_of(dtype, name):
    """The coarsest of weights, autocast and logits count."""
    model = build(dtype=dtype)
    logits = model(prompt()).logits
    assert arithmetic(model, logits)[0] == name
    assert arithmetic(model, logits.float().to(torch.bfloat16).float())[0] == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16):
        assert arithmetic(model, logits)[0] == "bfloat16"


def test_the_hosts_layers_are_as_they_came():
    """In every release; a control stands in the tests of other people's code."""
    assert not any(map(caches.is_changed, caches.CROPPABLE_LAYERS | {DynamicLayer, DynamicSlidingWindowLayer}))
