"""Which calls are sped up, and what is drafted for their rows; calls that cannot be run plain, and say why."""

import logging
from typing import Any

import pytest
import torch
from transformers import MambaConfig, StaticCache

import hfspec
from hfspec import Context, Draft, DraftSession, DraftSource, decode
from hfspec.budget.controller import Controller
from hfspec.draft.base import Session
from hfspec.host import architectures, releases
from tests.models import (
    PAD,
    FunctionSource,
    assert_same,
    both,
    build,
    noisy,
    plain_text,
    prompt,
    rows,
    shared,
)

NEW = {"max_new_tokens": 16}
REPEATED = torch.cat([prompt(5), prompt(5), prompt(5)], dim=-1)

#: A call for every reason to run plain: keywords, and words of the reason.
PLAIN_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "beam search"),
    "sampled beams": ({"num_beams": 2, "do_sample": True}, "beam search"),
    "an assistant": ({"assistant_model": build(seed=1)}, "assisted generation"),
    # Prompt lookup without an end-of-text token raises in vanilla 4.57.
    "prompt lookup": (
        {"prompt_lookup_num_tokens": 2, "eos_token_id": 2, "pad_token_id": PAD},
        "assisted generation",
    ),
    "states without a cache": (
        {"use_cache": False, "return_dict_in_generate": True, "output_hidden_states": True},
        "without a cache",
    ),
    "speculate=False": ({"speculate": False}, "speculate=False"),
    "a budget of 0": ({"draft_budget": 0}, "budget is 0"),
}


def plain_call(name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Vanilla's keywords, hfspec's, and the reason."""
    call, reason = PLAIN_CALLS[name]
    ours = {key: value for key, value in call.items() if key in ("speculate", "draft_budget")}
    return NEW | {key: value for key, value in call.items() if key not in ours}, ours, reason


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_what_cannot_be_sped_up_runs_plain_with_the_reason(name):
    """Each such call gives vanilla's result and random state, drafts nothing, and keeps the reason."""
    call, ours, reason = plain_call(name)
    model = build()
    torch.manual_seed(0)
    plain, state = model.generate(REPEATED, **call), torch.get_rng_state()
    with hfspec.patched(model, noisy()):
        torch.manual_seed(0)
        assert_same(plain, model.generate(REPEATED, **call, **ours))
        assert torch.equal(torch.get_rng_state(), state)
        stats = hfspec.stats(model)
    assert stats.drafted_tokens == 0
    assert reason in stats.fallback_reason
    assert stats.new_tokens == NEW["max_new_tokens"]


BATCH = torch.cat([prompt(6), prompt(6, seed=1), prompt(6, seed=2)])

#: Calls that other tools for speculative decoding refuse, or that once ran plain here.
FAST_CALLS: dict[str, tuple[torch.Tensor | None, dict[str, Any]]] = {
    "a batch": (BATCH, {}),
    "a sampled batch": (BATCH, {"do_sample": True}),
    "several sequences": (prompt(), {"num_return_sequences": 3, "do_sample": True}),
    "several sequences of a batch": (BATCH, {"num_return_sequences": 2, "do_sample": True}),
    "a batch with scores": (BATCH, {"return_dict_in_generate": True, "output_scores": True, "do_sample": True}),
    "a batch that ends by a token": (BATCH, {"eos_token_id": list(range(10, 30)), "pad_token_id": PAD}),
    "a sampled batch that ends": (BATCH, {"eos_token_id": list(range(10, 30)), "pad_token_id": PAD, "do_sample": True}),
    "a batch with a processor of the user's": (BATCH, {"repetition_penalty": 1.3, "encoder_repetition_penalty": 1.2}),
    "static cache": (prompt(), {"cache_implementation": "static", "disable_compile": True}),
    "static cache, a batch": (BATCH, {"cache_implementation": "static", "disable_compile": True}),
    "embeddings": (None, {"inputs_embeds": shared().get_input_embeddings()(prompt(6)).detach()}),
    "embeddings, a batch": (None, {"inputs_embeds": shared().get_input_embeddings()(BATCH).detach()}),
}


@pytest.mark.parametrize("name", FAST_CALLS)
def test_calls_of_every_shape_are_sped_up(name):
    """Batches, several sequences, static caches and embeddings give vanilla's result, with drafts."""
    ids, call = FAST_CALLS[name]
    pair = both(build(), noisy(), ids, NEW | call, draft_budget=3).assert_same().assert_drafted()
    num_rows = getattr(pair.fast, "sequences", pair.fast).shape[0]
    assert pair.stats.new_tokens <= num_rows * NEW["max_new_tokens"]
    is_readable = ids is not None  # a draft that has not seen the prompt is hardly ever right
    assert pair.stats.accepted_tokens > 0 or num_rows > 1 or not is_readable


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "mistral"])
def test_a_padded_batch_is_sped_up(arch, do_sample):
    """Prompts of several lengths, padded at the left, each go on at their own pace to vanilla's text."""
    model = shared(arch, attn="sdpa")
    texts = [prompt(length, seed=length) for length in (4, 11, 7)]
    ids = torch.cat([torch.nn.functional.pad(text, (11 - text.shape[1], 0), value=PAD) for text in texts])
    call = {"max_new_tokens": 40, "attention_mask": (ids != PAD).long(), "do_sample": do_sample}
    pair = both(model, noisy(arch, attn="sdpa"), ids, call, draft_budget=3).assert_same().assert_drafted()
    assert pair.stats.accepted_tokens > 0
    assert not pair.stats.lockstep_reasons


