"""`SpeculativeCache`: preallocated buffers, and a rollback that is a length change."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hfspec.cache.ledger import (
    SpeculativeCache,
    SpeculativeLayer,
    SpeculativeSlidingLayer,
    speculative_cache,
    vanilla_cache,
)
from hfspec.host import releases
from tests.models import assert_same_cache, build, prompt, shared

WINDOW = 8


def read(cache, ids):
    with torch.no_grad():
        return shared()(input_ids=ids, use_cache=True, **{releases.CACHE_KEY: cache}).logits


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


def rolled_back(cache, length):
    for layer in cache.layers:
        layer.rollback(length)
    return cache


@pytest.mark.parametrize("kept", [0, 1, 6, 7])
def test_rollback_equals_a_cache_never_extended(kept):
    """Of 7 draft tokens so many are kept, and reading on gives what a fresh cache gives, to the last bit."""
    ids, draft, more = prompt(5), prompt(7, seed=1), prompt(3, seed=2)
    cache, fresh = SpeculativeCache(), SpeculativeCache()
    for each in (cache, fresh):
        read(each, ids)
    read(cache, draft)
    rolled_back(cache, 5 + kept)
    for index in range(kept):
        read(fresh, draft[:, index : index + 1])
    assert cache.get_seq_length() == 5 + kept
    torch.testing.assert_close(read(cache, more), read(fresh, more), rtol=1e-6, atol=1e-6)
    assert_same_cache(fresh.to_vanilla(), cache.to_vanilla())


def test_rolling_back_to_a_length_not_reached_changes_nothing():
    """A rollback never invents slots."""
    cache = filled(7)
    for length in (7, 8, 100):
        rolled_back(cache, length)
    assert cache.get_seq_length() == 7
    rolled_back(SpeculativeCache(), 3)


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
    rolled_back(cache, 4)
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


# Windows


def sliding_pair(window=WINDOW):
    """A layer of ours, and one of the host's that is told everything anew after each rollback."""
    return SpeculativeSlidingLayer(window), DynamicSlidingWindowLayer(window)


def asked(layer, num_new):
    """The sizes the mask is made of (4.57 passes the new tokens' positions)."""
    length = layer.get_seq_length()
    query = num_new if isinstance(layer, SpeculativeLayer) or TAKES_LENGTHS else torch.arange(length, length + num_new)
    return tuple(layer.get_mask_sizes(query))


#: Whether the host's layers are asked for mask sizes by a number of tokens, or by their positions.
TAKES_LENGTHS = "query_length" in DynamicLayer.get_mask_sizes.__code__.co_varnames[:2]


def updated(layer, keys):
    return layer.update(keys, -keys, {"cache_position": torch.arange(keys.shape[-2])})


@pytest.mark.parametrize("num_prompt", [1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 30])
def test_a_window_is_the_hosts_token_by_token(num_prompt):
    """The same keys, values and mask sizes as the host's layer, for hundreds of tokens after any prompt."""
    ours, hosts = sliding_pair()
    for seed, num_new in enumerate([num_prompt] + [1, 1, 4] * 100):
        keys = states(num_new, seed)
        assert asked(ours, num_new) == asked(hosts, num_new)
        for one, other in zip(updated(ours, keys), updated(hosts, keys), strict=True):
            assert torch.equal(one, other)
        assert ours.get_seq_length() == hosts.get_seq_length()


