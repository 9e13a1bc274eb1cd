"""An encoder before the decoder: whose it is, what it is given, and how often it runs."""

import copy

import pytest
import torch
from transformers import BartForCausalLM

import hfspec
from tests.models import ENCODER_DECODER, PAD, VOCAB, OnForward, Scripted, both, build, noisy, prompt, shared

NEW = {"max_new_tokens": 16}
SEEDED = {"do_sample": True, "top_k": 15}


def texts(*lengths):
    """Texts for an encoder, padded at the right."""
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        ids[row, :length] = prompt(length, seed=row)[0]
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def sharing(model, scale=0.0):
    """A draft of the same architecture that has the very encoder of the target."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.get_decoder().parameters():
            weight += scale * torch.randn_like(weight)
    if hasattr(draft, "encoder"):
        draft.encoder = model.encoder
    else:
        draft.model.encoder = model.model.encoder
    return draft


def check(model, draft, call):
    return both(model, draft, None, call, draft_budget=4).assert_same().assert_drafted()


def runs_of(module):
    """A list that grows with every forward."""
    runs = []
    OnForward(module, after=lambda *_: runs.append(1))
    return runs


#: What the decoder may be given to begin with.
BEGINNINGS = {
    "the start token": {},
    "ids": {"decoder_input_ids": torch.tensor([[PAD, 5, 9, 14]])},
    "ids without the start token": {"decoder_input_ids": torch.tensor([[5, 9]])},
    "padded ids": {
        "decoder_input_ids": torch.tensor([[PAD, PAD, PAD, 9, 14]]),
        "decoder_attention_mask": torch.tensor([[0, 0, 1, 1, 1]]),
    },
}


@pytest.mark.parametrize("choice", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_what_the_decoder_begins_with(arch, beginning, choice):
    """With the same weights, sharing the encoder or not, each beginning is drafted from without a miss."""
    call = texts(9) | NEW | choice | BEGINNINGS[beginning]
    for draft in (sharing(shared(arch)), copy.deepcopy(shared(arch))):
        pair = check(shared(arch), draft, call)
        # Padding is not read by a draft. A decoder that counts slots has other positions then: that costs hits.
        assert pair.stats.last.acceptance_rate == 1.0 or beginning == "padded ids"


#: More of one call: rows, keywords.
CALLS = {
    "two texts": ((7, 4), {}),
    "three texts, sampled": ((7, 4, 9), SEEDED),
    "three tries": ((7,), SEEDED | {"num_return_sequences": 3}),
    "two tries for two padded texts": ((7, 4), SEEDED | {"num_return_sequences": 2}),
    "rows that end": ((7, 4, 9), {"eos_token_id": list(range(3, 12)), "pad_token_id": PAD}),
    "processors that hold the encoder's text": (
        (7, 4),
        {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    ),
}


@pytest.mark.parametrize("draft", ["its own encoder", "the target's encoder"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_batches(arch, name, draft):
    """Encoder padding, several tries and ended rows: every row's draft reads its own row."""
    lengths, options = CALLS[name]
    model = shared(arch)
    source = noisy(arch) if draft == "its own encoder" else sharing(model, scale=0.02)
    check(model, source, texts(*lengths) | NEW | options)


@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_padding_of_the_encoder_is_hidden_from_the_draft(arch):
    """The same weights draft each row's very text, though the encoder read padding."""
    model = shared(arch)
    for draft in (sharing(model), copy.deepcopy(model)):
        pair = check(model, draft, texts(7, 4, 9) | NEW)
        assert pair.stats.last.acceptance_rate == 1.0


@pytest.mark.parametrize("num_tries", [1, 3])
@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_a_shared_encoder_runs_once(arch, num_tries):
    """For one text, however many tries; a draft's own encoder runs besides."""
    model = copy.deepcopy(shared(arch))
    draft, other = sharing(model, scale=0.02), noisy(arch)
    runs, other_runs = runs_of(model.get_encoder()), []
    handle = other.get_encoder().register_forward_hook(lambda *_: other_runs.append(1))
    call = texts(9) | NEW | SEEDED | {"num_return_sequences": num_tries}
    for each, num_other in ((draft, 0), (other, num_tries)):
        runs.clear()
        with hfspec.patched(model, each, draft_budget=4):
            model.generate(**call)
            assert hfspec.stats(model).drafted_tokens > 0
        assert len(runs) == 1
        assert len(other_runs) == num_other
    handle.remove()


