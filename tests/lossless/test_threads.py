"""Calls at the same time and within each other, and what is left of a call when it is over: nothing."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, TextIteratorStreamer

import hfspec
from hfspec.cache.ledger import SpeculativeCache
from hfspec.draft.model import ModelDraft
from hfspec.patch import is_patched
from tests.models import (
    CountingProcessor,
    FunctionSource,
    OnForward,
    assert_same,
    build,
    char_tokenizer,
    noisy,
    plain_text,
    prompt,
    prompts,
    shared,
)

NEW = {"max_new_tokens": 12}
SAMPLED = NEW | {"do_sample": True, "temperature": 1.2, "top_k": 40}

Call = dict[str, Any]


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Run every job in a thread of its own, all started together; their results, or the first error."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []
    together = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        try:
            together.wait(timeout=30)
            results[index] = jobs[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


def writes(model: Any, calls: Sequence[Call]) -> Callable[[], list[torch.Tensor]]:
    """A job: all these calls, one after the other."""
    return lambda: [model.generate(**call) for call in calls]


def assert_all_equal(texts: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]]) -> None:
    for mine, theirs in zip(texts, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert_same(other, one)


CALLS: dict[str, Callable[[int], Call]] = {
    "one row": lambda seed: NEW | {"inputs": prompt(3 + seed % 5, seed=seed)},
    "batches": lambda seed: NEW | prompts(3 + seed % 5, 6, 2, seed=seed),
    "batches in step": lambda seed: (
        NEW
        | prompts(3 + seed % 5, 6, seed=seed)
        | {"renormalize_logits": True}
        # a new object each time, as it keeps count; it may look at all rows
        | {"logits_processor": [CountingProcessor()]}
    ),
}


@pytest.mark.parametrize(
    ("arch", "kind", "num_prompts"),
    [("llama", "one row", 10), ("llama", "batches", 10), ("llama", "batches in step", 4), ("mistral", "batches", 4)],
)
def test_threads_do_not_share_a_call(arch, kind, num_prompts):
    """Four threads with ten prompts each (or four) write what they would write alone, and every call is counted."""
    model, draft, make = shared(arch, attn="sdpa"), noisy(arch, attn="sdpa"), CALLS[kind]
    seeds = [[10 * thread + i for i in range(num_prompts)] for thread in range(4)]
    expected = [writes(model, [make(seed) for seed in mine])() for mine in seeds]
    with hfspec.patched(model, draft, draft_budget=4):
        texts = at_once(*(writes(model, [make(seed) for seed in mine]) for mine in seeds))
        total = hfspec.stats(model).total
    assert_all_equal(texts, expected)
    assert (total.calls, total.speculative_calls, total.fallback_reasons) == (4 * num_prompts, 4 * num_prompts, {})
    assert total.accepted_tokens > 0
    assert total.new_tokens == 12 * sum(len(text) for mine in texts for text in mine)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_seeded_call_is_not_disturbed_by_greedy_ones(num_rows):
    """Sampling under a seed in one thread gives vanilla's texts while others, which draw nothing, decode greedily."""
    model = shared()
    ids = prompt(6).expand(num_rows, -1)

    def samples() -> list[torch.Tensor]:
        texts = []
        for seed in range(8):
            torch.manual_seed(seed)
            texts.append(model.generate(ids, **SAMPLED))
        return [*texts, torch.get_rng_state()]

    greedy = [[NEW | {"inputs": prompt(5, seed=10 * thread + i)} for i in range(10)] for thread in range(3)]
    expected = [samples(), *(writes(model, calls)() for calls in greedy)]
    assert not torch.equal(expected[0][0], expected[0][1])
    with hfspec.patched(model, noisy(), draft_budget=3):
        texts = at_once(samples, *(writes(model, calls) for calls in greedy))
        assert hfspec.stats(model).total.accepted_tokens > 0
    assert_all_equal(texts, expected)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_what_others_draw_stays_drawn(num_rows):
    """Another thread draws in every forward of a greedy call, those of proofs included: its numbers are not undone."""
    model, ids = shared(), prompt(6).expand(num_rows, -1)
    expected = plain_text(model, ids, **NEW)
    drawn: list[float] = []
    may_draw, has_drawn, is_over = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def draw() -> None:
        while may_draw.acquire(timeout=60) and not is_over.is_set():
            drawn.append(float(torch.rand(1)))
            has_drawn.release()

    thread = threading.Thread(target=draw)

    def let_draw(*args: Any) -> None:
        if thread.is_alive():
            may_draw.release()
            assert has_drawn.acquire(timeout=60)

    hook = OnForward(model, before=let_draw)
    with hfspec.patched(model, noisy(), draft_budget=3):
        torch.manual_seed(0)
        thread.start()
        text = model.generate(ids, **NEW)
        is_over.set()
        may_draw.release()
        thread.join(timeout=60)
        stats = hfspec.stats(model).last
    hook.remove()
    assert torch.equal(text, expected)
    assert stats.trials > 0
    assert stats.accepted_tokens > 0
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert drawn == [float(torch.rand(1)) for _ in drawn]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("is_fast", [False, True], ids=["vanilla", "patched"])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_calls_that_sample_at_once_draw_different_numbers(num_rows, is_fast):
    """Two threads that share the process's generator never draw the same noise twice, as in vanilla.

    One call is held up in mid-text while another begins and ends; a third comes after both. They have the same
    prompts, so that the same noise gives the same first tokens.
    """
    model, ids = build(), prompt(6).expand(num_rows, -1)
    held, may_go_on = threading.Event(), threading.Event()
    num_forwards = [0]

    def hold_up(*args: Any) -> None:
        if threading.current_thread().name == "held":
            num_forwards[0] += 1
            if num_forwards[0] == 3:
                held.set()
                assert may_go_on.wait(timeout=60)

    texts: dict[str, torch.Tensor] = {}

    def write(name: str) -> None:
        texts[name] = model.generate(ids, **SAMPLED)

    hook = OnForward(model, before=hold_up)
    torch.manual_seed(0)
    with hfspec.patched(model, noisy(), draft_budget=2) if is_fast else nullcontext():
        thread = threading.Thread(target=write, args=("held",), name="held")
        thread.start()
        assert held.wait(timeout=60)
        write("between")
        may_go_on.set()
        thread.join(timeout=60)
        write("after")
    hook.remove()
    firsts = {name: tuple(text[:, 6].tolist()) for name, text in texts.items()}
    assert len(set(firsts.values())) == 3, f"calls were drawn with the same noise: {firsts}"


