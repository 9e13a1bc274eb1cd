"""Which models and caches can be sped up, and the reason where not."""

import pytest
from transformers import DynamicCache, StaticCache

from hfspec.cache.support import cache_problem, model_problem
from tests.models import SUPPORTED, build, shared


@pytest.mark.parametrize("arch", SUPPORTED)
def test_full_attention_models_can(arch):
    """Models whose every layer keeps all positions can be sped up and can draft."""
    assert model_problem(shared(arch).config) is None
    assert cache_problem(DynamicCache(config=shared(arch).config)) is None


@pytest.mark.parametrize("arch", ["mistral", "mamba", "t5"])
def test_others_cannot_and_say_why(arch):
    """Sliding windows, recurrent states and encoder-decoders are told by their config."""
    assert model_problem(build(arch).config)


def test_a_window_that_is_switched_off_is_none():
    """A Mistral without a window is a full-attention model."""
    assert model_problem(build("mistral", sliding_window=None).config) is None


class OwnCache(DynamicCache):
    """A user's subclass, which may do anything."""


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (None, "own kind"),
        ([(1, 2)], "list"),
        (OwnCache(), "OwnCache"),
        (StaticCache(config=shared().config, max_cache_len=8), "StaticCache"),
        (DynamicCache(config=build("mistral").config), "full-attention"),
    ],
    ids=["none", "list", "subclass", "static", "sliding"],
)
def test_a_cache_that_cannot_be_rolled_back_says_why(cache, words):
    """The reason names the kind of cache."""
    assert words in cache_problem(cache)
