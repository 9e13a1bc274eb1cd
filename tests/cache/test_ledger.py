"""`SpeculativeCache`: preallocated buffers, and a rollback that is a length change."""

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hfspec import compat
from hfspec.cache.ledger import SpeculativeCache, rollback_cache
from tests.models import assert_same_cache, prompt, shared


def read(cache, ids):
    with torch.no_grad():
        return shared()(input_ids=ids, use_cache=True, **{compat.CACHE_KEY: cache}).logits


def states(length, seed=0):
    return torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(seed))


def filled(*lengths):
    cache = SpeculativeCache()
    for seed, length in enumerate(lengths):
        for layer in range(2):
            cache.update(states(length, seed), -states(length, seed), layer)
    return cache


def test_it_holds_what_was_written():
    """Keys and values of all updates, in order, in every layer."""
    cache = filled(5, 1, 3)
    keys = torch.cat([states(5, 0), states(1, 1), states(3, 2)], dim=2)
    assert cache.get_seq_length() == 9
    for layer in cache.layers:
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, -keys)


def test_it_grows_without_losing_anything():
    """Content survives every growth of the buffers, and growth is rare."""
    cache, buffers = filled(3), set()
    for seed in range(400):
        keys, _ = cache.update(states(1, seed), states(1, seed), 0)
        buffers.add(cache.layers[0]._key_buffer.data_ptr())
    assert keys.shape[-2] == 403
    for seed in (0, 99, 399):
        assert torch.equal(keys[..., 3 + seed : 4 + seed, :], states(1, seed))
    assert len(buffers) < 8


@pytest.mark.parametrize("kept", [0, 1, 6, 7])
def test_rollback_equals_a_cache_never_extended(kept):
    """Case 19: of 7 draft tokens so many are kept, and reading on gives what a fresh cache gives, to the last bit."""
    ids, draft, more = prompt(5), prompt(7, seed=1), prompt(3, seed=2)
    cache, fresh = SpeculativeCache(), SpeculativeCache()
    for each in (cache, fresh):
        read(each, ids)
    read(cache, draft)
    cache.rollback(5 + kept)
    for index in range(kept):
        read(fresh, draft[:, index : index + 1])
    assert cache.get_seq_length() == 5 + kept
    torch.testing.assert_close(read(cache, more), read(fresh, more), rtol=1e-6, atol=1e-6)
    assert_same_cache(fresh.to_vanilla(), cache.to_vanilla())


@pytest.mark.parametrize("kept", [0, 1, 6, 7])
@pytest.mark.parametrize("kind", [DynamicCache, SpeculativeCache])
def test_rollback_of_any_cache(kind, kept):
    """`rollback_cache` means the same for vanilla's cache and ours, in every release."""
    cache, short = kind(), kind()
    read(cache, prompt(7))
    if kept:
        read(short, prompt(7)[:, :kept])
    rollback_cache(cache, kept)
    assert cache.get_seq_length() == kept
    if kept:
        for one, other in zip(cache.layers, short.layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [DynamicCache, SpeculativeCache])
def test_rolling_back_to_a_length_not_reached_changes_nothing(kind):
    """A rollback never invents slots."""
    cache = kind()
    read(cache, prompt(7))
    for length in (7, 8, 100):
        rollback_cache(cache, length)
    assert cache.get_seq_length() == 7
    rollback_cache(kind(), 3)


def test_the_hosts_crop_is_understood():
    """`crop(-n)`, as the host says it, removes the last n."""
    cache = filled(5, 4)
    cache.crop(-3)
    assert cache.get_seq_length() == 6
    assert torch.equal(cache.layers[0].keys[..., :5, :], states(5, 0))


def test_a_view_sees_later_overwrites():
    """The aliasing the class warns of: slots given back are written again under earlier views."""
    cache = filled(4)
    keys, _ = cache.update(states(2, 1), states(2, 1), 0)
    cache.rollback(4)
    cache.update(states(2, 2), states(2, 2), 0)
    assert torch.equal(keys[..., 4:, :], states(2, 2))


def test_what_the_user_gets_is_a_cache_of_its_own():
    """The plain cache has plain layers and plain memory, which nothing of ours writes into."""
    cache = filled(5, 2)
    keys = cache.layers[0].keys.clone()
    vanilla = cache.to_vanilla()
    assert type(vanilla) is DynamicCache
    assert {type(layer) for layer in vanilla.layers} == {DynamicLayer}
    assert torch.equal(vanilla.layers[0].keys, keys)
    assert vanilla.layers[0].keys.is_contiguous()
    assert vanilla.layers[0].keys.untyped_storage().nbytes() == keys.untyped_storage().nbytes()
    assert cache.get_seq_length() == 0


def test_an_empty_cache_becomes_an_empty_one():
    """Nothing written, nothing handed over."""
    assert SpeculativeCache().to_vanilla().get_seq_length() == 0


def test_it_says_its_length_and_takes_any_dtype():
    """dtype and device come from the first states written."""
    cache = SpeculativeCache()
    cache.update(states(3).bfloat16(), states(3).bfloat16(), 0)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert cache.get_seq_length() == 3
