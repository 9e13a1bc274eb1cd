"""Code of others on the target: hooks, overridden methods, replaced forwards, loops of their own.

What it does with several tokens at once nobody knows: such calls are as vanilla's, sped up only where that is sure.
"""

import copy
import functools
import inspect
import threading

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaAttention

import hfspec
from hfspec.errors import UnsupportedCallError
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


def hooked(hook):
    """On a module, as most do it."""
    model = build(attn="sdpa")
    model.model.layers[1].mlp.register_forward_hook(hook)
    return model


class Wrapped(torch.nn.Module):
    """Stands in for a block, and hands its output to a function."""

    def __init__(self, block, change):
        super().__init__()
        self.block = block
        self.change = change

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args, **kwargs):
        output = self.block(*args, **kwargs)
        changed = self.change(self.block, args, output)
        return output if changed is None else changed


def with_block(change):
    """A block replaced, as representation engineering does it."""
    model = build(attn="sdpa")
    model.model.layers[1] = Wrapped(model.model.layers[1], change)
    return model


def with_head(change):
    """A head replaced."""
    model = build(attn="sdpa")
    model.lm_head = Wrapped(model.lm_head, change)
    return model


def with_forward(change):
    """A module's forward replaced on the instance."""
    model = build(attn="sdpa")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def replaced(*args, **kwargs):
        output = forward(*args, **kwargs)
        changed = change(mlp, args, output)
        return output if changed is None else changed

    mlp.forward = replaced
    return model


PLACES = {"hook": hooked, "block": with_block, "head": with_head, "forward": with_forward}


@each_call
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", [last_only, mean_of_all, functools.partial(last_only)])
def test_code_that_looks_at_the_whole_forward(change, place, do_sample, call):
    """What it does to one token it does not do to several: seen before any token comes of it, and said."""
    model = PLACES[place](change)
    pair = both(model, noisy(), None, call | NEW | {"do_sample": do_sample}, draft_budget=4)
    pair.assert_same().assert_plain("does not give what forwards over one give")


@each_call
@pytest.mark.parametrize("place", PLACES)
def test_observers(place, call):
    """Code that changes nothing, or each token by itself, is sped up once that was proved; its rows keep in step."""
    seen = []
    model = PLACES[place](lambda module, args, output: seen.append(1))
    pair = both(model, noisy(), None, call | NEW, draft_budget=4).assert_same().assert_drafted()
    assert seen
    assert bool(pair.stats.last.lockstep_reasons) == (len(call["input_ids"]) > 1)


def test_a_hook_on_all_modules():
    """Global hooks are no module's own."""
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: last_only(module, args, output) if type(module).__name__ == "LlamaMLP" else None
    )
    try:
        pair = both(build(), noisy(), prompt(), NEW, draft_budget=4)
    finally:
        handle.remove()
    pair.assert_same().assert_plain("does not give")


def attention_of_ones_own(*args, **kwargs):
    """Hands on; what is registered without a mask function gets no mask."""
    return sdpa_attention_forward(*args, **kwargs)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_registered_attention(num_rows, has_mask):
    """Causal from the upper left is wrong for several tokens behind a cache; with a mask function all is right."""
    name = "masked_by_ones_own" if has_mask else "ones_own"
    AttentionInterface.register(name, attention_of_ones_own)
    if has_mask:
        AttentionMaskInterface.register(name, sdpa_mask)
    model = build()
    model.set_attn_implementation(name)
    ids = torch.cat([prompt(seed=seed) for seed in range(num_rows)])
    pair = both(model, noisy(), ids, NEW, draft_budget=4).assert_same()
    if has_mask:
        pair.assert_drafted()
    else:
        pair.assert_plain("does not give")


def on_a_grid(update):
    def updated(self, key_states, value_states, *args, **kwargs):
        step = key_states.abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / 7
        return update(self, (key_states / step).round() * step, value_states, *args, **kwargs)

    return updated


