"""Which models and caches can be sped up, and the reason where not."""

import pytest
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    OpenAIGPTConfig,
    RecurrentGemmaConfig,
    StaticCache,
    XLMConfig,
)
from transformers.cache_utils import DynamicLayer, HQQQuantizedLayer, StaticLayer

from hfspec.cache.ledger import SpeculativeCache
from hfspec.host.verdicts import (
    cache_problem,
    counts_slots,
    draft_problem,
    model_problem,
    ragged_problem,
    target_problem,
)
from tests.models import SUPPORTED, both, build, prompt, shared


@pytest.mark.parametrize("arch", SUPPORTED)
def test_full_attention_models_can(arch):
    """Models whose every layer keeps all positions can be sped up and can draft."""
    assert model_problem(shared(arch).config) is None
    assert cache_problem(DynamicCache(config=shared(arch).config)) is None


@pytest.mark.parametrize("arch", ["mistral", "t5"])
def test_windows_and_encoder_decoders_can(arch):
    """Sliding windows are rolled back by our own layers, and a decoder's cache like any other."""
    assert model_problem(build(arch).config) is None


def test_a_model_whose_wide_forwards_differ_cannot_and_says_why():
    """XLM puts a mask token behind every text, so no draft can be verified by it."""
    assert "mask token" in model_problem(XLMConfig())
    assert "mask token" in target_problem(XLMConfig())


def test_a_model_without_a_cache_can_be_a_target_only():
    """OpenAI GPT reads the whole text for every token anyway."""
    assert target_problem(OpenAIGPTConfig()) is None
    assert "of its own kind" in model_problem(OpenAIGPTConfig())


def test_a_draft_must_have_something_to_read_and_its_state_to_itself():
    """What holds of every target holds here, too; the rest depends on the pair."""
    decoder, both_parts = shared("llama").config, build("t5").config
    assert draft_problem(decoder, decoder) is None
    assert draft_problem(decoder, both_parts) is None
    assert draft_problem(both_parts, both_parts) is None
    assert "it has an encoder" in draft_problem(both_parts, decoder)
    assert "in its own layers" in draft_problem(RecurrentGemmaConfig(), decoder)
    assert "mask token" in draft_problem(XLMConfig(), decoder)


class OwnCache(DynamicCache):
    """A user's subclass, which may do anything."""


class OwnLayer(DynamicLayer):
    """A layer of somebody's own in a cache of the host's."""


def with_layer(layer):
    """A cache of the host's with this layer."""
    cache = DynamicCache()
    cache.layers.append(layer)
    return cache


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (None, "own kind"),
        ([(1, 2)], "list"),
        (OwnCache(), "OwnCache"),
        (EncoderDecoderCache(OwnCache(), DynamicCache()), "OwnCache"),
        (with_layer(OwnLayer()), "OwnLayer"),
        (with_layer(object.__new__(HQQQuantizedLayer)), "quantized"),
    ],
    ids=["none", "list", "subclass", "the decoder's", "a layer of its own", "quantized"],
)
def test_a_cache_that_cannot_be_rolled_back_says_why(cache, words):
    """The reason names the kind of cache."""
    assert words in cache_problem(cache)


@pytest.mark.parametrize(
    "cache",
    [
        StaticCache(config=shared().config, max_cache_len=8),
        DynamicCache(config=build("mistral").config),
        EncoderDecoderCache(DynamicCache(), OwnCache()),
    ],
    ids=["static", "sliding", "encoder-decoder"],
)
def test_the_hosts_own_caches_can_be_rolled_back(cache):
    """By a length or by a snapshot; what is kept of an encoder never changes, so it may be of any kind."""
    assert cache_problem(cache) is None


def test_rows_need_a_cache_of_ours_to_go_on_at_their_own_paces():
    """The host's own caches hold one length; so do layers with more than keys and values, and encoder-decoders."""
    ours = SpeculativeCache()
    assert ragged_problem(shared(), ours) is None
    assert ragged_problem(shared(), DynamicCache())
    ours.layers.append(StaticLayer(max_cache_len=8))
    assert ragged_problem(shared(), ours)
    t5 = build("t5")
    assert ragged_problem(t5, SpeculativeCache())
    assert ragged_problem(t5, EncoderDecoderCache(SpeculativeCache(), DynamicCache()))


def test_which_models_count_slots():
    """Only rotary positions with full attention are blind to holes between tokens."""
    assert not counts_slots(shared("llama"), SpeculativeCache(DynamicCache(config=shared("llama").config)))
    mistral = build("mistral")
    assert counts_slots(mistral, SpeculativeCache(DynamicCache(config=mistral.config)))
    assert counts_slots(shared("gpt2"), SpeculativeCache())


@pytest.mark.parametrize("name", ["index_topk", "keep_window_size"])
def test_attention_that_picks_slots(name):
    """Up to as many as it picks it sees all; beyond, several tokens at once may see others than one."""
    model = build()
    setattr(model.config, name, 20)
    both(model, build(), prompt(7), {"max_new_tokens": 12}, draft_budget=3).assert_drafted()
    both(model, build(), prompt(7), {"max_new_tokens": 14}, draft_budget=3).assert_plain("picks slots beyond 20")
