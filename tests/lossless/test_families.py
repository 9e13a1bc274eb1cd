"""Assisted decoding must match greedy decoding, in all that it returns: for hfspec, on many families of models.

Sequences are equal, scores and logits close; attentions, hidden states and the cache have, for each token, the
shapes of decoding token by token. And nothing of the caller's is changed.
"""

import copy
import functools
import inspect

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import MaxTimeCriteria, TemperatureLogitsWarper

import hfspec
from hfspec import Context, Draft, DraftSession, DraftSource
from hfspec.host import architectures, releases
from tests import models
from tests.models import PAD, Scripted, both, prompt, prompts
from tests.zoo import tiny

ZOO = {
    name: tiny.Species(kind, name, class_name)
    for kind, name, class_name in (
        ("causal", "falcon", "FalconForCausalLM"),
        ("causal", "gpt_neox", "GPTNeoXForCausalLM"),
        ("causal", "opt", "OPTForCausalLM"),
        ("causal", "phi3", "Phi3ForCausalLM"),
        ("causal", "stablelm", "StableLmForCausalLM"),
        ("causal", "olmo2", "Olmo2ForCausalLM"),
        ("seq2seq", "marian", "MarianMTModel"),
        ("seq2seq", "pegasus", "PegasusForConditionalGeneration"),
    )
}
SEQ2SEQ = (*models.ENCODER_DECODER, "marian", "pegasus")
FAMILIES = (*models.KINDS, *ZOO)
DECODERS = tuple(name for name in FAMILIES if name not in SEQ2SEQ)
#: Attention over the whole text, from which the shapes of attentions follow.
FULL = tuple(name for name in DECODERS if name not in (*models.WINDOWED, *models.RECURRENT, "gpt_neo"))

NEW = 10
CHOICES = {"greedy": {}, "sampled": {"do_sample": True, "top_k": 12}}


@functools.cache
def target(name, attn="eager"):
    if name not in ZOO:
        return models.shared(name, attn=attn)
    model = tiny.build(ZOO[name], seed=0, dtype=torch.float64)
    model.set_attn_implementation(attn)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


@functools.cache
def noisy(name):
    model, generator = copy.deepcopy(target(name)), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
            weight += 0.02 * noise
    return model


class Lookup(DraftSource):
    """Proposes what followed the last token where it stood before: prompt lookup, with no model."""

    may_draw = False

    def start(self, context: Context) -> DraftSession:
        return _Looking(context)


class _Looking(DraftSession):
    def __init__(self, context):
        self._context = context

    def propose(self, input_ids, budget):
        ids = input_ids[0].tolist()
        places = [at for at in range(len(ids) - 1) if ids[at] == ids[-1]] or [0]
        found = ids[places[-1] + 1 :][: budget.num_tokens] or ids[:1]
        return Draft(torch.tensor([found], device=self._context.device))


DRAFTS = {
    "the same weights": lambda name, text: copy.deepcopy(target(name)),
    "noisy weights": lambda name, text: noisy(name),
    "lookup": lambda name, text: Lookup(),
    "script": lambda name, text: Scripted(text, [2, 0, 3, 1]),
}