def forgetting(update):
    """Keeps five slots, as some key-value compression does, with every forward."""

    def updated(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        self.keys, self.values = self.keys[..., -5:, :], self.values[..., -5:, :]
        return keys, values

    return updated


@each_call
def test_the_hosts_layer_changed_in_place(call, monkeypatch):
    """Ours would leave out what was put into it; the changed layer is used, and what it makes is proved."""
    monkeypatch.setattr(DynamicLayer, "update", on_a_grid(DynamicLayer.update))
    pair = both(build(attn="sdpa"), noisy(), None, call | NEW, draft_budget=4).assert_same().assert_drafted()
    assert len(call["input_ids"]) == 1 or any("in place" in why for why in pair.stats.last.lockstep_reasons)


def test_a_layer_that_forgets_more_with_more_tokens(monkeypatch):
    """It is brought back whole, and written plainly."""
    monkeypatch.setattr(DynamicLayer, "update", forgetting(DynamicLayer.update))
    pair = both(build(attn="sdpa"), noisy(), prompt(), NEW, draft_budget=4)
    pair.assert_same().assert_plain("its forward over 5 tokens")


def test_a_path_for_one_token(monkeypatch):
    """A host class's forward replaced for all of its instances."""
    forward = LlamaAttention.forward

    def replaced(self, hidden_states, *args, **kwargs):
        return forward(self, hidden_states * (1.05 if hidden_states.shape[1] == 1 else 1.0), *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", replaced)
    both(build(), noisy(), prompt(), NEW, draft_budget=4).assert_same().assert_plain("does not give")


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


class DrawsLater(LlamaForCausalLM):
    """Draws in forwards over one or more tokens, but not in that of the prompt, which is longer."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        is_prompt = kwargs["input_ids"].shape[1] > 5
        outputs["logits"] = torch.nn.functional.dropout(outputs.logits, 0.0 if is_prompt else 0.1, training=True)
        return outputs


@each_call
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_model_that_draws_only_later(do_sample, num_threads, call):
    """The proof shows it, and what it drew is undone: the text and the stream of random numbers are vanilla's.

    Where there are other threads, it might have been they: the model is looked at closely.
    """
    is_over = threading.Event()
    idle = threading.Thread(target=is_over.wait, args=(60,))
    if num_threads > 1:
        idle.start()
    try:
        pair = both(as_subclass(DrawsLater), noisy(), None, call | NEW | {"do_sample": do_sample}, draft_budget=4)
    finally:
        is_over.set()
    pair.assert_same().assert_plain("draws random numbers")


@each_call
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("kind", "why"), [(LastLogits, "last token only"), (Draws, "draws random numbers")])
def test_a_forward_that_verifies_nothing(kind, why, do_sample, call):
    """The first forwards show it: the rest is written plainly, and stats say why."""
    pair = both(as_subclass(kind), noisy(), None, call | NEW | {"do_sample": do_sample}, draft_budget=4)
    pair.assert_same().assert_plain(why)
    last = pair.stats.last
    assert (last.rounds, last.plain_rounds) == (0, 15)
    assert all(why in reason for reason in last.plain_reasons)


class LimitsLogits(LlamaForCausalLM):
    """Gives as many logits as it is asked for: remote code, say."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, logits_to_keep=0, **kwargs):
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return super().forward(**given, logits_to_keep=logits_to_keep, **kwargs)


class Opaque(LlamaForCausalLM):
    """Says nothing of what it takes."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@each_call
@pytest.mark.parametrize("kind", [LimitsLogits, Opaque])
def test_a_forward_of_ones_own(kind, call):
    """It is sped up once it is proved."""
    both(as_subclass(kind), noisy(), None, call | NEW, draft_budget=4).assert_same().assert_drafted()


def test_mixed_precision_of_accelerate():
    """Its wrapper gives float32 logits that are bfloat16 numbers: they are compared as such."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(build(dtype=torch.float32))
    with hfspec.patched(model, build(dtype=torch.float32), draft_budget=4):
        verdict = hfspec.verify(model, prompt(), **NEW)
        stats = hfspec.stats(model)
    assert verdict.identical or verdict.near_tie, verdict.summary()
    assert stats.fallback_reason is None
    assert stats.accepted_tokens > 0
    assert stats.proof.arithmetic == "bfloat16"


@each_call
def test_a_prompt_of_one_token(call):
    """Nothing about the logits shows in the prompt's forward then."""
    ids = call["input_ids"][:, -1:]
    pair = both(as_subclass(LastLogits), noisy(), ids, NEW, draft_budget=4)
    pair.assert_same().assert_plain("last token only")


def test_the_next_call_is_refused_before_any_work():
    """What shows in mid-call cannot be an error any more; it is warned of once, and is one from the next call on."""
    model = as_subclass(LastLogits)
    forwards = []
    with hfspec.patched(model, noisy(), draft_budget=4, on_unsupported="raise"):
        first = model.generate(prompt(), **NEW)
        assert "last token only" in hfspec.stats(model).fallback_reason
        handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
        handle.remove()
        with pytest.raises(UnsupportedCallError, match="last token only"):
            model.generate(prompt(), **NEW)
    assert not forwards
    assert torch.equal(first, as_subclass(LastLogits).generate(prompt(), **NEW))


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