def test_why_rows_keep_in_step_is_kept():
    """A batch that somebody watches goes on row by row no more, and the reason is counted; it is no fallback."""
    pair = both(shared(), noisy(), BATCH, NEW | IN_STEP, draft_budget=3).assert_same()
    pair.assert_drafted()
    assert pair.stats.lockstep_reasons.total() == 1


def test_a_static_cache_handed_in_is_sped_up():
    """A user's static cache is filled as vanilla fills it, where forwards are not compiled for it."""

    def call() -> dict[str, Any]:
        cache = StaticCache(config=shared().config, max_cache_len=64)
        return NEW | {releases.CACHE_KEY: cache, "disable_compile": True, "return_dict_in_generate": True}

    both(shared(), noisy(), prompt(), call, draft_budget=3).assert_same().assert_drafted()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("arch", "num_rows"), [("t5", 1), ("t5", 3), ("mistral", 1), ("mistral", 3)])
def test_targets_of_other_kinds_are_sped_up(arch, num_rows, do_sample):
    """Encoder-decoder and sliding-window targets give vanilla's tokens, with drafts of their kind."""
    model, ids = shared(arch), torch.cat([prompt(12, seed=seed) for seed in range(num_rows)])
    call = {"max_new_tokens": 30, "do_sample": do_sample}
    pair = both(model, noisy(arch), ids, call, draft_budget=3).assert_same().assert_drafted()
    assert pair.stats.accepted_tokens > 0 or num_rows > 1