def inputs_of(name):
    """Half of the prompt stands in it twice, so that there is something to look up."""
    ids = torch.cat([prompt(4), prompt(4), prompt(3, seed=2)], dim=-1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def num_prompt(name):
    return 1 if name in SEQ2SEQ else inputs_of(name)["input_ids"].shape[1]


def everything(name):
    # For Falcon and windows see the tests behind; recurrent models have none.
    has_attentions = name not in (*models.RECURRENT, *models.WINDOWED, "falcon")
    wanted = ["scores", "logits", "hidden_states"] + (["attentions"] if has_attentions else [])
    return {"return_dict_in_generate": True} | {f"output_{each}": True for each in wanted}


def check(name, call, draft=None, **options):
    draft = noisy(name) if draft is None else draft
    return both(target(name), draft, None, call, draft_budget=4, **options).assert_same().assert_drafted()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_it_matches_decoding_token_by_token(name, choice):
    """Every part of the result, for every kind of draft: value by value, and shape by shape as it should be."""
    call = inputs_of(name) | everything(name) | {"max_new_tokens": NEW} | CHOICES[choice]
    torch.manual_seed(0)
    text = target(name).generate(**call).sequences
    for make in DRAFTS.values():
        fast = check(name, call, make(name, text)).fast
        assert fast.sequences.shape == (1, num_prompt(name) + NEW)
        check_scores(fast, target(name))
        check_hidden_states(fast, name)
        if name in SEQ2SEQ:
            check_seq2seq_attentions(fast, name)
        elif fast.attentions is not None and name in FULL:
            check_attentions(fast, name)


@pytest.mark.parametrize("name", models.WINDOWED)
def test_attentions_of_windows(name):
    """They have as many columns as there are keys in the window: for several tokens at once more, so it is plain."""
    call = inputs_of(name) | {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_attentions": True}
    both(target(name), noisy(name), None, call).assert_same().assert_plain("windowed")


def test_attentions_of_falcon():
    """Where asking for them makes it look ahead, drafts would change the past: plain, or as the others."""
    call = inputs_of("falcon") | {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_attentions": True}
    pair = both(target("falcon"), noisy("falcon"), None, call, draft_budget=4).assert_same()
    if architectures.looks_ahead_for_attentions(target("falcon")):
        pair.assert_plain("attention weights", "looks ahead")
    else:
        pair.assert_drafted()


def check_scores(out, model):
    """One `[batch, vocab]` for each new token; logits are no view of the scores."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    for parts in (out.scores, out.logits):
        assert [tuple(each.shape) for each in parts] == [(1, vocab_size)] * NEW


def check_hidden_states(out, name):
    """The prompt's for the first token, then one position a token, of every layer and the embedding."""
    parts = out.decoder_hidden_states if name in SEQ2SEQ else out.hidden_states
    assert len(parts) == NEW
    for index, layers in enumerate(parts):
        assert {each.shape[:2] for each in layers} == {(1, num_prompt(name) if index == 0 else 1)}
        assert len(layers) == len(parts[0])


def check_attentions(out, name, attentions=None):
    """Queries: the prompt's, then one. Keys: all before and itself."""
    attentions = out.attentions if attentions is None else attentions
    assert len(attentions) == NEW
    for index, layers in enumerate(attentions):
        queries = num_prompt(name) if index == 0 else 1
        assert {each.shape[-2:] for each in layers} == {(queries, num_prompt(name) + index)}


def check_seq2seq_attentions(out, name):
    """The decoder's as above, its view of the source with the source's length, and the encoder's own."""
    length = inputs_of(name)["input_ids"].shape[1]
    check_attentions(out, name, out.decoder_attentions)
    for index, layers in enumerate(out.cross_attentions):
        assert {each.shape[-2:] for each in layers} == {(num_prompt(name) if index == 0 else 1, length)}
    assert {each.shape[-2:] for each in out.encoder_attentions} == {(length, length)}
    assert {each.shape[:2] for each in out.encoder_hidden_states} == {(1, length)}


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_returned_states_take_no_more_memory_than_vanillas(name, num_rows):
    """Each is a tensor of its own, laid out as vanilla's: no part of a wide forward's, which it would keep alive."""
    call = inputs_of(name) | everything(name) | {"max_new_tokens": NEW}
    call |= {key: call[key].expand(num_rows, -1) for key in inputs_of(name)}
    pair = check(name, call)
    states = [part for part in pair.plain if "hidden_states" in part or "attentions" in part]
    assert len(states) == (5 if name in SEQ2SEQ else 2)
    for part in states:
        for plain, fast in zip(flat(pair.plain[part]), flat(pair.fast[part]), strict=True):
            assert fast.untyped_storage().nbytes() <= plain.untyped_storage().nbytes(), part
            assert fast.stride() == plain.stride(), part


def flat(states):
    return [states] if isinstance(states, torch.Tensor) else [each for layer in states for each in flat(layer)]


@pytest.mark.parametrize("name", [*FULL, *SEQ2SEQ])
def test_the_returned_cache_has_its_shape(name):
    """Keys and values of every token but the last, in every layer; of an encoder, the whole source besides."""
    call = inputs_of(name) | {"max_new_tokens": NEW, "return_dict_in_generate": True}
    cache = check(name, call).fast[releases.CACHE_KEY]
    written = num_prompt(name) + NEW - 1
    assert cache.get_seq_length() == written
    own = cache.self_attention_cache if name in SEQ2SEQ else cache
    for layer in own.layers:
        assert layer.keys.shape[-2] == layer.values.shape[-2] == written
    if name in SEQ2SEQ:
        length = inputs_of(name)["input_ids"].shape[1]
        assert {layer.keys.shape[-2] for layer in cache.cross_attention_cache.layers} == {length}


@pytest.mark.parametrize("name", FAMILIES)
def test_lengths(name):
    """Limits counted with or without the prompt, a least length in spite of end tokens, a prompt of one token."""
    start, inputs = num_prompt(name), inputs_of(name)
    check(name, inputs | {"max_length": start + 7})
    ends = {"eos_token_id": list(range(3, 40)), "pad_token_id": PAD}
    assert check(name, inputs | ends | {"min_length": start + 8, "max_length": start + 12}).fast.shape[1] > start + 8
    one = {"input_ids": prompt(1), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    check(name, one | {"max_new_tokens": NEW})
    both(target(name), noisy(name), None, inputs | {"max_new_tokens": 1}).assert_same()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_padding(name, choice):
    """Rows of different lengths, padded where such models want it."""
    inputs = prompts(9, 4)
    if name in SEQ2SEQ:
        inputs = {key: value.flip(1) for key, value in inputs.items()}
    attn = "eager" if name in (*models.COUNTING, *SEQ2SEQ, *models.RECURRENT) else "sdpa"
    call = inputs | {"max_new_tokens": NEW} | CHOICES[choice]
    both(target(name, attn), noisy(name), None, call, draft_budget=4).assert_same().assert_drafted()


def takes_embeddings(name):
    model = target(name)
    return "inputs_embeds" in inspect.signature(model.prepare_inputs_for_generation).parameters


@pytest.mark.parametrize("name", [name for name in DECODERS if takes_embeddings(name)])
def test_embeddings_as_a_prompt(name):
    """With the ids beside them, and without: then only the new tokens are returned."""
    model, ids = target(name), prompt(6)
    embeddings = model.get_input_embeddings()(ids).detach()
    alone = check(name, {"inputs_embeds": embeddings, "max_new_tokens": NEW}).fast
    beside = check(name, {"inputs_embeds": embeddings, "input_ids": ids, "max_new_tokens": NEW}).fast
    assert alone.shape == (1, NEW)
    assert beside.shape == (1, 6 + NEW)


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in models.RECURRENT])
def test_going_on_from_a_returned_cache(name):
    """Two calls, the second from the first one's cache, write and leave behind what one long call does."""
    model, inputs = target(name), inputs_of(name)
    returned = {"return_dict_in_generate": True}
    whole = model.generate(**inputs, **returned, max_new_tokens=NEW)

    def in_two_calls():
        first = model.generate(**inputs, **returned, max_new_tokens=4)
        mask = torch.ones_like(first.sequences)
        rest = {releases.CACHE_KEY: first[releases.CACHE_KEY], "attention_mask": mask, "max_new_tokens": NEW - 4}
        return model.generate(first.sequences, **returned, **rest)

    plain = in_two_calls()
    with hfspec.patched(model, noisy(name), draft_budget=4):
        fast = in_two_calls()
        assert hfspec.stats(model).last.drafted_tokens > 0
    models.assert_same(plain, fast)
    assert torch.equal(fast.sequences, whole.sequences)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_of_the_callers_is_changed(name):
    """Its config, the model's, its inputs, and its lists of processors and criteria, are as before."""
    model, inputs = target(name), inputs_of(name)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=9, pad_token_id=PAD)
    config.decoder_start_token_id = model.generation_config.decoder_start_token_id
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    criteria = StoppingCriteriaList([MaxTimeCriteria(500)])
    given = {"generation_config": config, "logits_processor": processors, "stopping_criteria": criteria}
    before = copy.deepcopy((config.to_dict(), model.generation_config.to_dict(), model.config.to_dict(), inputs))
    objects = (list(processors), list(criteria), dict(inputs))
    with hfspec.patched(model, noisy(name)):
        model.generate(**inputs, **given)
    assert before[:3] == (config.to_dict(), model.generation_config.to_dict(), model.config.to_dict())
    assert (list(processors), list(criteria)) == objects[:2]
    assert inputs.keys() == before[3].keys()
    for key, value in inputs.items():
        assert value is objects[2][key]
        assert torch.equal(value, before[3][key])


@pytest.mark.parametrize("own", ["assistant", "prompt lookup"])
def test_the_hosts_own_ways_still_work(own):
    """A user's `assistant_model` or prompt lookup on a patched model is the host's loop, and gives greedy's text."""
    model, inputs = target("llama"), inputs_of("llama") | {"eos_token_id": 2, "pad_token_id": PAD}
    greedy = model.generate(**inputs, max_new_tokens=NEW)
    way = {"assistant_model": noisy("llama")} if own == "assistant" else {"prompt_lookup_num_tokens": 3}
    with hfspec.patched(model, noisy("llama")):
        assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, **way), greedy)
        assert "assisted" in hfspec.stats(model).fallback_reason
