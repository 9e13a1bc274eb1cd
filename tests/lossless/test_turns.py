"""Several turns over one cache (case 23): handed back, handed in, patched and unpatched by turns."""

import pytest
import torch
from transformers import DynamicCache, StaticCache, StoppingCriteria

import hfspec
from hfspec import compat
from tests.models import SUPPORTED, assert_close, assert_same_cache, both, noisy, plain_text, prompt, shared

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


CACHES = {
    "static": lambda: StaticCache(config=shared().config, max_cache_len=96),
    "static windows": lambda: StaticCache(config=shared("mistral").config, max_cache_len=96),
    "windows": lambda: DynamicCache(config=shared("mistral").config),
}


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", CACHES)
def test_any_cache_of_the_hosts_is_filled_in_place(name, num_rows):
    """Two turns over a cache of the user's, of a kind that cannot be cropped, or is zeroed: as vanilla leaves it."""
    arch = "llama" if name == "static" else "mistral"
    model, caches = shared(arch), (CACHES[name](), CACHES[name]())
    texts = []
    for cache, is_patched in zip(caches, (False, True), strict=True):
        ids = torch.cat([prompt(6, seed=seed) for seed in range(num_rows)])
        with hfspec.patched(model, noisy(arch), draft_budget=3):
            for turn in range(2):
                call = {compat.CACHE_KEY: cache, "disable_compile": True, "speculate": is_patched}
                ids = model.generate(ids, **call, **TURN).sequences
                ids = torch.cat([ids, torch.cat([prompt(5, seed=9 + turn + row) for row in range(num_rows)])], dim=-1)
            if is_patched:
                assert hfspec.stats(model).last.fallback_reason is None
                assert hfspec.stats(model).total.accepted_tokens > 0
        texts.append(ids)
    assert torch.equal(*texts)
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        plain, fast = layers
        assert int(plain.get_seq_length()) == int(fast.get_seq_length())
        assert_close((plain.keys, plain.values), (fast.keys, fast.values))


@pytest.mark.parametrize("num_rows", [1, 2])
def test_an_encoder_decoders_cache_is_handed_back(num_rows):
    """Both parts of it, with all states that were asked for, as vanilla has them."""
    ids = torch.cat([prompt(6, seed=seed) for seed in range(num_rows)])
    call = TURN | {"output_hidden_states": True, "output_scores": True, "output_attentions": True}
    both(shared("t5"), noisy("t5"), ids, call, draft_budget=3).assert_same().assert_drafted()


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


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_cache_made_in_inference_mode_is_vanillas(arch):
    """Outside, such a cache cannot be written into in place; vanilla does without, and so do we."""

    def second_turn(model):
        with torch.inference_mode():
            out = model.generate(prompt(6), **TURN)
        ids = torch.cat([out.sequences, prompt(4, seed=3)], dim=-1)
        return model.generate(ids, **{compat.CACHE_KEY: out[compat.CACHE_KEY]}, **TURN).sequences

    model = shared(arch)
    expected = second_turn(model)
    with hfspec.patched(model, noisy(arch), draft_budget=4):
        found = second_turn(model)
        assert hfspec.stats(model).last.drafted_tokens > 0
    assert torch.equal(expected, found)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_an_error_leaves_the_users_cache_at_the_text(num_rows):
    """A stopping criterion that raises in mid-round leaves vanilla's cache behind."""

    class HangsUp(StoppingCriteria):
        num_calls = 0

        def __call__(self, input_ids, scores, **kwargs):
            self.num_calls += 1
            if self.num_calls == 5:
                raise ConnectionError("the client hung up")
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    caches = DynamicCache(), DynamicCache()
    for cache, is_patched in zip(caches, (False, True), strict=True):
        hfspec.patch(shared(), shared(), draft_budget=8)
        try:
            with pytest.raises(ConnectionError, match="hung up"):
                shared().generate(
                    prompt(6).expand(num_rows, -1),
                    stopping_criteria=[HangsUp()],
                    speculate=is_patched,
                    **{compat.CACHE_KEY: cache},
                    **TURN,
                )
        finally:
            hfspec.unpatch(shared())
    assert_same_cache(*caches)