@given(
    num_prompt=st.integers(1, 20),
    rounds=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=60),
    window=st.integers(2, 9),
)
def test_a_window_after_rollbacks_is_the_hosts_that_never_read_more(num_prompt, rounds, window):
    """Rounds of which some tokens are taken back leave what the host's layer has that read the others alone."""
    ours, hosts = sliding_pair(window)
    text = states(num_prompt)
    updated(ours, text)
    updated(hosts, text)
    for seed, (num_read, num_kept) in enumerate(rounds, start=1):
        length, num_kept = ours.get_seq_length(), min(num_read, num_kept)
        ours.committed = length
        keys = states(num_read, seed)
        wide = updated(ours, keys)[0]
        assert wide.shape[-2] == min(length, window - 1) + num_read
        assert torch.equal(wide[..., -num_read:, :], keys)
        ours.rollback(length + num_kept)
        if num_kept:
            updated(hosts, keys[..., :num_kept, :])
        assert asked(ours, 3) == asked(hosts, 3)
    probe = states(2, seed=99)
    for one, other in zip(updated(ours, probe), updated(hosts, probe), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_kept", [0, 1, 50, 150])
def test_a_window_goes_back_over_any_number_of_tokens(num_kept):
    """Tokens read one by one, as a draft reads them, drop nothing that a rollback to the committed length needs."""
    ours, hosts = sliding_pair()
    text = states(20)
    updated(ours, text)
    updated(hosts, text)
    for seed in range(1, 151):
        updated(ours, states(1, seed))
    ours.rollback(20 + num_kept)
    for seed in range(1, num_kept + 1):
        updated(hosts, states(1, seed))
    probe = states(2, seed=999)
    assert asked(ours, 2) == asked(hosts, 2)
    for one, other in zip(updated(ours, probe), updated(hosts, probe), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_prompt", [3, 500])
def test_a_windows_memory_is_bounded(num_prompt):
    """However long the text, not much more is kept than the window; a full-attention layer keeps all."""
    ours, full = SpeculativeSlidingLayer(WINDOW), SpeculativeLayer()
    most = 0
    for seed, num_new in enumerate([num_prompt] + [5] * 300):
        for layer in (ours, full):
            updated(layer, states(num_new, seed))
            layer.rollback(layer.length - 2)
            layer.committed = layer.length
        if seed:
            most = max(most, ours._key_buffer.shape[-2])
    assert ours.length == full.length > 900
    assert most < WINDOW + 150
    assert full._key_buffer.shape[-2] >= full.length


def test_a_layer_is_made_after_each_of_the_hosts():
    """Windows get their size, full layers none, and other kinds stay as they are."""
    prepared = DynamicCache(config=build("mistral").config)
    cache = speculative_cache(prepared)
    assert [type(layer) for layer in cache.layers] == [SpeculativeSlidingLayer] * 2
    assert [layer.sliding_window for layer in cache.layers] == [WINDOW] * 2
    static = StaticCache(config=shared().config, max_cache_len=8)
    assert speculative_cache(static).layers == static.layers
    pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
    ours = speculative_cache(pair)
    assert type(ours.self_attention_cache) is SpeculativeCache
    assert ours.cross_attention_cache is pair.cross_attention_cache


@pytest.mark.parametrize("length", [3, WINDOW - 1, WINDOW, 40])
def test_a_window_handed_over_is_the_hosts(length):
    """`move_to` leaves the host's layer as if it had read the text itself, and ours empty."""
    ours, hosts = sliding_pair()
    moved = DynamicSlidingWindowLayer(WINDOW)
    for part in states(length).split([length - 2, 2], dim=-2):
        updated(ours, part)
        updated(hosts, part)
    updated(ours, states(4, seed=1))
    ours.rollback(length)
    ours.move_to(moved)
    assert moved.get_seq_length() == length
    assert asked(moved, 1) == asked(hosts, 1)
    for name in ("keys", "values"):
        assert torch.equal(getattr(moved, name), getattr(hosts, name))
    assert (ours.length, ours.is_initialized) == (0, False)


def test_an_empty_layer_hands_nothing_over():
    """A layer that was never written to leaves the host's untouched."""
    vanilla = DynamicSlidingWindowLayer(WINDOW)
    SpeculativeSlidingLayer(WINDOW).move_to(vanilla)
    assert not vanilla.is_initialized


def test_the_hosts_own_object_is_filled():
    """What comes back is the cache the host prepared, of an encoder-decoder pair too."""
    prepared = DynamicCache(config=shared().config)
    ours = speculative_cache(prepared)
    read(ours, prompt(5))
    assert vanilla_cache(ours) is prepared
    assert prepared.get_seq_length() == 5
    inner = DynamicCache()
    pair = speculative_cache(EncoderDecoderCache(inner, DynamicCache()))
    pair.self_attention_cache.update(states(4), states(4), 0)
    assert vanilla_cache(pair).self_attention_cache is inner
    assert inner.get_seq_length() == 4
    mine = DynamicCache()
    assert vanilla_cache(mine) is mine


# Rows


def batch(num_rows, length, seed=0):
    return torch.randn(num_rows, 2, length, 8, generator=torch.Generator().manual_seed(seed))


def kinds():
    return [SpeculativeLayer(), SpeculativeSlidingLayer(WINDOW)]


@pytest.mark.parametrize("layer", kinds(), ids=["full", "sliding"])
def test_selected_rows_go_on_alone(layer):
    """Rows that leave take their keys with them; the others read on as if they had always been alone."""
    alone = type(layer)(WINDOW) if layer.is_sliding else type(layer)()
    keys, more = batch(4, 12), batch(4, 3, seed=1)
    updated(layer, keys)
    layer.select_rows(torch.tensor([3, 1]))
    updated(alone, keys[[3, 1]])
    for one, other in zip(updated(layer, more[[3, 1]]), updated(alone, more[[3, 1]]), strict=True):
        assert torch.equal(one, other)


def test_rows_of_an_empty_layer():
    """Nothing is selected or arranged before anything was written."""
    for layer in kinds():
        layer.select_rows(torch.tensor([0]))
        layer.arrange(torch.tensor([[0, 1]]))
        assert layer.get_seq_length() == 0


@given(data=st.data(), length=st.integers(1, 20))
def test_arranged_slots_hold_what_they_are_told(data, length):
    """Slot `j` of row `i` then holds what was in its slot `slots[i, j]`, also where slots overlap."""
    new_length = data.draw(st.integers(1, length))
    order = data.draw(st.lists(st.permutations(range(length)), min_size=2, max_size=2))
    slots = torch.tensor(order)[:, :new_length].sort(dim=-1).values
    layer, keys = SpeculativeLayer(), batch(2, length)
    updated(layer, keys)
    layer.arrange(slots)
    assert layer.get_seq_length() == new_length
    expected = torch.stack([row.index_select(1, each) for row, each in zip(keys, slots, strict=True)])
    assert torch.equal(layer.keys, expected)
    assert torch.equal(layer.values, -expected)
    assert torch.equal(updated(layer, batch(2, 2, seed=1))[0][..., -2:, :], batch(2, 2, seed=1))


@pytest.mark.parametrize("num_kept", [(1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("length", [3, WINDOW, 40])
def test_an_arranged_window_still_has_all_that_can_be_seen(length, num_kept):
    """Rows that keep different numbers of tokens, packed at the right: each sees its own last tokens."""
    layer = SpeculativeSlidingLayer(WINDOW)
    text, new = batch(2, length), batch(2, 4, seed=1)
    updated(layer, text)
    layer.committed = length
    updated(layer, new)
    longest = length + max(num_kept)
    layer.rollback(longest)
    slots = torch.arange(longest) - max(num_kept) + torch.tensor(num_kept)[:, None]
    layer.arrange(slots.clamp(min=0))
    assert layer.get_seq_length() == longest
    assert asked(layer, 1) == (min(longest, WINDOW - 1) + 1, max(0, longest - WINDOW + 1))
    seen = updated(layer, batch(2, 1, seed=2))[0]
    for row, kept in enumerate(num_kept):
        whole = torch.cat([text[row], new[row, :, :kept], batch(2, 1, seed=2)[row]], dim=-2)
        at = min(whole.shape[-2], WINDOW)
        assert torch.equal(seen[row, :, -at:], whole[:, -at:])


# What the host may do to any cache of its own kind


def vanilla_and_ours(sliding=False):
    """The host's layer and ours with the same 6 slots of 3 rows in them."""
    kinds = (DynamicSlidingWindowLayer, SpeculativeSlidingLayer) if sliding else (DynamicLayer, SpeculativeLayer)
    layers = [kind(WINDOW) if sliding else kind() for kind in kinds]
    for length in (4, 1, 1):
        written = torch.randn(3, 2, length, 8, generator=torch.Generator().manual_seed(length))
        for layer in layers:
            layer.update(written, -written)
    return layers


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.batch_select_indices(torch.tensor([2, 0])),
        lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.reorder_cache(torch.tensor([1, 1, 0])),
        lambda layer: layer.crop(-2),
        lambda layer: layer.crop(0),
        lambda layer: layer.crop(2),
    ],
    ids=["select", "mask", "repeat", "reorder", "crop", "crop nothing", "crop to"],
)
def test_rows_and_lengths_change_as_in_the_hosts_layer(change, sliding):
    """Also in what is written and read afterwards; and an error is an error in both."""
    host, ours = vanilla_and_ours(sliding)
    errors = []
    for layer in (host, ours):
        try:
            change(layer)
            errors.append(None)
        except ValueError as error:
            errors.append(type(error))
    assert errors[0] == errors[1]
    more = torch.randn(host.keys.shape[0], 2, 1, 8)
    for expected, found in zip(host.update(more, -more), ours.update(more, -more), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("method", ["batch_select_indices", "reorder_cache", "batch_repeat_interleave", "crop"])
def test_an_empty_layer_stays_empty(method):
    """As the host's does."""
    layer = SpeculativeLayer()
    getattr(layer, method)({"crop": -1, "batch_repeat_interleave": 2}.get(method, torch.tensor([0])))
    assert layer.get_seq_length() == 0
    layer.update(states(3), states(3))
    assert torch.equal(layer.keys, states(3))


def test_slots_that_are_gone_are_not_invented():
    """A windowed layer that has dropped slots cannot be cropped to a text that would see them."""
    layer = SpeculativeSlidingLayer(WINDOW)
    layer.update(states(30), states(30))
    with pytest.raises(ValueError, match="cannot be cropped to 20 tokens"):
        layer.crop(-10)
    assert layer.get_seq_length() == 30


def test_no_slot_is_copied_twice():
    """`update` writes its slots and moves nothing else: five operations on tensors for keys, as many for values."""
    layer, calls = SpeculativeLayer(), []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    layer.update(states(3), states(3))
    with Counting():
        layer.update(states(1), states(1))
    assert calls.count("narrow") == 4
    assert calls.count("copy_") == 2
    assert "__getitem__" not in calls


class Copied(TorchDispatchMode):
    """Counts the numbers that are copied from place to place; views of them are free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("index_put_", "index_put"):
            self.count += args[2].numel()
        elif name in ("copy_", "scatter_", "index_copy_"):
            self.count += args[0].numel()
        elif isinstance(out, torch.Tensor) and out.is_floating_point():
            inside = [each for each in args if isinstance(each, torch.Tensor)]
            is_new = all(_memory_of(out) != _memory_of(each) for each in inside)
            self.count += out.numel() * is_new
        return out


def _memory_of(numbers: torch.Tensor) -> int:
    return numbers.untyped_storage().data_ptr()


@pytest.mark.parametrize("layer_class", [SpeculativeLayer, lambda: SpeculativeSlidingLayer(64)], ids=["full", "window"])
def test_moved_slots_alone_are_copied(layer_class):
    """As much as moves, whatever the length and the number of rows."""

    def copied(length: int, num_rows: int, num_moves: int) -> int:
        layer = layer_class()
        keys = torch.randn(num_rows, 2, length, 4)
        layer.update(keys, keys)
        layer.update(*[torch.randn(num_rows, 2, 12, 4)] * 2)
        counter = Copied()
        places = torch.arange(num_moves) + length
        with counter:
            layer.move(torch.zeros(num_moves, dtype=torch.long), places + 5, places)
        return counter.count

    one = copied(20, 1, 1)
    assert 2 * 2 * 4 <= one <= 2 * 2 * 2 * 4, "keys and values, read and written"
    for length, num_rows in ((20, 1), (20, 8), (2000, 1), (2000, 3)):
        assert [copied(length, num_rows, each) for each in (1, 2, 5)] == [one, 2 * one, 5 * one]


@given(data=st.data())
def test_moved_slots_hold_what_they_are_told(data):
    """All at once: a slot that is both left and taken gives what it held before."""
    layer, num_rows, length = SpeculativeLayer(), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    keys = torch.randn(num_rows, 2, length, 3)
    layer.update(keys, -keys)
    moves = data.draw(
        st.lists(
            st.tuples(st.integers(0, num_rows - 1), st.integers(0, length - 1), st.integers(0, length - 1)),
            min_size=1,
            unique_by=lambda move: (move[0], move[2]),
        )
    )
    expected = keys.clone()
    for row, source, place in moves:
        expected[row, :, place] = keys[row, :, source]
    layer.move(*torch.tensor(moves).unbind(dim=1))
    assert torch.equal(layer.keys, expected)
    assert torch.equal(layer.values, -expected)