def test_two_targets_share_one_draft():
    """One draft model serves two targets by turns, from within each other's calls, and at the same time."""
    one, other, draft = build(seed=0), build(seed=1), noisy()
    expected = [plain_text(model, prompt(), **NEW) for model in (one, other)]
    nested: list[torch.Tensor] = []

    class CallsTheOther(CountingProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 12:
                nested.append(other.generate(prompt(), **NEW))
            return scores

    with hfspec.patched(one, draft, draft_budget=4), hfspec.patched(other, draft, draft_budget=3):
        for model, text in zip((one, other, one), (*expected, expected[0]), strict=True):
            assert torch.equal(model.generate(prompt(), **NEW), text)
        assert torch.equal(one.generate(prompt(), logits_processor=[CallsTheOther()], **NEW), expected[0])
        assert hfspec.stats(one).last.drafted_tokens > 0
        calls = [NEW | {"inputs": prompt()}] * 5
        texts = at_once(*(writes(model, calls) for model in (one, other, one, other)))
        assert hfspec.stats(one).total.calls == 3 + 2 * 5
    assert torch.equal(nested[0], expected[1])
    assert_all_equal(texts, [5 * [text] for text in (*expected, *expected)])


def test_a_draft_may_be_a_target_itself():
    """A draft that is patched with a draft of its own writes and drafts at the same time."""
    target, draft, drafts_draft = build(seed=0), build(seed=1), noisy(seed=1)
    calls = [NEW | {"inputs": prompt(4 + i % 3, seed=i)} for i in range(5)]
    expected = [writes(model, calls)() for model in (target, draft)]
    with hfspec.patched(draft, drafts_draft, draft_budget=3), hfspec.patched(target, draft, draft_budget=4):
        texts = at_once(*(writes(model, calls) for model in (target, draft, target, draft)))
        assert hfspec.stats(draft).total.calls == 10, "drafting is no call"
        assert hfspec.stats(draft).total.drafted_tokens > 0
        assert hfspec.stats(target).total.drafted_tokens > 0
    assert_all_equal(texts, [*expected, *expected])


# A call within a call


class Hook(LogitsProcessor, StoppingCriteria):
    """A processor, criterion or streamer that does something at the fifth token."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._num_calls = 0

    def _count(self) -> None:
        self._num_calls += 1
        if self._num_calls == 5:
            self._action()

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self._count()
        is_criterion = scores is None
        return torch.zeros(len(input_ids), dtype=torch.bool) if is_criterion else scores

    def put(self, value: torch.Tensor) -> None:
        self._count()

    def end(self) -> None:
        pass


HOOKS = {
    "a processor": lambda hook: {"logits_processor": [hook]},
    "a criterion": lambda hook: {"stopping_criteria": [hook]},
    "a streamer": lambda hook: {"streamer": hook},
}


@pytest.mark.parametrize("inner_fails", [False, True], ids=["ends well", "fails"])
@pytest.mark.parametrize("who", ["the same", "another"])
@pytest.mark.parametrize("where", HOOKS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_call_within_a_call(where, who, num_rows, inner_fails):
    """Neither text nor counts nor random numbers of the two get mixed up, in whatever object the inner one is made."""
    outer, inner_ids, outer_ids = build(), prompt(4, seed=9), prompt(6).expand(num_rows, -1)
    inner = outer if who == "the same" else build(seed=1)

    class InnerError(Exception):
        pass

    def run() -> tuple[list[torch.Tensor], list[hfspec.Metrics]]:
        texts, counts = [], []

        def fail() -> None:
            raise InnerError

        def call_within() -> None:
            if inner_fails:
                with pytest.raises(InnerError):
                    inner.generate(inner_ids, stopping_criteria=[Hook(fail)], **SAMPLED)
            else:
                texts.append(inner.generate(inner_ids, **(SAMPLED | {"max_new_tokens": 9})))
            if is_patched(inner):
                counts.append(hfspec.stats(inner).last)

        torch.manual_seed(0)
        texts.append(outer.generate(outer_ids, **SAMPLED, **HOOKS[where](Hook(call_within))))
        texts.append(torch.get_rng_state())
        return texts, counts

    expected, _ = run()
    with hfspec.patched(inner, noisy(seed=1), draft_budget=2), hfspec.patched(outer, noisy(), draft_budget=3):
        texts, counts = run()
        outers = hfspec.stats(outer)
        inners = hfspec.stats(inner)
        num_inner = 5 if inner_fails else 9
        (count,) = counts
        assert count.new_tokens == num_inner
        assert count.drafted_tokens > 0
        assert outers.last.new_tokens == 12 * num_rows
        assert outers.total.calls == (2 if inner is outer else 1)
        assert inners.total.calls == (2 if inner is outer else 1)
        if inner is outer:
            assert outers.total.new_tokens == 12 * num_rows + num_inner
    assert all(torch.equal(*pair) for pair in zip(expected, texts, strict=True))


def test_a_draft_source_may_generate():
    """A source that drafts with somebody's `generate()`, patched or not, the target's own included."""
    model, helper = build(), build(seed=1)
    expected = plain_text(model, prompt(), **NEW)

    def propose(ids: torch.Tensor, budget: hfspec.RoundBudget, num_round: int) -> hfspec.Draft:
        writer = model if num_round % 2 else helper
        text = writer.generate(ids, max_new_tokens=budget.num_tokens, speculate=False)
        return hfspec.Draft(text[:, ids.shape[1] :])

    with hfspec.patched(helper, noisy(seed=1)), hfspec.patched(model, FunctionSource(propose), draft_budget=3):
        assert torch.equal(model.generate(prompt(), **NEW), expected)
        last, total = hfspec.stats(model).last, hfspec.stats(model).total
    assert last.accepted_tokens >= 3
    assert last.new_tokens == 12
    assert last.fallback_reason is None
    assert total.fallback_reasons == {"speculate=False": total.calls - 1}


def test_a_text_iterator_streamer_is_read_in_another_thread():
    """The usual server: generation in a background thread, the text read piece by piece; two of them at once."""
    model, ids = shared(), [prompt(6, seed=seed) for seed in range(4)]
    tokenizer = char_tokenizer()

    def stream(mine: torch.Tensor) -> list[str]:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        call = {"inputs": mine, "streamer": streamer, "max_new_tokens": 30}
        thread = threading.Thread(target=model.generate, kwargs=call)
        thread.start()
        pieces = list(streamer)
        thread.join(timeout=60)
        return pieces

    expected = [stream(mine) for mine in ids]
    with hfspec.patched(model, noisy(), draft_budget=4):
        pieces = at_once(*(lambda mine=mine: stream(mine) for mine in ids))
        assert hfspec.stats(model).total.accepted_tokens > 0
    assert pieces == expected


# What is left when a call is over


ENDINGS: dict[str, Callable[[], Call]] = {
    "greedy": dict,
    "sampled": lambda: {"do_sample": True},
    "rejection": lambda: {"do_sample": True, "acceptance": "rejection"},
    "a batch": lambda: prompts(6, 3, 5),
    "a sampled batch": lambda: prompts(6, 3, 5) | {"do_sample": True},
    "a batch in step": lambda: prompts(6, 3, 5) | {"logits_processor": [CountingProcessor()]},
    "a dict": lambda: {"return_dict_in_generate": True, "output_scores": True},
    "an error": lambda: {"stopping_criteria": [Hook(_hang_up)]},
    "an error in a batch": lambda: prompts(6, 3, 5) | {"stopping_criteria": [Hook(_hang_up)]},
    "plain": lambda: {"use_cache": False},
    "plain by choice": lambda: {"speculate": False},
    "a static cache": lambda: {"cache_implementation": "static", "disable_compile": True},
}
OURS = ("acceptance", "speculate")


def _hang_up() -> None:
    raise ConnectionError("the client hung up")


def run_to_its_end(model: Any, ending: str, takes_ours: bool = True) -> None:
    call = {"input_ids": prompt(6)} | NEW | ENDINGS[ending]()
    if not takes_ours:
        call = {name: value for name, value in call.items() if name not in OURS}
    try:
        model.generate(**call)
    except ConnectionError:
        assert "error" in ending


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Every attribute of every submodule by identity, weights by version too, configs by content."""
    state: dict[str, Any] = {"config": model.config.to_dict(), "generation": model.generation_config.to_dict()}
    state["config's own"] = dict(vars(model.config))
    for path, module in model.named_modules():
        state[f"{path} class"] = type(module)
        for name, value in vars(module).items():
            if name == "_cache":  # 4.57 keeps its static cache on the model, for the next call
                continue
            state[f"{path}.{name}"] = dict(value) if isinstance(value, dict) else id(value)
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        state[f"{name} itself"] = (id(weight), weight._version, weight.requires_grad)
    return state


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_nothing_stays_on_the_model_or_the_draft(arch, ending):
    """After a call, however it ended, target and draft have the attributes that they had, and nothing more."""
    model, draft = build(arch, attn="sdpa"), build(arch, seed=1, attn="sdpa")
    # What vanilla leaves behind (a static cache's size) is there before.
    run_to_its_end(model, ending, takes_ours=False)
    before = state_of(model), state_of(draft)
    with hfspec.patched(model, draft, draft_budget=3):
        patched = state_of(model)
        run_to_its_end(model, ending)
        assert state_of(model) == patched
        assert state_of(draft) == before[1]
    assert (state_of(model), state_of(draft)) == before


@pytest.fixture
def caches(monkeypatch):
    """Weak references to every cache of ours that is made."""
    made: list[weakref.ref[SpeculativeCache]] = []
    honest = SpeculativeCache.__init__

    def noting(self: SpeculativeCache, *args: Any) -> None:
        made.append(weakref.ref(self))
        honest(self, *args)

    monkeypatch.setattr(SpeculativeCache, "__init__", noting)
    return made


@pytest.mark.parametrize("ending", [each for each in ENDINGS if "plain" not in each])
def test_caches_go_with_the_call(ending, caches):
    """Target's and draft's caches are freed as the call returns, not when the collector next comes by."""
    model, draft = build(attn="sdpa"), noisy(attn="sdpa")
    gc.collect()
    gc.disable()
    try:
        with hfspec.patched(model, draft, draft_budget=3):
            run_to_its_end(model, ending)
            assert len(caches) >= (1 if "static" in ending else 2), "target's and draft's"
            assert not [ref() for ref in caches if ref() is not None]
    finally:
        gc.enable()


def test_a_cache_handed_back_is_the_users_alone(caches):
    """The cache in the result lives as long as the user holds it."""
    model = build()
    gc.collect()
    gc.disable()
    try:
        with hfspec.patched(model, noisy(), draft_budget=3):
            out = model.generate(prompt(), return_dict_in_generate=True, **NEW)
            (name,) = {"cache", "past_key_values"} & set(out)
            ref = weakref.ref(out[name])
            assert ref() is not None
            del out
            assert ref() is None
    finally:
        gc.enable()


def test_sources_named_in_calls_are_let_go():
    """A source made for each call is not kept for ever, nor is what was measured of it."""
    model = build()
    text = plain_text(model, prompt(), **NEW)

    def propose(ids: torch.Tensor, budget: hfspec.RoundBudget, num_round: int) -> hfspec.Draft:
        return hfspec.Draft(text[:, ids.shape[1] : ids.shape[1] + budget.num_tokens])

    refs = []
    with hfspec.patched(model, ModelDraft(noisy()), draft_budget=3):
        for _ in range(40):
            source = FunctionSource(propose)
            refs.append(weakref.ref(source))
            model.generate(prompt(), draft=source, **NEW)
            del source
        gc.collect()
        assert sum(ref() is not None for ref in refs) <= 4