@pytest.mark.skipif(
    not architectures.takes_cache(MambaConfig()), reason="this release's Mamba keeps its own kind of state"
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_layers_that_forget_are_fed_token_by_token(num_rows):
    """Mamba, which starts anew when several tokens come at once, is given them one by one; so as a draft."""
    ids = torch.cat([prompt(12, seed=seed) for seed in range(num_rows)])
    both(build("mamba"), noisy("mamba"), ids, NEW, draft_budget=3).assert_same().assert_drafted()
    pair = both(build("mamba"), build("mamba"), ids, NEW, draft_budget=3).assert_same().assert_drafted()
    assert pair.stats.acceptance_rate == 1.0


def test_a_call_without_a_cache_is_sped_up():
    """Vanilla reads the whole text for every token then; a draft saves such forwards."""
    for ids in (prompt(), BATCH):
        both(shared(), noisy(), ids, NEW | {"use_cache": False}, draft_budget=3).assert_same().assert_drafted()
    call = NEW | {"use_cache": False, "return_dict_in_generate": True, "output_hidden_states": True}
    both(shared(), noisy(), prompt(), call, draft_budget=3).assert_same().assert_plain("without a cache")


def test_drafts_that_cannot_draft_run_plain():
    """Drafts that read something else leave vanilla's tokens and a reason."""
    call = NEW | {"do_sample": True}
    both(shared(), build("t5"), prompt(12), call, draft_budget=3).assert_same().assert_plain("encoder")


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_draft_with_windows_drafts(num_rows):
    """A sliding-window draft is rolled back as any other, far beyond its window."""
    ids = torch.cat([prompt(12, seed=seed) for seed in range(num_rows)])
    target = build(num_hidden_layers=2)
    target.load_state_dict(shared("mistral").state_dict())
    call = {"max_new_tokens": 40, "do_sample": True}
    both(target, shared("mistral"), ids, call, draft_budget=3).assert_same().assert_drafted()


def test_other_ways_to_decode_are_seen():
    """A loop of the user's own (`custom_generate`) is not touched, and the reason says so."""

    def own_loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.cat([input_ids, rows(5)], dim=-1)

    pair = both(shared(), noisy(), prompt(), NEW | {"custom_generate": own_loop})
    pair.assert_same().assert_plain("custom_generate")


def test_a_class_with_its_own_loop_is_left_alone():
    """A model that overrides `_sample` decodes with its own."""

    class Own(type(shared())):
        def _sample(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.cat([input_ids, rows(7)], dim=-1)

    model = build()
    model.__class__ = Own
    both(model, noisy(), prompt(), NEW).assert_same().assert_plain("loop of its own")


def test_a_patched_model_as_somebodys_assistant():
    """Hugging Face's assisted generation may use a patched model as its assistant."""
    assistant, target = build(seed=1), build()
    expected = plain_text(target, prompt(), assistant_model=assistant, **NEW)
    with hfspec.patched(assistant, noisy()):
        assert torch.equal(target.generate(prompt(), assistant_model=assistant, **NEW), expected)
        assert "assistant" in hfspec.stats(assistant).fallback_reason


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_the_environment_switches_it_off(monkeypatch, value):
    """`HFSPEC_DISABLE` runs every call plain; empty and 0 do not."""
    monkeypatch.setenv("HFSPEC_DISABLE", value)
    both(shared(), noisy(), prompt(), NEW).assert_same().assert_plain("HFSPEC_DISABLE")
    for off in ("0", ""):
        monkeypatch.setenv("HFSPEC_DISABLE", off)
        both(shared(), noisy(), prompt(), NEW, draft_budget=3).assert_same().assert_drafted()


def test_the_warning_is_given_once(caplog):
    """The same reason is logged once for a model, another reason once more, a wish never."""
    model = build()
    with hfspec.patched(model, noisy()), caplog.at_level(logging.WARNING, logger="hfspec"):
        for _ in range(3):
            model.generate(prompt(), num_beams=2, **NEW)
            model.generate(prompt(), **PLAIN_CALLS["states without a cache"][0], **NEW)
            model.generate(prompt(), speculate=False, **NEW)
        assert hfspec.stats(model).total.fallback_reasons.total() == 9
    assert sorted("beam" in record.message for record in caplog.records) == [False, True]


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_on_unsupported_raise(name):
    """With `on_unsupported="raise"` such calls are an error that says why, unless plain is what was asked for."""
    call, ours, reason = plain_call(name)
    model = build()
    with hfspec.patched(model, noisy(), on_unsupported="raise"):
        if ours:
            model.generate(REPEATED, **call, **ours)
        else:
            with pytest.raises(hfspec.UnsupportedCallError, match=reason):
                model.generate(REPEATED, **call)
        assert reason in hfspec.stats(model).fallback_reason


@pytest.mark.parametrize("first", ["raise", "warn"])
def test_on_unsupported_may_be_chosen_for_a_call(first):
    """The call's own word wins over the patch's, for that call alone."""
    second = {"raise": "warn", "warn": "raise"}[first]
    with hfspec.patched(shared(), noisy(), on_unsupported=first):
        for word, option in ((first, {}), (second, {"on_unsupported": second}), (first, {})):
            if word == "warn":
                shared().generate(prompt(), num_beams=2, **NEW, **option)
            else:
                with pytest.raises(hfspec.UnsupportedCallError, match="beam search"):
                    shared().generate(prompt(), num_beams=2, **NEW, **option)


def test_the_loop_may_be_called_by_itself():
    """`_sample`, called directly with the host's arguments, is a call of its own."""
    model, seen = build(), []
    base = type(model)

    class Spied(base):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((args, kwargs))
            return super()._sample(*args, **kwargs)

    model.__class__ = Spied
    model.generate(prompt(), **NEW)
    model.__class__ = base
    args, kwargs = seen[0]
    kwargs[releases.CACHE_KEY].crop(-kwargs[releases.CACHE_KEY].get_seq_length())
    ordered = [kwargs.pop(name) for name in ("logits_processor", "stopping_criteria", "generation_config")]
    with hfspec.patched(model, noisy(), draft_budget=3), torch.no_grad():
        assert torch.equal(model._sample(*args, *ordered, **kwargs), plain_text(shared(), prompt(), **NEW))
        assert hfspec.stats(model).last.drafted_tokens > 0


@pytest.mark.parametrize("budget", ["auto", 3, "ratio", hfspec.DraftBudget(min_tokens=2)], ids=str)
def test_a_text_beyond_the_targets_positions_goes_on_plain(budget):
    """Where vanilla writes past `max_position_embeddings` (RoPE can), so does a patched model, without drafts there."""
    model = build(max_position_embeddings=20)
    both(model, noisy(), prompt(), {"max_new_tokens": 40, "eos_token_id": None}, draft_budget=budget).assert_same()


# Rows of a batch


class Watching(DraftSource, DraftSession):
    """Notes which row each session is for, how its text grows and when it is stopped."""

    def __init__(self, row: int = -1, log: list[Any] | None = None) -> None:
        self.row, self.log = row, [] if log is None else log

    def start(self, context: Context) -> DraftSession:
        return Watching(context.row, self.log)

    def propose(self, input_ids: torch.Tensor, budget: Any) -> Draft:
        self.log.append((self.row, input_ids.shape[1]))
        return Draft(rows(*[5 + self.row] * min(self.row + 1, budget.num_tokens)))

    def stop(self) -> None:
        self.log.append((self.row, "stop"))


def test_rows_that_end_are_not_drafted_for_any_more():
    """Each row has a session of its own, which is stopped when its row ends, once."""
    texts = plain_text(shared(), BATCH, max_new_tokens=12)
    eos = int(texts[1, 6 + 3])
    call = {"max_new_tokens": 12, "eos_token_id": eos, "pad_token_id": PAD}
    source = Watching()
    both(shared(), source, BATCH, call, draft_budget=4).assert_same().assert_drafted()
    by_row = [[what for row, what in source.log if row == each] for each in range(3)]
    assert all(log.count("stop") == 1 and log[-1] == "stop" for log in by_row)
    assert max(length for length in by_row[1][:-1]) <= 6 + 4
    assert len(by_row[0]) > len(by_row[1])


def test_drafts_of_several_lengths_are_verified_together():
    """Rows may be proposed different numbers of tokens, none included; each is judged by its own."""
    texts = plain_text(shared(), BATCH, **NEW)

    class Uneven(Watching):
        def start(self, context: Context) -> DraftSession:
            return Uneven(context.row)

        def propose(self, input_ids: torch.Tensor, budget: Any) -> Draft:
            at = input_ids.shape[1]
            return Draft(texts[self.row : self.row + 1, at : at + 2 * self.row])

    pair = both(shared(), Uneven(), BATCH, NEW, draft_budget=4).assert_same().assert_drafted()
    assert pair.stats.acceptance_rate == 1.0
    assert set(pair.stats.budget_histogram) >= {4}


#: Makes rows keep in step.
IN_STEP = {"return_dict_in_generate": True, "output_hidden_states": True}


def test_what_rows_in_step_bring_is_remembered_apart(monkeypatch):
    """They go on only where all of them accept: that says nothing of rows at their own paces, nor of a single one."""
    remembered = []

    class Noted(Controller):
        def __init__(self, budget: Any, experience: Any, **kwargs: Any) -> None:
            remembered.append(experience)
            super().__init__(budget, experience, **kwargs)

    monkeypatch.setattr(decode, "Controller", Noted)
    with hfspec.patched(shared(), noisy()):
        shared().generate(prompt(), **NEW)
        shared().generate(BATCH, **NEW)
        shared().generate(BATCH, **NEW, **IN_STEP)
        shared().generate(BATCH, **NEW, **IN_STEP)
    one, own_pace, in_step, in_step_again = remembered
    assert one is own_pace
    assert in_step is in_step_again
    assert in_step is not one


class Asked(DraftSource, Session):
    """Notes whether it is asked how sure it is while it drafts."""

    def __init__(self) -> None:
        self.reads_confidence: set[bool] = set()

    def start(self, context: Context) -> DraftSession:
        raise AssertionError("all rows are started together")

    def start_batch(self, call: Any) -> Session:
        return self

    def propose(self, texts: Any, budget: Any) -> Draft:
        self.reads_confidence.add(budget.reads_confidence)
        num_rows = len(texts.rows)
        return Draft(torch.full((num_rows, 1), 5), confidences=torch.full((num_rows, 1), 0.9))

    def read(self, texts: Any, outcomes: Any) -> None:
        pass

    def select(self, indices: Any) -> None:
        pass

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(("call", "is_asked"), [({}, True), (IN_STEP, False)], ids=["own paces", "in step"])
def test_rows_in_step_are_not_asked_how_sure_they_are(call, is_asked):
    """The one that is least sure decides for all of them, which no mean over the rows foresees: lengths are planned."""
    source = Asked()
    both(shared(), source, BATCH, NEW | call).assert_same().assert_drafted()
    assert source.reads_confidence == {is_asked}


@pytest.mark.parametrize(("budget", "is_plain"), [("auto", True), (3, False)])
def test_processes_that_share_a_model_must_choose_alike(budget, is_plain):
    """Tensor parallel: what each process would measure may differ, a fixed number does not."""
    model = build()
    model._tp_size = 2  # as the host notes it; the layers are whole here
    pair = both(model, noisy(), prompt(), NEW, draft_budget=budget).assert_same()
    pair.assert_plain("tensor parallel") if is_plain else pair.assert_drafted()


def test_a_source_that_goes_on_failing_is_paused():
    """From the second failure on it is tried after 1, 2, 4, … plain calls, which keep the reason; a draft ends that."""
    tries, is_broken = [], True

    def propose(input_ids, budget, number):
        tries.append(number)
        if is_broken:
            raise RuntimeError("no drafts today")
        return Draft(rows(5))

    source = FunctionSource(propose)
    model = hfspec.patch(build(), source, draft_budget=2, on_unsupported="raise")
    expected = plain_text(build(), prompt(), **NEW)

    def is_tried() -> bool:
        before = len(tries)
        assert torch.equal(model.generate(prompt(), **NEW), expected)
        return len(tries) > before

    assert [is_tried() for _ in range(13)] == [n in (0, 1, 3, 6, 11) for n in range(13)]
    reason = hfspec.stats(model).last.fallback_reason
    assert "no drafts today" in reason
    assert "tried again in 7 calls" in reason or "tried again in 8 calls" in reason
    is_broken = False
    assert [is_tried() for _ in range(9)] == [n >= 7 for n in range(9)]
    assert hfspec.stats(model).last.fallback_reason is None


def test_a_pause_is_of_one_source_alone():
    """Another source that a call names drafts as ever."""

    def fail(input_ids, budget, number):
        raise RuntimeError

    model = hfspec.patch(build(), FunctionSource(fail), draft_budget=2)
    model.generate(prompt(), **NEW)
    model.generate(prompt(), draft=noisy(), **NEW)
    assert hfspec.stats(model).last.drafted_tokens > 0
