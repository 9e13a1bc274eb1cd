"""`Rollback`: any cache of the host's is brought back to an earlier point of the text, and nothing is left behind."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, cache_utils
from transformers.cache_utils import StaticLayer

from hfspec.cache.ledger import SpeculativeCache, speculative_cache
from hfspec.cache.rollback import Rollback
from hfspec.host import caches
from tests.models import assert_same_cache, shared

WINDOW = 8
#: Keys of each token; values are their negatives.
TABLE = torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(7))

recurrent = pytest.mark.skipif(not caches.LINEAR_LAYER, reason="this release has no recurrent layers in its caches")


def recurrent_cache():
    cache = DynamicCache()
    cache.layers = [cache_utils.LinearAttentionLayer(), cache_utils.DynamicLayer()]
    return cache


def mixed_cache():
    cache = DynamicCache()
    cache.layers = [cache_utils.LinearAttentionAndFullAttentionLayer(), cache_utils.LinearAttentionLayer()]
    return speculative_cache(cache)


def static(arch):
    return StaticCache(config=shared(arch).config, max_cache_len=64)


def encoder_decoder():
    return EncoderDecoderCache(DynamicCache(config=shared().config), DynamicCache())


KINDS = {
    "dynamic": lambda: DynamicCache(config=shared().config),
    "ours": lambda: SpeculativeCache(DynamicCache(config=shared().config)),
    "ours with windows": lambda: SpeculativeCache(DynamicCache(config=shared("mistral").config)),
    "encoder-decoder": encoder_decoder,
    "static": lambda: static("llama"),
    "static windows": lambda: static("mistral"),
    "the host's windows": lambda: DynamicCache(config=shared("mistral").config),
    "recurrent": recurrent_cache,
    "recurrent and ours": mixed_cache,
}
some_kinds = pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=[recurrent] if "recurrent" in name else [], id=name) for name, make in KINDS.items()],
)


def read(rollback, cache, tokens):
    """Let the layers read tokens as a model's forward would: states that depend on all before, and keys and values."""
    start = rollback.num_read
    for layer in caches.text_layers(cache):
        if isinstance(layer, caches.LINEAR_LAYER):
            for token in tokens:
                before = layer.recurrent_states
                before = before[0] if isinstance(before, dict) else before
                new = TABLE[0, :, token]
                layer.update_recurrent_state(new.clone() if before is None else 0.5 * before + new)
        if hasattr(layer, "get_mask_sizes"):
            keys = TABLE[:, :, tokens]
            layer.update(keys, -keys, {"cache_position": torch.arange(start, start + len(tokens))})
    rollback.num_read += len(tokens)


def text(length, seed=0):
    return torch.randint(1, 50, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_as_if_read(make, tokens, num_prompt, cache):
    """The cache is in every part as one that read these tokens as vanilla does: the prompt, then one by one."""
    other = make()
    rollback = Rollback(other)
    read(rollback, other, tokens[:num_prompt])
    for token in tokens[num_prompt:]:
        read(rollback, other, [token])
    cache, other = (each.to_vanilla() if isinstance(each, SpeculativeCache) else each for each in (cache, other))
    for layer in (*caches.text_layers(cache), *caches.text_layers(other)):
        # The host leaves this number behind, and never reads it again, where a forward crosses the window's end.
        if caches.is_sliding(layer) and isinstance(layer, StaticLayer):
            vars(layer).pop("cumulative_length", None)
    assert_same_cache(other, cache)


@some_kinds
@given(
    num_prompt=st.integers(1, 12),
    rounds=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8),
)
def test_rounds_leave_the_cache_of_the_committed_text(make, num_prompt, rounds):
    """Whatever was drafted and taken back, the cache is in every part as if the committed text alone had been read."""
    cache, committed = make(), text(num_prompt + 1)
    rollback = Rollback(cache)
    read(rollback, cache, committed[:-1])
    for seed, (num_drafted, num_accepted) in enumerate(rounds, start=1):
        right, num_accepted = text(num_drafted + 1, seed), min(num_accepted, num_drafted)
        draft = right[:num_accepted] + [(each + 1) % 50 for each in right[num_accepted:num_drafted]]
        rollback.checkpoint()
        at_checkpoint = rollback.num_read
        read(rollback, cache, committed[rollback.num_read :] + draft)
        committed += right[: num_accepted + 1]
        rollback.to(len(committed) - 1)
        assert rollback.num_read in (len(committed) - 1, at_checkpoint)
        assert rollback.num_read == len(committed) - 1 or not rollback.goes_back_at_will
    rollback.checkpoint()
    read(rollback, cache, committed[rollback.num_read :])
    assert_as_if_read(make, committed, num_prompt, cache)


