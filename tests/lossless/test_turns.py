"""Several turns over one cache (case 23): handed back, handed in, patched and unpatched by turns."""

import pytest
import torch
from transformers import DynamicCache

import hfspec
from hfspec import compat
from tests.models import SUPPORTED, assert_same_cache, both, noisy, plain_text, prompt, shared

TURN = {"max_new_tokens": 12, "return_dict_in_generate": True}


def two_turns(arch, patched_turns, cache=None, do_sample=False):
    """Both turns' ids and the cache at the end; the second prompt holds the first turn's text."""
    model, outputs, ids = shared(arch), [], prompt(6)
    for turn, is_patched in enumerate(patched_turns):
        given = {} if cache is None else {compat.CACHE_KEY: cache}
        call = TURN | {"do_sample": do_sample} | given
        torch.manual_seed(turn)
        if is_patched:
            with hfspec.patched(model, noisy(arch), draft_budget=4):
                out = model.generate(ids, **call)
                assert hfspec.stats(model).last.drafted_tokens > 0
        else:
            out = model.generate(ids, **call)
        cache = out[compat.CACHE_KEY]
        outputs.append(out.sequences)
        ids = torch.cat([out.sequences, prompt(5, seed=turn + 1)], dim=-1)
    return outputs, cache


@pytest.mark.parametrize("arch", SUPPORTED)
@pytest.mark.parametrize("patched_turns", [(True, True), (True, False), (False, True), (True, False, True)])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_the_next_turn_goes_on_from_the_cache(arch, patched_turns, do_sample):
    """A cache handed back by one turn serves the next, whichever of them is patched."""
    expected, expected_cache = two_turns(arch, [False] * len(patched_turns), do_sample=do_sample)
    outputs, cache = two_turns(arch, patched_turns, do_sample=do_sample)
    assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
    assert_same_cache(expected_cache, cache)


def test_a_cache_handed_in_is_filled_in_place():
    """The user's own cache object is the one that is filled, to vanilla's length and content."""
    mine, vanillas = DynamicCache(), DynamicCache()
    model = shared()
    model.generate(prompt(6), **{compat.CACHE_KEY: vanillas}, **TURN)
    with hfspec.patched(model, noisy(), draft_budget=4):
        out = model.generate(prompt(6), **{compat.CACHE_KEY: mine}, **TURN)
        assert hfspec.stats(model).last.accepted_tokens > 0
    assert out[compat.CACHE_KEY] is mine
    assert_same_cache(vanillas, mine)


def test_a_cache_handed_in_is_filled_without_a_dict_too():
    """Also where only ids are returned, the user's cache has vanilla's length afterwards."""
    mine = DynamicCache()
    with hfspec.patched(shared(), noisy(), draft_budget=4):
        shared().generate(prompt(6), max_new_tokens=12, **{compat.CACHE_KEY: mine})
    assert mine.get_seq_length() == 17


def test_the_draft_never_sees_the_users_cache():
    """A draft of another shape could not share the target's cache; the target's is for the target alone."""
    draft = shared("gpt2", seed=1)
    model, expected = shared(), plain_text(shared(), prompt(6), max_new_tokens=12)
    mine = DynamicCache()
    with hfspec.patched(model, draft, draft_budget=4):
        out = model.generate(prompt(6), max_new_tokens=12, **{compat.CACHE_KEY: mine})
        assert hfspec.stats(model).last.fallback_reason is None
    assert torch.equal(out, expected)
    assert [tuple(layer.keys.shape[1:]) for layer in mine.layers] == [(2, 17, 8)] * 2


def test_a_prefix_read_once_serves_many_calls():
    """A cache that already holds part of the prompt is gone on from, not read again."""
    model, prefix = shared(), prompt(9)

    def read() -> DynamicCache:
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=prefix, use_cache=True, **{compat.CACHE_KEY: cache})
        return cache

    ids = torch.cat([prefix, prompt(4, seed=3)], dim=-1)
    both(model, noisy(), ids, lambda: TURN | {compat.CACHE_KEY: read()}, draft_budget=4).assert_same().assert_drafted()


def test_an_error_leaves_the_users_cache_at_the_text():
    """A streamer that raises in mid-round (a client hung up) leaves vanilla's cache behind."""

    class HangsUp:
        num_put = 0

        def put(self, value):
            self.num_put += 1
            if self.num_put == 6:
                raise ConnectionError("the client hung up")

        def end(self):
            raise AssertionError("never called by vanilla after an error")

    caches = DynamicCache(), DynamicCache()
    for cache, is_patched in zip(caches, (False, True), strict=True):
        hfspec.patch(shared(), shared(), draft_budget=8)
        try:
            with pytest.raises(ConnectionError, match="hung up"):
                shared().generate(
                    prompt(6), streamer=HangsUp(), speculate=is_patched, **{compat.CACHE_KEY: cache}, **TURN
                )
        finally:
            hfspec.unpatch(shared())
    assert_same_cache(*caches)
