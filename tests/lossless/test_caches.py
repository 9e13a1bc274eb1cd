"""Cases 19, 21, 22, 23: every kind of cache, however it is asked for, on every kind of target and draft."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import EncoderDecoderCache

import hfspec
from hfspec.host import releases
from tests.models import (
    COUNTING,
    ENCODER_DECODER,
    RECURRENT,
    SUPPORTED,
    WINDOWED,
    Pair,
    Scripted,
    assert_same,
    assert_same_cache,
    both,
    build,
    noisy,
    plain_text,
    prompt,
    prompts,
    shared,
)

pytestmark = pytest.mark.usefixtures("_rounding")

NEW = {"max_new_tokens": 24}
DICT = {"return_dict_in_generate": True}
#: Compiling is for accelerators; here it would take minutes.
EAGERLY = {"disable_compile": True}


@pytest.fixture
def _rounding(request, monkeypatch):
    """Recurrent layers work in float32 whatever the model's dtype, and add up in another order over several tokens."""
    if any(name in request.node.name for name in RECURRENT):
        honest = torch.testing.assert_close
        loose = {"rtol": 1e-3, "atol": 1e-3}
        monkeypatch.setattr(torch.testing, "assert_close", lambda *args, **kwargs: honest(*args, **(kwargs | loose)))


def outcome(run: Callable[[], Any]) -> tuple[str, Any]:
    """What a call comes to: its result, or the error's type and first line."""
    try:
        return "result", run()
    except Exception as error:
        return type(error).__name__, str(error).split("\n")[0]


def same_outcome(
    model: Any, draft: Any, make_call: Callable[[], dict[str, Any]], budget: int = 4
) -> tuple[str, hfspec.Metrics]:
    """Run a call unpatched and patched: equal results (in every part, with the random state), or equal errors.

    Returns:
        "result" or the error's type, and what the patched call counted.
    """
    vars(model).pop("_cache", None)  # 4.57 keeps a static one, half-made or not, for the next call
    torch.manual_seed(0)
    plain_kind, plain = outcome(lambda: model.generate(**make_call()))
    plain_state = torch.get_rng_state()
    vars(model).pop("_cache", None)
    with hfspec.patched(model, draft, draft_budget=budget):
        torch.manual_seed(0)
        fast_kind, fast = outcome(lambda: model.generate(**make_call()))
        counts = hfspec.stats(model).last
        assert torch.equal(plain_state, torch.get_rng_state())
    assert plain_kind == fast_kind, (plain, fast)
    if plain_kind == "result":
        assert_same(plain, fast)
        assert counts.drafted_tokens > 0 or counts.fallback_reasons, "plain without a reason"
    else:
        assert plain == fast
    return plain_kind, counts


# Caches asked for by name


NAMES = [
    "dynamic",
    "dynamic_full",
    "static",
    "offloaded",
    "offloaded_static",
    "quantized",
    "sliding_window",
    "hybrid",
    "hybrid_chunked",
    "no such cache",
]