@some_kinds
def test_a_checkpoint_can_be_gone_back_to_again_and_again(make):
    """A second restore finds what the first one did, though the layers were written to in between."""
    cache, committed = make(), text(11)
    rollback = Rollback(cache)
    read(rollback, cache, committed)
    for seed in (1, 2, 3):
        rollback.checkpoint()
        read(rollback, cache, text(4, seed))
        rollback.to(11)
        assert rollback.num_read == 11
    assert_as_if_read(make, committed, 11, cache)


@some_kinds
def test_going_forward_is_no_rollback(make):
    """A point that was not reached, or is just there, changes nothing."""
    cache = make()
    rollback = Rollback(cache)
    read(rollback, cache, text(5))
    rollback.checkpoint()
    for num_read in (5, 6, 100):
        rollback.to(num_read)
    assert rollback.num_read == 5
    assert_as_if_read(make, text(5), 5, cache)


@pytest.mark.parametrize(
    ("name", "at_will"),
    [
        ("dynamic", True),
        ("ours", True),
        ("ours with windows", True),
        ("encoder-decoder", True),
        ("static", StaticLayer in caches.CROPPABLE_LAYERS),
        ("static windows", False),
        ("the host's windows", False),
        pytest.param("recurrent", False, marks=recurrent),
        pytest.param("recurrent and ours", False, marks=recurrent),
    ],
)
def test_which_caches_go_back_at_will(name, at_will):
    """Those that keep a key and a value for every token; one layer that does not decides for the whole cache."""
    assert Rollback(KINDS[name]()).goes_back_at_will == at_will


def test_slots_given_back_are_empty_in_a_static_cache():
    """Vanilla's static cache is zero where nothing was read: a user who looks sees no rejected draft."""
    cache = static("llama")
    rollback = Rollback(cache)
    read(rollback, cache, text(6))
    rollback.checkpoint()
    read(rollback, cache, text(5, seed=1))
    assert cache.layers[0].keys[..., 6:11, :].any()
    rollback.to(6)
    for layer in cache.layers:
        assert not layer.keys[..., 6:, :].any()
        assert not layer.values[..., 6:, :].any()
        assert layer.keys[..., :6, :].all()


@recurrent
@some_kinds
def test_a_restore_keeps_the_addresses_that_were_marked_static(make):
    """Compiled forwards hold on to a state's memory, so a restore writes into it."""
    cache = make()
    rollback = Rollback(cache)
    read(rollback, cache, text(9))
    rollback.checkpoint()

    def addresses():
        states = [getattr(layer, "recurrent_states", {}).get(0) for layer in caches.text_layers(cache)]
        states += [layer.keys for layer in caches.text_layers(cache) if isinstance(layer, StaticLayer)]
        return [each.data_ptr() for each in states if each is not None]

    before = addresses()
    read(rollback, cache, text(3, seed=1))
    rollback.to(9)
    assert addresses() == before


def test_numbers_count_from_wherever_they_start():
    """A cache that holds an earlier text is brought back by the difference."""
    cache = DynamicCache(config=shared().config)
    before = Rollback(cache)
    read(before, cache, text(7))
    rollback = Rollback(cache, num_read=3)
    read(rollback, cache, text(4, seed=1))
    rollback.to(5)
    assert cache.get_seq_length() == 9
