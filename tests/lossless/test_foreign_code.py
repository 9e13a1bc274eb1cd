"""Code of others on the target: hooks, overridden methods, replaced forwards, loops of their own.

What it does with several tokens at once nobody knows: such calls are as vanilla's, sped up only where that is sure.
"""

import copy
import functools
import inspect

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

import hfspec
from hfspec.host import releases
from hfspec.patch import is_patched
from tests.models import VOCAB, both, build, noisy, plain_text, prompt, prompts

NEW = {"max_new_tokens": 16}
CALLS = {"one row": {"input_ids": prompt()}, "rows": prompts(7, 4, 9)}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def as_subclass(kind):
    """A target of a class of the user's."""
    model = build(attn="sdpa")  # eager attention gives nan for padding in float64
    model.__class__ = kind
    return model


class OldPreparation(LlamaForCausalLM):
    """Feeds the last token only, as most models did once."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        cache = kwargs.get(releases.CACHE_KEY)
        fed = input_ids if cache.get_seq_length() == 0 else input_ids[:, -1:]
        return {"input_ids": fed, releases.CACHE_KEY: cache, "attention_mask": attention_mask, "use_cache": True}


class OldUpdate(LlamaForCausalLM):
    """Knows of one new token in each step."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder=False, **kwargs):
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=is_encoder_decoder)


class ReadsLogits(LlamaForCausalLM):
    """Looks at what the forward gave."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder=False, **kwargs):
        self.seen = outputs.logits.shape
        return super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=is_encoder_decoder, **kwargs
        )


@each_call
@pytest.mark.parametrize("kind", [OldPreparation, OldUpdate, ReadsLogits])
def test_inputs_prepared_by_others(kind, call):
    """A subclass that makes the inputs of its forwards itself may count on one new token: plain, with the reason."""
    pair = both(as_subclass(kind), noisy(), None, call | NEW, draft_budget=4)
    pair.assert_same().assert_plain("comes from tests.lossless.test_foreign_code")


def last_only(module, args, output):
    """Steers the last position."""
    output = output if isinstance(output, torch.Tensor) else output[0]
    output[:, -1] += 0.3


def mean_of_all(module, args, output):
    """Takes something from all positions of the forward."""
    return output - output.mean(dim=1, keepdim=True)


@each_call
@pytest.mark.parametrize("hook", [last_only, mean_of_all, functools.partial(last_only)])
def test_forward_hooks(hook, call):
    """What a hook does depends on what a forward is over: plain, with where the hook is from."""
    model = build()
    model.model.layers[1].mlp.register_forward_hook(hook)
    pair = both(model, noisy(), None, call | NEW, draft_budget=4)
    pair.assert_same().assert_plain("forward hook", "LlamaMLP")


def test_hooks_of_the_hosts_own():
    """Hooks that transformers puts on to capture states, or to let gradients through, change nothing."""
    model = build()
    model.enable_input_require_grads()
    model.generate(prompt(), output_hidden_states=True, return_dict_in_generate=True, **NEW)
    both(model, noisy(), prompt(), NEW, draft_budget=4).assert_same().assert_drafted()


class LastLogits(LlamaForCausalLM):
    """Gives logits for the last token only, whatever it is asked for."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs["logits"] = outputs.logits[:, -1:]
        return outputs


class Draws(LlamaForCausalLM):
    """Draws random numbers in evaluation mode, too."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs["logits"] = torch.nn.functional.dropout(outputs.logits, 0.1, training=True)
        return outputs


@each_call
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("kind", "why"), [(LastLogits, "last token only"), (Draws, "draws random numbers")])
def test_a_forward_that_verifies_nothing(kind, why, do_sample, call):
    """The prompt's forward shows it: the rest is written plainly, and stats say why."""
    pair = both(as_subclass(kind), noisy(), None, call | NEW | {"do_sample": do_sample}, draft_budget=4)
    pair.assert_same()
    last = pair.stats.last
    assert (last.rounds, last.plain_rounds) == (0, 15)
    assert all(why in reason for reason in last.plain_reasons)