@pytest.mark.parametrize("lengths", [(9,), (7, 4)])
@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_what_an_encoder_has_made_before(arch, lengths):
    """With the caller's `encoder_outputs` a draft behind the same encoder drafts; one with its own has no input."""
    model = shared(arch)
    inputs = texts(*lengths)

    def call():
        with torch.no_grad():
            outputs = model.get_encoder()(**inputs, return_dict=True)
        return {"encoder_outputs": outputs, "attention_mask": inputs["attention_mask"]} | NEW

    pair = check(model, sharing(model), call)
    assert pair.stats.last.acceptance_rate == 1.0
    pair = both(model, noisy(arch), None, call, draft_budget=4).assert_same()
    pair.assert_plain("the draft has an encoder", "without an encoder's input")


@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_embeddings_for_the_encoder(arch):
    """A draft of the same width reads them too; one of another width stops, and the text is vanilla's."""
    model = shared(arch)
    embeddings = model.get_input_embeddings()(texts(7)["input_ids"]).detach()
    call = {"inputs_embeds": embeddings} | NEW
    pair = check(model, copy.deepcopy(model), call)
    assert pair.stats.last.acceptance_rate == 1.0
    narrow = build(arch, d_model=8)
    both(model, narrow, None, call, draft_budget=4).assert_same().assert_plain("the draft source stopped")


@pytest.mark.parametrize("draft", ["its own encoder", "the target's encoder", "script"])
@pytest.mark.parametrize("lengths", [(9,), (5, 5)])
@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_everything_that_can_be_returned(arch, lengths, draft):
    """Scores, logits, hidden states, the decoder's, the encoder's and the cross attentions, and the cache."""
    model, names = shared(arch), ["scores", "logits", "attentions", "hidden_states"]
    call = texts(*lengths) | NEW | {"return_dict_in_generate": True}
    call |= {f"output_{name}": True for name in names}
    sources = {
        "its own encoder": lambda: noisy(arch),
        "the target's encoder": lambda: sharing(model, scale=0.02),
        "script": lambda: Scripted(model.generate(**call).sequences, [0, 3, 1, 4]),
    }
    pair = check(model, sources[draft](), call)
    assert {"encoder_attentions", "encoder_hidden_states", "cross_attentions", "decoder_attentions"} <= set(pair.fast)


@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_beams_stay_plain(arch):
    """Another loop, and so a reason."""
    call = texts(9, 5) | NEW | {"num_beams": 3}
    both(shared(arch), noisy(arch), None, call).assert_same().assert_plain("beam search")


@pytest.mark.parametrize("lengths", [(9,), (7, 4)])
@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_a_decoder_only_draft(arch, lengths):
    """It reads what has been written, not what the encoder read."""
    check(shared(arch), shared("llama", seed=1), texts(*lengths) | NEW)


def test_the_decoder_of_the_same_kind_alone():
    """`BartForCausalLM` is a decoder-only model whose forward has a name in common with the encoder's."""
    draft = BartForCausalLM(copy.deepcopy(shared("bart").config)).double().eval()
    check(shared("bart"), draft, texts(9) | NEW)


@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_an_encoder_decoder_draft_for_a_text_model(arch):
    """It would have nothing to encode: such calls are plain, for that reason, or an error where one is wanted."""
    model, draft = shared(), shared(arch)
    both(model, draft, prompt(), NEW).assert_same().assert_plain("encoder", "could read")
    with hfspec.patched(model, draft, on_unsupported="raise"), pytest.raises(hfspec.UnsupportedCallError):
        model.generate(prompt(), **NEW)


def test_a_draft_whose_encoder_is_too_small():
    """What its encoder cannot read ends drafting, not the call."""
    draft = build("bart", max_position_embeddings=4)
    pair = both(shared("bart"), draft, None, texts(30) | NEW, draft_budget=4).assert_same()
    pair.assert_plain("the draft source stopped")


@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_a_wider_draft_vocabulary(arch):
    """Ids that the target does not have are never proposed."""
    check(shared(arch), build(arch, vocab_size=VOCAB + 1), texts(9) | NEW)
