"""Whisper: its own `generate()` calls the host's for every segment, and each of these is sped up."""

import copy
import json

import numpy
import pytest
import torch
from tokenizers import AddedToken
from transformers import WhisperFeatureExtractor, WhisperTokenizer, pipeline

import hfspec
from tests.models import OnForward, Scripted, both
from tests.multimodal.tiny import (
    EOT,
    LANG_EN,
    NO_SPEECH,
    NO_TIMESTAMPS,
    SOT,
    START_OF_PREV,
    TRANSCRIBE,
    TRANSLATE,
    VOCAB_OF_SPEECH,
    noisy_copy,
    sounds,
    whisper,
    whisper_decoder,
)

LONG = 250
IN_ENGLISH = {"language": "en", "task": "transcribe"}
TIMES = {"return_timestamps": True}
#: Calls by what is asked of them: rows, frames, keywords.
CALLS = {
    "short": (1, 100, IN_ENGLISH),
    "two recordings": (2, 100, IN_ENGLISH),
    "translated, with times": (1, 100, {"language": "de", "task": "translate"} | TIMES),
    "language found out": (1, 100, {}),
    "long": (1, LONG, IN_ENGLISH | TIMES),
    "two long ones": (2, LONG, IN_ENGLISH | TIMES),
    "long, going on from its own text": (1, LONG, IN_ENGLISH | TIMES | {"condition_on_prev_tokens": True}),
    "long, tried again at higher temperatures": (
        1,
        LONG,
        IN_ENGLISH
        | TIMES
        | {"temperature": (0.0, 0.5), "logprob_threshold": -1.0, "compression_ratio_threshold": 1.35},
    ),
    "sampled": (1, 100, IN_ENGLISH | {"do_sample": True, "top_k": 10}),
    "three tries": (1, 100, IN_ENGLISH | {"do_sample": True, "num_return_sequences": 3}),
    "everything returned": (
        1,
        100,
        IN_ENGLISH | {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
    ),
}


def call(name):
    rows, frames, options = CALLS[name]
    features = {"input_features": sounds(rows, frames)}
    mask = {"attention_mask": torch.ones(rows, frames, dtype=torch.long)} if frames > 100 else {}
    return lambda: features | mask | options


def sharing(scale=0.02):
    """A draft with another decoder behind the target's own encoder."""
    draft = noisy_copy(whisper(), scale)
    draft.model.encoder = whisper().model.encoder
    return draft


DRAFTS = {
    "a small one": lambda: whisper(seed=1, layers=1),
    "one like it": lambda: noisy_copy(whisper()),
    "one that shares the encoder": sharing,
    "a decoder alone": whisper_decoder,
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", CALLS)
def test_whisper(name, draft):
    """Whatever is asked, with whatever draft: vanilla's text, from drafts."""
    both(whisper(), DRAFTS[draft](), None, call(name), draft_budget=4).assert_same().assert_drafted()


@pytest.mark.parametrize("name", ["short", "two recordings", "translated, with times", "sampled", "three tries"])
def test_the_same_weights_are_always_accepted(name):
    """With the target's encoder and with its own: sounds, forced ids and rules for times are the target's."""
    for draft in (sharing(scale=0), noisy_copy(whisper(), scale=0)):
        pair = both(whisper(), draft, None, call(name), draft_budget=4).assert_same().assert_drafted()
        assert pair.stats.last.acceptance_rate == 1.0


def test_a_decoder_alone_hears_what_the_target_heard():
    """With the target's decoder weights it drafts the target's text; without sounds it would not."""
    draft = whisper_decoder(layers=2)
    draft = copy.deepcopy(draft)
    draft.model.decoder.load_state_dict(whisper().model.decoder.state_dict())
    draft.proj_out.weight = whisper().proj_out.weight
    for name in ("short", "two recordings", "long"):
        pair = both(whisper(), draft, None, call(name), draft_budget=4).assert_same().assert_drafted()
        assert pair.stats.last.acceptance_rate > 0.95  # the first draft behind a text's end is for nothing


@pytest.mark.parametrize("num_segments", [1, 3])
def test_a_shared_encoder_runs_once_a_segment(num_segments):
    """As often as in vanilla."""
    model, runs = copy.deepcopy(whisper()), []
    OnForward(model.model.encoder, after=lambda *_: runs.append(1))
    draft = noisy_copy(model)
    draft.model.encoder = model.model.encoder
    make = call("short" if num_segments == 1 else "long")
    model.generate(**make())
    num_vanilla = len(runs)
    with hfspec.patched(model, draft):
        model.generate(**make())
        assert hfspec.stats(model).drafted_tokens > 0
    assert len(runs) == 2 * num_vanilla


def test_one_generate_call_is_one_call_however_many_segments():
    """The counts of all segments add up in it."""
    pair = both(whisper(), sharing(), None, call("long"), draft_budget=4).assert_same()
    assert pair.stats.total.calls == 1
    assert pair.stats.last.prefills >= 3


def test_every_accept_count():
    """Rounds of every outcome leave the decoder's cache, not the encoder's, shorter."""
    make = call("short")
    script = Scripted(written_ids(make), [0, 3, 1, 4, 2], vocab=VOCAB_OF_SPEECH)
    both(whisper(), script, None, make, draft_budget=4).assert_same().assert_drafted()
    assert {outcome.num_accepted for outcome in script.outcomes} >= {0, 1, 2, 3}


def written_ids(make):
    """What the decoding loop sees: Whisper's own `generate` cuts off what it forced."""
    text = whisper().generate(**make())
    forced = torch.tensor([[SOT, LANG_EN, TRANSCRIBE, NO_TIMESTAMPS]])
    return torch.cat([forced, text], dim=-1)


def test_beams_stay_plain():
    """Another loop, and so another reason."""
    make = call("short")
    both(whisper(), sharing(), None, lambda: make() | {"num_beams": 2}).assert_same().assert_plain("beam search")


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    """What turns waves into features and ids into text: one letter an id, then Whisper's special ids and times."""
    folder = tmp_path_factory.mktemp("whisper")
    names = dict.fromkeys(range(SOT, NO_TIMESTAMPS + 1), "")
    names |= {SOT: "startoftranscript", LANG_EN: "en", LANG_EN + 1: "de", TRANSLATE: "translate"}
    names |= {TRANSCRIBE: "transcribe", START_OF_PREV: "startofprev", NO_SPEECH: "nospeech"}
    names |= {NO_TIMESTAMPS: "notimestamps"}
    letters = [chr(ord("A") + index) for index in range(EOT - 2)] + ["Ġ", "Ċ"]
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"<|endoftext|>": EOT}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = WhisperTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    special = [AddedToken(f"<|{names[index]}|>", special=True, normalized=False) for index in sorted(names)]
    tokenizer.add_tokens(special, special_tokens=True)
    times = [AddedToken(f"<|{index * 0.02:.2f}|>", normalized=False) for index in range(60)]
    tokenizer.add_tokens(times)
    assert len(tokenizer) == VOCAB_OF_SPEECH
    return {"tokenizer": tokenizer, "feature_extractor": WhisperFeatureExtractor(feature_size=8, chunk_length=1)}


@pytest.mark.parametrize(
    ("seconds", "options"),
    [(1.0, {}), (1.0, TIMES), (2.5, TIMES), (2.5, {"chunk_length_s": 1.0})],
    ids=["short", "times", "long", "chunks"],
)
def test_the_pipeline(listener, seconds, options):
    """Told to use one beam, it transcribes as before, from drafts."""
    model = copy.deepcopy(whisper()).float()
    waves = numpy.random.default_rng(0).standard_normal(int(16000 * seconds)).astype(numpy.float32)
    transcribe = pipeline("automatic-speech-recognition", model=model, **listener)

    def text():
        return transcribe({"raw": waves.copy(), "sampling_rate": 16000}, generate_kwargs={"num_beams": 1}, **options)

    plain = text()
    with hfspec.patched(model, noisy_copy(model), draft_budget=4):
        assert text() == plain
        assert hfspec.stats(model).drafted_tokens > 0
        assert hfspec.stats(model).fallback_reason is None


def test_the_pipelines_own_choice_is_beams(listener):
    """It asks for several beams unless it is told otherwise: plain, with that reason."""
    model = copy.deepcopy(whisper()).float()
    transcribe = pipeline("automatic-speech-recognition", model=model, **listener)
    waves = {"raw": numpy.zeros(16000, dtype=numpy.float32), "sampling_rate": 16000}
    if transcribe._default_generation_config.num_beams == 1:
        pytest.skip("this release asks for one beam")
    with hfspec.patched(model, noisy_copy(model)):
        transcribe(dict(waves))
        assert "beam search" in hfspec.stats(model).fallback_reason