def handing_on(model):
    """Replaces `forward` on the instance by one whose signature tells nothing."""
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return model


def taking_a_bias(model):
    """Replaces `forward` by one that takes a tensor with as many entries as there may be rows."""
    forward = model.forward

    @functools.wraps(forward)
    def replaced(*args, bias=None, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs["logits"] = outputs.logits + bias.sum(dim=0)
        return outputs

    signature = inspect.signature(forward)
    *others, rest = signature.parameters.values()
    takes_bias = inspect.Parameter("bias", inspect.Parameter.KEYWORD_ONLY)
    replaced.__signature__ = signature.replace(parameters=[*others, takes_bias, rest])  # the host looks there
    model.forward = replaced
    return model


@each_call
def test_a_forward_replaced_on_the_instance(call):
    """It is given what vanilla gives it, and its rows do not leave one by one."""
    pair = both(handing_on(build()), noisy(), None, call | NEW, draft_budget=4).assert_same().assert_drafted()
    num_rows = len(call["input_ids"])
    assert any("forward is not transformers' own" in why for why in pair.stats.last.lockstep_reasons) == (num_rows > 1)


@pytest.mark.parametrize("num_entries", [2, 3])
def test_a_tensor_of_unknown_meaning_stays_whole(num_entries):
    """Its first dimension may be as long as the batch by chance: rows keep in step."""
    ids = prompts(7, 4, 9)
    text = plain_text(build(), None, **ids, **NEW)
    ends = {"eos_token_id": [int(text[0, 12])], "pad_token_id": 0}
    torch.manual_seed(5)
    bias = torch.randn(num_entries, VOCAB)
    pair = both(taking_a_bias(build()), noisy(), None, ids | NEW | ends | {"bias": bias}, draft_budget=4)
    pair.assert_same().assert_drafted()
    assert pair.stats.last.lockstep_reasons


@pytest.mark.parametrize("has_own_cache", [False, True])
def test_a_loop_of_the_users_own_may_read_the_cache(has_own_cache):
    """Whoever calls `_sample` has made the cache, and finds in it what vanilla leaves there."""
    lengths = []

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        if has_own_cache:
            kwargs[releases.CACHE_KEY] = DynamicCache(config=model.config)
        text = model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        lengths.append(int(kwargs[releases.CACHE_KEY].get_seq_length()))
        return text

    both(build(), noisy(), prompt(), NEW | {"custom_generate": loop}, draft_budget=4).assert_same().assert_drafted()
    assert lengths == [22, 22]


def test_gradients_through_generate():
    """Where gradients are recorded the cache may not be written in place: plain, and they are vanilla's."""
    gradients = []
    for is_fast in (False, True):
        model = build()
        if is_fast:
            hfspec.patch(model, noisy(), draft_budget=4)
        call = {"output_scores": True, "return_dict_in_generate": True, **NEW}
        out = inspect.unwrap(type(model).generate)(model, prompt(), **call)
        torch.cat(out.scores).logsumexp(dim=-1).sum().backward()
        gradients.append(model.lm_head.weight.grad)
    assert torch.equal(*gradients)


def test_a_model_made_from_the_patched_ones_class_is_plain(tmp_path):
    """The patch is one instance's: its class makes plain models, and loads them."""
    model = hfspec.patch(build(), noisy())
    made = type(model)(model.config)
    assert not is_patched(made)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not is_patched(loaded)
    assert type(made) is type(loaded) is LlamaForCausalLM


class CopiesItself(LlamaForCausalLM):
    """Has a way of its own to be copied."""

    def __deepcopy__(self, memo):
        clone = build()
        clone.__class__ = CopiesItself
        clone.was_copied = True
        return clone


def test_a_classs_own_deepcopy_is_kept():
    """The copy is what the class makes of it, patched as before."""
    clone = copy.deepcopy(hfspec.patch(as_subclass(CopiesItself), noisy()))
    assert clone.was_copied
    assert is_patched(clone)