@pytest.mark.filterwarnings("ignore")  # the host's about names that it will drop
@pytest.mark.parametrize(
    ("arch", "where", "num_rows"),
    [
        ("llama", "argument", 1),
        ("llama", "model's config", 3),
        ("llama", "config object", 1),
        ("mistral", "argument", 3),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_asked_for_by_name(arch, name, where, num_rows):
    """As an argument, in the model's generation config, or in one that is passed: equal, or the same error."""
    model = build(arch, attn="sdpa")
    inputs = {"input_ids": prompt(6)} if num_rows == 1 else prompts(6, 3, 10)
    inputs |= NEW | DICT | EAGERLY

    def call() -> dict[str, Any]:
        if where == "argument":
            return inputs | {"cache_implementation": name}
        if where == "config object":
            config = type(model.generation_config)(cache_implementation="dynamic", pad_token_id=0, **NEW)
            config.cache_implementation = name
            return {key: value for key, value in inputs.items() if key not in NEW} | {"generation_config": config}
        model.generation_config.cache_implementation = name
        return inputs

    for options in ({}, {"do_sample": True}):
        kind, counts = same_outcome(model, noisy(arch, attn="sdpa"), lambda options=options: call() | options)
        if name in ("dynamic", "static"):
            assert kind == "result"
            assert counts.accepted_tokens > 0 or num_rows > 1
            assert counts.drafted_tokens > 0


def test_no_name_means_the_hosts_own_choice():
    """`cache_implementation=None` is the default, drafted for as such."""
    call = NEW | {"cache_implementation": None}
    both(shared(), noisy(), prompt(6), call, draft_budget=4).assert_same().assert_drafted()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("arch", ENCODER_DECODER)
@pytest.mark.parametrize("name", ["dynamic", "static", "offloaded", "quantized"])
def test_an_encoder_decoders_cache_asked_for_by_name(name, arch, num_rows):
    """The same behind an encoder."""
    inputs = {"input_ids": prompt(6)} if num_rows == 1 else prompts(6, 3, 10)
    call = inputs | NEW | DICT | EAGERLY | {"cache_implementation": name}
    kind, counts = same_outcome(shared(arch), noisy(arch), lambda: call, budget=3)
    if name in ("dynamic", "static"):
        assert kind == "result"
        assert counts.drafted_tokens > 0


def test_a_name_and_an_object_together_are_vanillas_error():
    """Asked for in two ways at once."""
    kind, _ = same_outcome(
        shared(),
        noisy(),
        lambda: {"input_ids": prompt(6), releases.CACHE_KEY: DynamicCache(), "cache_implementation": "static"} | NEW,
    )
    assert kind == "ValueError"


# Caches handed in


class OwnCache(DynamicCache):
    """A cache class of the user's."""


class OwnLayerCache(DynamicCache):
    """The same, which does not even hold what the host's holds."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys.clone(), values.clone()


def quantized(model: Any) -> Any:
    return QuantizedCache(backend="quanto", config=model.config)


OBJECTS: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda model: DynamicCache(),
    "made for the model": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=80),
    "static, just large enough": lambda model: StaticCache(config=model.config, max_cache_len=29),
    "static, too small": lambda model: StaticCache(config=model.config, max_cache_len=20),
    "static, smaller than the prompt": lambda model: StaticCache(config=model.config, max_cache_len=4),
    "offloaded": lambda model: DynamicCache(config=model.config, offloading=True),
    "quantized": quantized,
    "a class of the user's": lambda model: OwnCache(),
    "a class that copies": lambda model: OwnLayerCache(),
    "for an encoder too": lambda model: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    "no cache at all": lambda model: "cache",
}


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3"])
def test_a_cache_handed_in(arch, name, num_rows):
    """Cases 22, 23: any object is filled as vanilla fills it, or there is a reason to be plain, or vanilla's error."""
    model = shared(arch)
    kept: list[Any] = []

    def call() -> dict[str, Any]:
        kept.append(OBJECTS[name](model))
        return {"input_ids": prompt(6).expand(num_rows, -1), releases.CACHE_KEY: kept[-1]} | NEW | DICT | EAGERLY

    if outcome(lambda: OBJECTS[name](model))[0] != "result":
        pytest.skip("this release or machine has no such cache")
    kind, counts = same_outcome(model, noisy(arch), call)
    if kind != "result":
        assert "static" in name or name in ("no cache at all", "offloaded", "for an encoder too", "quantized")
        return
    plain, fast = kept
    if hasattr(plain, "layers"):
        assert_same_cache(plain, fast)
    if name in ("dynamic", "made for the model", "static", "static, just large enough"):
        assert counts.drafted_tokens > 0
        assert not counts.fallback_reasons
    if "class" in name:
        (reason,) = counts.fallback_reasons
        assert type(fast).__name__ in reason


def ends_at(length: int) -> Callable[..., torch.Tensor]:
    """A stopping criterion that no budget foresees."""
    return lambda ids, scores, **kwargs: torch.tensor([ids.shape[1] >= length])


@pytest.mark.parametrize("more", [DICT, {}], ids=["a dict is returned", "ids alone are returned"])
@pytest.mark.parametrize(
    ("arch", "draft"), [("llama", "llama"), ("llama", "gpt2"), *((each, each) for each in ("mistral", *RECURRENT))]
)
def test_the_users_own_object_is_filled(arch, draft, more):
    """The very cache that was handed in, handed back or not, by the target alone: a draft has its own."""
    model = shared(arch)
    for length in range(8, 16):  # reached in mid-draft, or not: more or less has to be taken back, or read again
        vanillas, mine = DynamicCache(config=model.config), DynamicCache(config=model.config)
        call = NEW | {"stopping_criteria": [ends_at(length)]}
        expected = model.generate(prompt(6), **{releases.CACHE_KEY: vanillas}, **call)
        with hfspec.patched(model, noisy(draft), draft_budget=4):
            out = model.generate(prompt(6), **{releases.CACHE_KEY: mine}, **call, **more)
            assert hfspec.stats(model).last.drafted_tokens > 0
            assert hfspec.stats(model).last.fallback_reason is None
        assert torch.equal(getattr(out, "sequences", out), expected)
        assert not more or out[releases.CACHE_KEY] is mine
        assert_same_cache(vanillas, mine)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_an_encoder_decoders_cache_is_handed_back(arch, num_rows):
    """Both parts of it, with all states that were asked for, as vanilla has them."""
    ids = torch.cat([prompt(6, seed=seed) for seed in range(num_rows)])
    call = NEW | DICT | {"output_hidden_states": True, "output_scores": True, "output_attentions": True}
    both(shared(arch), noisy(arch), ids, call, draft_budget=3).assert_same().assert_drafted()


def test_a_static_cache_too_small_is_vanillas_error():
    """The error of a cache that runs full is vanilla's, and comes neither sooner nor later."""
    for size in range(5, 31):

        def call(size: int = size) -> dict[str, Any]:
            cache = StaticCache(config=shared().config, max_cache_len=size)
            return {"input_ids": prompt(6), releases.CACHE_KEY: cache} | NEW | EAGERLY

        kind, _ = same_outcome(shared(), shared(), call, budget=6)
        assert (kind == "result") == (size >= 6 + 24 - 1), size


# Several turns


TURN_CACHES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dynamic": ("llama", OBJECTS["dynamic"]),
    "made for the model": ("llama", OBJECTS["made for the model"]),
    "static": ("llama", lambda model: StaticCache(config=model.config, max_cache_len=128)),
    "windows": ("mistral", OBJECTS["made for the model"]),
    "static windows": ("mistral", lambda model: StaticCache(config=model.config, max_cache_len=128)),
    "windows and full": ("gemma3", OBJECTS["made for the model"]),
    "static windows and full": ("gemma3", lambda model: StaticCache(config=model.config, max_cache_len=128)),
    "local attention": ("gpt_neo", OBJECTS["made for the model"]),
    "positions learned": ("gpt2", OBJECTS["made for the model"]),
    "of vanilla's making": ("llama", lambda model: None),
    "of vanilla's making, positions learned": ("gpt2", lambda model: None),
    "of vanilla's making, with windows": ("gemma3", lambda model: None),
}
for _arch in RECURRENT:
    TURN_CACHES[_arch] = (_arch, OBJECTS["made for the model"])
    TURN_CACHES[f"of vanilla's making, {_arch}"] = (_arch, lambda model: None)


@pytest.mark.parametrize("fast_turns", ["fff", "fpf", "pfp"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", TURN_CACHES)
def test_turns_over_one_cache(name, num_rows, fast_turns):
    """Three turns, patched (f) and plain (p) by turns, leave vanilla's texts and vanilla's cache."""
    arch, make = TURN_CACHES[name]
    model = shared(arch)

    def run(turns: str) -> tuple[list[torch.Tensor], Any]:
        cache = make(model)
        ids = torch.cat([prompt(6, seed=seed) for seed in range(num_rows)])
        texts = []
        for number, turn in enumerate(turns):
            given = {} if cache is None else {releases.CACHE_KEY: cache}
            with hfspec.patched(model, noisy(arch), draft_budget=3):
                torch.manual_seed(number)
                more = {"speculate": turn == "f", "do_sample": number == 1, "max_new_tokens": 9}
                out = model.generate(ids, **given, **more, **DICT, **EAGERLY)
                last = hfspec.stats(model).last
            assert (last.drafted_tokens > 0) == (turn == "f")
            assert turn == "p" or not last.fallback_reasons
            cache = out[releases.CACHE_KEY]
            texts.append(out.sequences)
            added = torch.cat([prompt(5, seed=10 + number + row) for row in range(num_rows)])
            ids = torch.cat([out.sequences, added], dim=-1)
        return texts, cache

    expected, expected_cache = run("ppp")
    texts, cache = run(fast_turns)
    assert all(torch.equal(*pair) for pair in zip(expected, texts, strict=True))
    assert_same_cache(expected_cache, cache)


def test_a_prefix_read_once_serves_many_calls():
    """A cache that already holds part of the prompt is gone on from, not read again."""
    model, prefix = shared(), prompt(9)

    def read() -> DynamicCache:
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=prefix, use_cache=True, **{releases.CACHE_KEY: cache})
        return cache

    ids = torch.cat([prefix, prompt(4, seed=3)], dim=-1)
    call = NEW | DICT
    both(
        model, noisy(), ids, lambda: call | {releases.CACHE_KEY: read()}, draft_budget=4
    ).assert_same().assert_drafted()


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_cache_made_in_inference_mode_is_vanillas(arch):
    """Outside, such a cache cannot be written into in place; vanilla does without, and so do we."""
    model = shared(arch)

    def second_turn() -> torch.Tensor:
        with torch.inference_mode():
            out = model.generate(prompt(6), **NEW, **DICT)
        ids = torch.cat([out.sequences, prompt(4, seed=3)], dim=-1)
        return model.generate(ids, **{releases.CACHE_KEY: out[releases.CACHE_KEY]}, **NEW)

    expected = second_turn()
    with hfspec.patched(model, noisy(arch), draft_budget=4):
        found = second_turn()
        assert hfspec.stats(model).last.drafted_tokens > 0
    assert torch.equal(expected, found)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("arch", [*SUPPORTED, *WINDOWED, *RECURRENT])
def test_a_prompt_read_in_chunks(arch, chunk, num_rows):
    """`prefill_chunk_size` on every kind of cache: vanilla's result, or vanilla's error."""
    inputs = {"input_ids": prompt(17).expand(num_rows, -1)}
    call = inputs | NEW | DICT | EAGERLY | {"prefill_chunk_size": chunk}
    same_outcome(shared(arch), noisy(arch), lambda: call)
    if arch not in RECURRENT:
        same_outcome(shared(arch), noisy(arch), lambda: call | {"cache_implementation": "static"})


# Windows


@functools.cache
def windowed(arch: str, window: int, seed: int = 0) -> Any:
    return build(arch, seed=seed, attn="sdpa", sliding_window=window)


@functools.cache
def noisy_windowed(arch: str, window: int) -> Any:
    model = build(arch, attn="sdpa", sliding_window=window)
    model.load_state_dict(noisy(arch, attn="sdpa").state_dict())
    return model


@pytest.mark.parametrize("num_prompt", [2, 7, 8, 9, 30])
@pytest.mark.parametrize("window", [2, 8, 16])
@pytest.mark.parametrize("arch", WINDOWED)
def test_windows_on_target_and_draft(arch, window, num_prompt):
    """Windows narrower and wider than prompt and rounds, gone beyond in mid-round, on the target and on the draft."""
    target, draft = windowed(arch, window), noisy_windowed(arch, window)
    for inputs in ({"input_ids": prompt(num_prompt)}, prompts(num_prompt, 5, 1)):
        call = inputs | {"max_new_tokens": 30}
        script = Scripted(plain_text(target, None, **call), [5, 0, 2, 4])
        for source in (draft, script):
            both(target, source, None, call, draft_budget=5).assert_same().assert_drafted()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("who", ["the target", "the draft", "both, of other widths"])
def test_windows_on_one_side(who, num_rows, do_sample):
    """A window on the target or on the draft alone, or on both of another width; texts far longer than either."""
    full = build("llama", attn="sdpa")
    full.load_state_dict(windowed("mistral", 8).state_dict())
    target = full if who == "the draft" else windowed("mistral", 8)
    draft = full if who == "the target" else windowed("mistral", 8 if who == "the draft" else 5)
    inputs = {"input_ids": prompt(12)} if num_rows == 1 else prompts(12, 3, 7)
    call = inputs | {"max_new_tokens": 40, "do_sample": do_sample}
    both(target, draft, None, call, draft_budget=4).assert_same().assert_drafted()


# Recurrent layers


def returned_with(target: Any, draft: Any, ids: torch.Tensor, budget: int) -> Pair:
    call = NEW | DICT | {"output_scores": True}
    return both(target, draft, ids, call, draft_budget=budget).assert_same().assert_drafted()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("accepts", [[0], [1], [9], [0, 3, 1], [2, 0, 9]], ids=str)
@pytest.mark.parametrize("arch", RECURRENT)
def test_recurrent_states_are_vanillas_after_partial_acceptance(arch, accepts, num_rows):
    """Whatever was accepted of each draft, text and returned states are those of reading token by token."""
    model = shared(arch)
    ids = torch.cat([prompt(9, seed=seed) for seed in range(num_rows)])
    script = Scripted(plain_text(model, ids, **NEW), accepts)
    for budget in (1, 3):
        pair = returned_with(model, script, ids, budget)
        # Each text ends with an accepted, a rejected or no draft token at all, in turn.
        for num_new in (2, 3, 4, 5):
            both(model, script, ids, DICT | {"max_new_tokens": num_new}, draft_budget=budget).assert_same()
    assert pair.stats.lockstep_reasons.total() == (num_rows > 1)


@pytest.mark.parametrize(("num_rows", "do_sample"), [(1, True), (3, False)], ids=["one row, sampled", "rows, greedy"])
@pytest.mark.parametrize("num_prompt", [1, 9])
@pytest.mark.parametrize("arch", RECURRENT)
def test_recurrent_and_full_attention_draft_for_each_other(arch, num_prompt, num_rows, do_sample):
    """A recurrent target with a Llama draft, the reverse, and both recurrent."""
    ids = torch.cat([prompt(num_prompt, seed=seed) for seed in range(num_rows)])
    call = NEW | {"do_sample": do_sample}
    for target, draft in (
        (shared(arch), shared("llama")),
        (shared("llama"), shared(arch)),
        (shared(arch), noisy(arch)),
        (shared("gemma3"), shared(arch)),
    ):
        pair = both(target, draft, ids, call, draft_budget=3).assert_same()
        assert pair.stats.drafted_tokens > 0 or pair.stats.fallback_reason


@pytest.mark.parametrize("arch", RECURRENT)
def test_a_padded_batch_of_a_recurrent_model(arch):
    """Padding at the left, rows that end at different tokens, and what vanilla makes of them."""
    model = shared(arch, attn="sdpa")
    batch = prompts(11, 8, 4, 10) | NEW
    texts = plain_text(model, None, **batch)
    for more in ({}, {"eos_token_id": [int(texts[0, 15]), int(texts[2, 20])], "pad_token_id": 0}):
        for source in (noisy(arch, attn="sdpa"), Scripted(texts, [2, 0, 3])):
            both(model, source, None, batch | more, draft_budget=3).assert_same().assert_drafted()


@pytest.mark.parametrize("arch", ["mamba", "falcon_mamba", "jamba", "bamba", "lfm2", "zamba2", "granitemoehybrid"])
def test_other_recurrent_models_are_equal_or_plain_with_a_reason(arch):
    """Models of other recurrent families, as target and as draft."""
    model = tiny(arch)
    if model is None:
        pytest.skip("this release does not have it")
    for target, draft in ((model, shared("llama")), (shared("llama"), model), (model, model)):
        if outcome(lambda target=target: target.generate(prompt(9), **NEW))[0] != "result":
            pytest.skip("vanilla cannot write with it either")
        pair = both(target, draft, prompt(9), NEW, draft_budget=3).assert_same()
        assert pair.stats.drafted_tokens > 0 or pair.stats.fallback_reason


@functools.cache
def tiny(arch: str) -> Any:
    """A float64 model of that type, or `None` where the release has none or other sizes are wanted."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    own: dict[str, dict[str, Any]] = {
        "mamba": {"state_size": 4},
        "falcon_mamba": {"state_size": 4},
        "jamba": {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 99,
            "expert_layer_offset": 98,
            "num_experts": 1,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
        },
        "bamba": {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
        },
        "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        "zamba2": {
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "chunk_size": 8,
        },
        "granitemoehybrid": {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 48,
        },
    }
    names = {"falcon_mamba": "FalconMamba", "lfm2": "Lfm2", "granitemoehybrid": "GraniteMoeHybrid"}
    name = names.get(arch, arch.capitalize())
    if not hasattr(transformers, f"{name}ForCausalLM"):
        return None
    try:
        config = getattr(transformers, f"{name}Config")(**(sizes | own[arch]))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float64).eval()
    except Exception:
        return None


# Rolling back


@pytest.mark.parametrize("kept", [0, 1, 6, 7])
@pytest.mark.parametrize(
    ("arch", "cache"),
    [(arch, "the host's") for arch in (*SUPPORTED, *WINDOWED, *COUNTING, *RECURRENT, *ENCODER_DECODER)]
    + [(arch, cache) for arch in ("llama", *WINDOWED) for cache in ("the user's", "static")],
)
def test_a_rollback_equals_a_cache_never_extended(cache, arch, kept):
    """After drafts of 7 of which so many are kept, logits and returned cache are vanilla's."""
    model, ids = shared(arch), prompt(5)
    script = Scripted(plain_text(model, ids, **NEW), [kept])

    def call() -> dict[str, Any]:
        given: dict[str, Any] = {"the host's": {}, "static": {"cache_implementation": "static"} | EAGERLY}.get(
            cache, {}
        )
        if cache == "the user's":
            given = {releases.CACHE_KEY: DynamicCache(config=model.config)}
        return NEW | DICT | given | {"output_logits": True}

    both(model, script, ids, call, draft_budget=7).assert_same().assert_drafted()
    assert script.outcomes[0].num_accepted == kept
