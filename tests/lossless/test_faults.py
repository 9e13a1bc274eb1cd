"""Whatever goes wrong: a draft's fault costs speed alone, a user's error is the user's, and nothing stays broken."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StaticCache, StoppingCriteria
from transformers.cache_utils import StaticLayer

import hfspec
from hfspec import Context, Draft, DraftSession, DraftSource, Outcome, Outcomes, RoundBudget, Texts
from hfspec.draft.base import CallView, Session
from hfspec.draft.shape import joined
from hfspec.host import caches, releases
from hfspec.patch import is_patched
from tests.models import (
    RECURRENT,
    VOCAB,
    OnForward,
    assert_same_cache,
    build,
    noisy,
    prompt,
    prompts,
    shared,
)

NEW = {"max_new_tokens": 18}
MODES = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 1.2}}


class BrokenError(Exception):
    """What the sources and the user's objects below raise."""


def inputs_of(num_rows: int) -> dict[str, torch.Tensor]:
    """One prompt, or several of other lengths."""
    return {"input_ids": prompt(6)} if num_rows == 1 else prompts(*(6, 3, 5)[:num_rows])


def model_for(num_rows: int) -> Any:
    return build(attn="sdpa" if num_rows > 1 else "eager")


def written_by(model: Any, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A seeded call's text, and the random state behind it."""
    torch.manual_seed(0)
    return model.generate(**call), torch.get_rng_state()


# Faults of a draft source


class Faulty(DraftSource):
    """Proposes what vanilla writes, two tokens at a time, but for one fault, in one call of one method.

    Args:
        text: vanilla's `[rows, length]`.
        method: where the fault is.
        number: which call of that method is at fault, counted over all sessions.
        fault: what happens there: raises, or returns something else than what it is given.
        is_batch: whether the rows have one session.
    """

    def __init__(
        self, text: torch.Tensor, method: str, number: int, fault: Callable[[Any], Any], is_batch: bool
    ) -> None:
        self.text, self.method, self.number, self.fault, self.is_batch = text, method, number, fault, is_batch
        self.num_calls = 0
        self.sessions: list[_Session] = []

    def at(self, method: str, right: Any = None) -> Any:
        if method != self.method:
            return right
        self.num_calls += 1
        return self.fault(right) if self.num_calls == self.number else right

    def start(self, context: Context) -> DraftSession:
        session = self.at("start", _OneRow(self, [context.row]))
        self.sessions.append(session)
        return session

    def start_batch(self, call: CallView) -> Session:
        if not self.is_batch:
            return super().start_batch(call)
        session = self.at("start", _AllRows(self, [context.row for context in call.contexts]))
        self.sessions.append(session)
        return session


class _Session:
    def __init__(self, source: Faulty, rows: list[int]) -> None:
        self.source, self.rows = source, rows
        self.num_stops = 0

    def draft(self, row: int, text: torch.Tensor, budget: RoundBudget) -> Draft:
        at = text.shape[1]
        return Draft(self.source.text[row : row + 1, at : at + min(2, budget.num_tokens)])

    def stop(self) -> None:
        self.num_stops += 1
        self.source.at("stop")


class _OneRow(_Session, DraftSession):
    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Any:
        return self.source.at("propose", self.draft(self.rows[0], input_ids, budget))

    def observe(self, outcome: Outcome) -> None:
        self.source.at("observe")


class _AllRows(_Session, Session):
    def propose(self, texts: Texts, budget: RoundBudget) -> Any:
        drafts = [self.draft(row, texts.of(index), budget) for index, row in enumerate(self.rows)]
        return self.source.at("propose", joined(drafts))

    def read(self, texts: Texts, outcomes: Outcomes) -> None:
        self.source.at("observe")

    def select(self, rows: Sequence[int]) -> None:
        self.source.at("select")
        self.rows = [self.rows[row] for row in rows]


def raises(error: BaseException) -> Callable[[Any], Any]:
    def fault(right: Any) -> Any:
        raise error

    return fault


def check_fault(
    method: str,
    number: int,
    fault: Callable[[Any], Any],
    num_rows: int,
    is_batch: bool = False,
    options: dict[str, Any] | None = None,
    word: str = "",
) -> hfspec.Metrics:
    """Two calls with a source at fault in the first: vanilla's texts and random state, one reason, then drafts again.

    Returns:
        The first call's counts.
    """
    model, call = model_for(num_rows), inputs_of(num_rows) | NEW | (options or {})
    expected, state = written_by(model, call)
    source = Faulty(expected, method, number, fault, is_batch)
    with hfspec.patched(model, source, draft_budget=3):
        first, first_state = written_by(model, call)
        counts = hfspec.stats(model).last
        assert source.num_calls >= number, "the control: the fault must have happened"
        assert torch.equal(first, expected)
        assert torch.equal(first_state, state), "the random state differs from vanilla's"
        if word:
            assert list(counts.fallback_reasons.values()) == [1]
            assert word in next(iter(counts.fallback_reasons))
        second, second_state = written_by(model, call)
        again = hfspec.stats(model).last
    assert torch.equal(second, expected)
    assert torch.equal(second_state, state)
    assert again.accepted_tokens > 0, "the fault outlived its call"
    assert not again.fallback_reasons
    return counts


ERRORS: dict[str, BaseException] = {
    "an exception": BrokenError("by the draft"),
    "MemoryError": MemoryError(),
    "OutOfMemoryError": torch.OutOfMemoryError("CUDA out of memory"),
    "RecursionError": RecursionError("too deep"),
    "StopIteration": StopIteration(),
    "AssertionError": AssertionError(),
}
KINDS = [(1, False), (3, False), (3, True)]
KIND_NAMES = ["one row", "rows by themselves", "rows together"]
by_kind = pytest.mark.parametrize(("num_rows", "is_batch"), KINDS, ids=KIND_NAMES)


@by_kind
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(1, 6))
def test_a_source_that_raises_in_any_round(number, mode, num_rows, is_batch, caplog):
    """The rest of the call is plain, its text vanilla's, the reason counted and logged once; the next call drafts."""
    with caplog.at_level(logging.WARNING, logger="hfspec"):
        counts = check_fault(
            "propose", number, raises(BrokenError("by the draft")), num_rows, is_batch, MODES[mode], "BrokenError"
        )
    assert counts.rounds == (number - 1 if num_rows == 1 or is_batch else (number - 1) // num_rows)
    assert len(caplog.records) == 1


@by_kind
@pytest.mark.parametrize("error", ERRORS)
def test_any_error_of_a_source(error, num_rows, is_batch):
    """Out of memory is an error like any other, and so are those that Python itself reads as signals."""
    check_fault("propose", 2, raises(ERRORS[error]), num_rows, is_batch, word=type(ERRORS[error]).__name__)


@by_kind
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("method", ["start", "observe", "stop", "select"])
def test_the_other_methods_of_a_source_may_fail(method, number, num_rows, is_batch):
    """`start`, `observe`, `stop` and `select` too."""
    has_two = method in ("observe", "select") or (num_rows > 1 and not is_batch)
    if (number > 1 and not has_two) or (method == "select" and not is_batch):
        pytest.skip("there is no such call")
    options: dict[str, Any] = {}
    if method == "select":  # rows leave one by one as they reach a token of theirs
        text, _ = written_by(model_for(num_rows), inputs_of(num_rows) | NEW)
        options = {"eos_token_id": [int(text[0, 6 + 3]), int(text[1, 6 + 7])], "pad_token_id": 0}
    check_fault(method, number, raises(BrokenError(method)), num_rows, is_batch, options, "BrokenError")


@pytest.mark.parametrize("method", ["propose", "observe", "stop"])
def test_every_session_is_stopped_once_whatever_another_does(method):
    """A source that fails in one row lets go of what it holds for the others."""
    model, call = model_for(3), inputs_of(3) | NEW
    expected, _ = written_by(model, call)
    source = Faulty(expected, method, 1, raises(BrokenError(method)), is_batch=False)
    with hfspec.patched(model, source, draft_budget=3):
        model.generate(**call)
    assert [session.num_stops for session in source.sessions] == [1, 1, 1]


@pytest.mark.parametrize("number", [2, 3])
def test_sessions_begun_before_one_that_cannot_begin_are_stopped(number):
    """Rows already started are stopped where a later row's `start` fails."""
    model, call = model_for(3), inputs_of(3) | NEW
    expected, _ = written_by(model, call)
    source = Faulty(expected, "start", number, raises(BrokenError("start")), is_batch=False)
    with hfspec.patched(model, source, draft_budget=3):
        model.generate(**call)
    assert [session.num_stops for session in source.sessions] == [1] * (number - 1)


def with_ids(make: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    return lambda draft: Draft(make(draft.token_ids))


def with_law(value: Any) -> Callable[[Any], Any]:
    """A fault that hands over `value` `[tokens, vocab]` as the law of each row."""

    def fault(draft: Draft) -> Draft:
        is_whole = draft.num_rows > 1 and isinstance(value, torch.Tensor)
        return Draft(draft.token_ids, probs=value.expand(draft.num_rows, -1, -1) if is_whole else value)

    return fault


def with_confidences(*confidences: Any) -> Callable[[Any], Any]:
    def fault(draft: Draft) -> Draft:
        is_whole = draft.num_rows > 1 and all(isinstance(each, float) for each in confidences)
        whole = torch.tensor([confidences] * draft.num_rows) if is_whole else confidences
        return Draft(draft.token_ids, confidences=whole)

    return fault


NAN, INF = float("nan"), float("inf")
#: Rubbish for a draft of two right tokens, and words of the reason (none: it may be taken as a draft).
RUBBISH: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda draft: None, "NoneType"),
    "ids alone": (lambda draft: draft.token_ids, "Tensor"),
    "a list of ids": (with_ids(lambda ids: ids.tolist()), "Draft"),
    "one dimension": (with_ids(lambda ids: ids[0]), "shape"),
    "three dimensions": (with_ids(lambda ids: ids[None]), "shape"),
    "twice the rows": (with_ids(lambda ids: torch.cat([ids, ids])), "shape"),
    "no rows": (with_ids(lambda ids: ids[:0]), "shape"),
    "int32": (with_ids(lambda ids: ids.int()), "int32"),
    "floats": (with_ids(lambda ids: ids.double()), "float64"),
    "bools": (with_ids(lambda ids: ids.bool()), "bool"),
    "too many": (with_ids(lambda ids: torch.cat([ids, ids], dim=-1)), "at most"),
    "a negative id": (with_ids(lambda ids: torch.full_like(ids, -1 if len(ids) == 1 else -2)), "vocabulary"),
    "an id too large": (with_ids(lambda ids: torch.full_like(ids, VOCAB)), "vocabulary"),
    "a huge id": (with_ids(lambda ids: ids + 2**62), "vocabulary"),
    "ids without memory": (with_ids(lambda ids: ids.to("meta")), ""),
    "sparse ids": (with_ids(lambda ids: ids.to_sparse()), ""),
    "nan as a law": (with_law(torch.full((2, VOCAB), NAN)), "distribution"),
    "a law for one token": (with_law(torch.full((1, VOCAB), 1 / VOCAB)), "shape"),
    "a law over other tokens": (with_law(torch.full((2, 5), 0.2)), "shape"),
    "a law with a negative part": (
        with_law(torch.tensor([2.0, -1.0] + [0.0] * (VOCAB - 2)).expand(2, -1)),
        "distribution",
    ),
    "a list as a law": (with_law([0.5, 0.5]), ""),
    "one confidence": (with_confidences(0.5), "confidences"),
    "words as confidences": (with_confidences("a", "b"), "confidences"),
    "nan as confidence": (with_confidences(NAN, NAN), "confidences"),
    "infinite confidences": (with_confidences(INF, -INF), "confidences"),
    "confidences beyond 0 and 1": (with_confidences(7.0, -3e9), ""),
    "no confidences": (lambda draft: Draft(draft.token_ids, confidences=None), ""),
    "parents before the root": (lambda draft: replace(draft, parents=draft.token_ids * 0 - 2), "parent"),
    "parents behind their nodes": (lambda draft: replace(draft, parents=draft.token_ids * 0 + 1), "parent"),
    "lengths beyond the ids": (lambda draft: replace(draft, lengths=(99,) * draft.num_rows), "lengths"),
    "negative lengths": (lambda draft: replace(draft, lengths=(-1,) * draft.num_rows), "lengths"),
    "words as lengths": (lambda draft: replace(draft, lengths=("a",) * draft.num_rows), "lengths"),
    "a number as lengths": (lambda draft: replace(draft, lengths=2), "lengths"),
    "lengths of more rows": (lambda draft: replace(draft, lengths=(2,) * (draft.num_rows + 1)), "lengths"),
    "lengths below the ids": (lambda draft: replace(draft, lengths=(1,) * draft.num_rows), ""),
    "another depth": (lambda draft: replace(draft, depth=-3), ""),
    "a word as depth": (lambda draft: replace(draft, parents=draft.token_ids * 0 - 1, depth="deep"), ""),
    "complex confidences": (lambda draft: replace(draft, confidences=draft.token_ids * 1j), "confidences"),
    "parents elsewhere": (lambda draft: replace(draft, parents=draft.token_ids.to("meta")), "parents"),
    "one parent": (lambda draft: replace(draft, parents=draft.token_ids[:, :1] * 0 - 1), "parents"),
}


@pytest.mark.parametrize(("num_rows", "is_batch"), [(1, False), (3, True)], ids=["one row", "rows together"])
@pytest.mark.parametrize("kind", RUBBISH)
def test_a_source_that_returns_rubbish(kind, num_rows, is_batch):
    """Anything but a draft within the budget ends drafting; what spoils a measurement alone may pass; the text stays.

    The next calls draft again, whatever the budget goes by: no measurement was spoilt for good.
    """
    fault, words = RUBBISH[kind]
    budget = hfspec.DraftBudget(min_tokens=2, max_tokens=3, policy="measured")
    check_fault("propose", 2, fault, num_rows, is_batch, word=words)
    model, call = model_for(num_rows), inputs_of(num_rows) | NEW
    expected, _ = written_by(model, call)
    source = Faulty(expected, "propose", 2, fault, is_batch)
    with hfspec.patched(model, source, draft_budget=budget):
        for _ in range(2):
            assert torch.equal(model.generate(**call), expected)
        assert hfspec.stats(model).last.accepted_tokens > 0
        for name, value in vars(hfspec.stats(model).total).items():
            assert not (isinstance(value, float) and value != value), f"{name} is nan"


def cut_to(rows: slice) -> Callable[[Draft], Any]:
    return lambda draft: Draft(draft.token_ids[rows])


COUNTS: dict[str, Callable[[Draft], Any]] = {
    "none": lambda draft: None,
    "an empty list": lambda draft: [],
    "one less": cut_to(slice(None, -1)),
    "one more": lambda draft: Draft(torch.cat([draft.token_ids, draft.token_ids[:1]])),
    "a list of the rows'": lambda draft: [draft.of_row(row) for row in range(draft.num_rows)],
    "a dict": lambda draft: {0: draft},
    "a tensor": lambda draft: draft.token_ids[:, :1],
}


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_batch_session_with_a_wrong_number_of_drafts(kind, num_rows):
    """There is one draft for each row, or no drafting any more."""
    check_fault("propose", 2, COUNTS[kind], num_rows, is_batch=True, word="the draft source stopped")


#: What a session may do to the texts that it is shown.
WRITES: dict[str, Callable[[Texts], Any]] = {
    "into a text": lambda texts: texts.of(0).fill_(3),
    "into what comes last": lambda texts: texts.last([2] * len(texts.rows)).fill_(3),
    "a token more": lambda texts: texts.append(torch.full((len(texts.rows),), 3)),
    "no lengths": lambda texts: texts.lengths.clear(),
    "into the ends": lambda texts: texts.ends(texts.device).fill_(0),
    "all ended": lambda texts: texts.has_ended.__setitem__(0, True),
    "fewer rows": lambda texts: texts.select([0]),
}


@pytest.mark.parametrize("method", ["propose", "read"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_session_may_do_to_texts_what_it_likes(num_rows, write, method):
    """What it is shown is a copy: the call's own text goes on as vanilla's."""

    class Writes(_AllRows):
        def propose(self, texts: Texts, budget: RoundBudget) -> Any:
            draft = super().propose(texts, budget)
            if self.is_writing and len(self.rows) > 1:  # rows that differ in length
                draft.token_ids[0] = 0
            return self.written(texts, draft, "propose")

        def read(self, texts: Texts, outcomes: Outcomes) -> None:
            super().read(texts, outcomes)
            self.written(texts, None, "read")

        def written(self, texts: Texts, result: Any, where: str) -> Any:
            if self.is_writing and where == method:
                WRITES[write](texts)
            return result

        is_writing = False

    def fault(right: _AllRows) -> Writes:
        session = Writes(right.source, right.rows)
        session.is_writing = True
        return session

    check_fault("start", 1, fault, num_rows, is_batch=True)


@pytest.mark.parametrize("count", [None, "many", NAN, -(10**9)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_session_with_a_wrong_count_of_what_it_read(num_rows, count):
    """What it says that it has read first is a count, or it drafts no more."""

    def fault(right: _AllRows) -> _AllRows:
        right.caught_up = count
        return right

    check_fault("start", 1, fault, num_rows, is_batch=True, word="a count is needed")


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_may_have_drafts_of_any_length(num_rows):
    """-1 stands where a row has no such token, behind its last."""

    def shorter(draft: Draft) -> Draft:
        ids = draft.token_ids.clone()
        ids[1:2, 1:] = -1
        ids[2:, :] = -1
        return Draft(ids)

    counts = check_fault("propose", 2, shorter, num_rows, is_batch=True)
    assert not counts.fallback_reasons


def test_a_session_that_is_none_is_a_failure():
    """A source that starts nothing drafts nothing."""
    for num_rows, is_batch in KINDS:
        check_fault("start", 1, lambda right: None, num_rows, is_batch, word="the draft source stopped")


@pytest.mark.parametrize("selection", ["seeded", "rejection"])
@pytest.mark.parametrize("law", [0.0, -1.0, NAN, INF], ids=str)
def test_a_law_that_is_none_ends_drafting(law, selection):
    """Where laws decide what is accepted, one that is no law is never used: the draft might as well have raised."""
    model, call = build(), {"input_ids": prompt(6), "do_sample": True} | NEW
    expected, _ = written_by(model, call)

    def outcome_of(fault: Callable[[Any], Any], words: str) -> tuple[torch.Tensor, torch.Tensor]:
        source = Faulty(expected, "propose", 2, fault, is_batch=False)
        with hfspec.patched(model, source, draft_budget=3, acceptance=selection):
            text, state = written_by(model, call)
            (reason,) = hfspec.stats(model).last.fallback_reasons
        assert words in reason
        return text, state

    text, state = outcome_of(with_law(torch.full((2, VOCAB), law)), "not a distribution")
    without, state_without = outcome_of(raises(BrokenError()), "BrokenError")
    assert torch.equal(text, without)
    assert torch.equal(state, state_without)
    assert selection == "rejection" or torch.equal(text, expected)


# Interrupts


@by_kind
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["start", "propose", "observe", "stop"])
@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_draft_ends_the_call(signal, method, mode, num_rows, is_batch):
    """It passes through as it is; every session is stopped; the model is patched, and the next call right."""
    model, call = model_for(num_rows), inputs_of(num_rows) | NEW | MODES[mode]
    expected, state = written_by(model, call)
    source = Faulty(expected, method, 1, raises(signal("by hand")), is_batch)
    with hfspec.patched(model, source, draft_budget=3):
        with pytest.raises(signal, match="by hand"):
            model.generate(**call)
        assert is_patched(model)
        assert hfspec.stats(model).fallback_reason is None
        if method != "start":
            assert all(session.num_stops == 1 for session in source.sessions) or method == "stop"
        again, again_state = written_by(model, call)
        assert hfspec.stats(model).total.calls == 2
        assert hfspec.stats(model).last.accepted_tokens > 0
    assert torch.equal(again, expected)
    assert torch.equal(again_state, state)


def test_an_interrupted_draft_has_moved_no_random_number():
    """What a source drew before it was interrupted is given back: the state is vanilla's after so many tokens."""

    class Draws(DraftSource, DraftSession):
        may_draw = True

        def start(self, context: Context) -> DraftSession:
            return self

        def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
            torch.rand(100)
            if input_ids.shape[1] >= 9:
                raise KeyboardInterrupt
            return Draft(torch.tensor([[5]]))

    model = build()
    call = {"input_ids": prompt(6), "do_sample": True}
    with hfspec.patched(model, Draws(), draft_budget=1), pytest.raises(KeyboardInterrupt):
        written_by(model, call | NEW)
    state = torch.get_rng_state()
    written = [written_by(model, call | {"max_new_tokens": num})[1] for num in (3, 4)]
    assert any(torch.equal(state, each) for each in written)


# Errors of the user's own objects


class Raising(LogitsProcessor, StoppingCriteria):
    """Processor, criterion or streamer that raises at its n-th call, and keeps what text it saw last."""

    def __init__(self, kind: str, number: int, error: BaseException) -> None:
        self._kind, self._number, self._error = kind, number, error
        self.num_calls = 0
        self.num_ends = 0

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls == self._number:
            raise self._error

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self._count()
        return scores if self._kind == "processor" else torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value: torch.Tensor) -> None:
        self._count()

    def end(self) -> None:
        self.num_ends += 1
        if self._kind == "streamer's end":
            raise self._error

    def keyword(self) -> dict[str, Any]:
        name = {"processor": "logits_processor", "criterion": "stopping_criteria"}.get(self._kind, "streamer")
        return {name: self if name == "streamer" else [self]}


USER_ERRORS = (BrokenError, KeyboardInterrupt, MemoryError, StopIteration)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["processor", "criterion", "streamer", "streamer's end"])
def test_an_error_of_the_users_objects(kind, number, num_rows, mode):
    """It reaches the user as it was raised, with the random state, the calls and the end that vanilla has there."""
    if kind == "streamer's end" and number > 1:
        pytest.skip("it ends once")
    model, call = model_for(num_rows), inputs_of(num_rows) | NEW | MODES[mode]
    expected, state = written_by(model, call)
    number = 99 if kind == "streamer's end" else number
    error = USER_ERRORS[number % 4]("by the user")

    def fail() -> tuple[Raising, torch.Tensor]:
        raising = Raising(kind, number, error)
        with pytest.raises(type(error)) as raised:
            written_by(model, call | raising.keyword())
        assert raised.value is error
        return raising, torch.get_rng_state()

    plain, plain_state = fail()
    with hfspec.patched(model, noisy(attn="sdpa" if num_rows > 1 else "eager"), draft_budget=4):
        fast, fast_state = fail()
        assert torch.equal(plain_state, fast_state), "the random state differs from vanilla's"
        assert (fast.num_calls, fast.num_ends) == (plain.num_calls, plain.num_ends)
        assert is_patched(model)
        assert hfspec.stats(model).last.fallback_reason is None
        again, again_state = written_by(model, call)
        assert hfspec.stats(model).total.calls == 2
        assert hfspec.stats(model).last.accepted_tokens > 0
    assert torch.equal(again, expected)
    assert torch.equal(again_state, state)
    assert torch.equal(written_by(model, call)[0], expected)


#: Static layers can forget their last tokens in some releases only.
CROPS_STATIC = StaticLayer in caches.CROPPABLE_LAYERS
CACHES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dynamic": ("llama", lambda model: DynamicCache()),
    "made for the model": ("llama", lambda model: DynamicCache(config=model.config)),
    "static": ("llama", lambda model: StaticCache(config=model.config, max_cache_len=64)),
    "windows": ("mistral", lambda model: DynamicCache(config=model.config)),
    "static windows": ("mistral", lambda model: StaticCache(config=model.config, max_cache_len=64)),
    "windows and full": ("gemma3", lambda model: DynamicCache(config=model.config)),
} | {arch: (arch, lambda model: DynamicCache(config=model.config)) for arch in RECURRENT}


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["criterion", "streamer"])
@pytest.mark.parametrize("name", ["dynamic", "made for the model", *(["static"] if CROPS_STATIC else [])])
def test_an_error_leaves_the_users_cache_where_vanilla_leaves_it(name, kind, num_rows):
    """At the text without its last token, whatever was read ahead, for every cache that can forget at will."""
    arch, make = CACHES[name]
    model = shared(arch)
    ids = prompt(6).expand(num_rows, -1)
    for number in range(2, 8):
        caches = make(model), make(model)
        for cache, is_fast in zip(caches, (False, True), strict=True):
            raising = Raising(kind, number, BrokenError("by the user"))
            call = {releases.CACHE_KEY: cache, "disable_compile": True, "max_new_tokens": 14}
            with patched_or_not(model, arch, is_fast), pytest.raises(BrokenError):
                model.generate(ids, **call, **raising.keyword())
        plain, fast = caches
        assert_same_cache(plain, fast)


def patched_or_not(model: Any, arch: str, is_fast: bool) -> Any:
    return hfspec.patched(model, shared(arch), draft_budget=4) if is_fast else nullcontext()


@pytest.mark.parametrize("name", [name for name in CACHES if name != "mamba2"])
def test_the_next_turn_after_an_error_is_vanillas(name):
    """A client that hung up comes back with the same cache, and the text so far.

    Where a cache cannot forget single tokens (recurrent, or windows that are full) it has read less than vanilla's,
    and the next turn reads that again; only Mamba's does not know how much it has read.
    """
    arch, make = CACHES[name]
    model, ids = shared(arch), prompt(6)
    for number in range(2, 8):
        texts = []
        for is_fast in (False, True):
            cache = make(model)
            seen: list[torch.Tensor] = []

            class Notes(StoppingCriteria):
                def __call__(self, input_ids: torch.Tensor, scores: Any, seen: Any = seen) -> torch.Tensor:
                    seen.append(input_ids)
                    return torch.zeros(1, dtype=torch.bool)

            raising = Raising("criterion", number, BrokenError("by the user"))
            call = {releases.CACHE_KEY: cache, "disable_compile": True, "max_new_tokens": 14}
            with patched_or_not(model, arch, is_fast):
                with pytest.raises(BrokenError):
                    model.generate(ids, stopping_criteria=[Notes(), raising], **call)
                texts.append(model.generate(seen[-1], **call))
        assert torch.equal(*texts)


# Errors of the target


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 6))
def test_an_error_of_the_target_passes_through(number, where, num_rows, mode):
    """What the target's own n-th forward raises is the user's to see; the model works on without it."""
    model, call = model_for(num_rows), inputs_of(num_rows) | NEW | MODES[mode]
    expected, state = written_by(model, call)
    error, num_forwards = BrokenError("in the target"), [0]

    def fail(*args: Any) -> None:
        num_forwards[0] += 1
        if num_forwards[0] == number:
            raise error

    with hfspec.patched(model, noisy(attn="sdpa" if num_rows > 1 else "eager"), draft_budget=2):
        hook = OnForward(model, **{where: fail})
        with pytest.raises(BrokenError) as raised:
            written_by(model, call)
        hook.remove()
        assert raised.value is error
        assert hfspec.stats(model).last.fallback_reason is None
        again, again_state = written_by(model, call)
        assert hfspec.stats(model).last.accepted_tokens > 0
    assert torch.equal(again, expected)
    assert torch.equal(again_state, state)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("name", ["dynamic", "static", "windows"])
def test_an_error_of_the_target_leaves_nothing_foreign_in_the_users_cache(name, where):
    """After a forward that failed, the user's cache holds the text, and no draft tokens behind it."""
    arch, make = CACHES[name]
    model, ids = shared(arch), prompt(6)
    text = model.generate(ids, max_new_tokens=14)
    for number in range(2, 5):
        cache, num_forwards = make(model), [0]

        def fail(*args: Any, num_forwards: Any = num_forwards, number: int = number) -> None:
            num_forwards[0] += 1
            if num_forwards[0] == number:
                raise BrokenError

        hook = OnForward(model, **{where: fail})
        wrong = Faulty((text + 1) % VOCAB, "", 0, raises(BrokenError()), is_batch=False)
        call = {releases.CACHE_KEY: cache, "disable_compile": True, "max_new_tokens": 14}
        try:
            with hfspec.patched(model, wrong, draft_budget=2), pytest.raises(BrokenError):
                model.generate(ids, **call)
        finally:
            hook.remove()
        assert int(cache.get_seq_length()) <= 6 + number - 1
        # The next turn reads on from there.
        written = text[:, : 6 + number - 1]
        more = model.generate(torch.cat([written, prompt(3, seed=4)], dim=-1), **call)
        assert torch.equal(more, model.generate(torch.cat([written, prompt(3, seed=4)], dim=-1), max_new_tokens=14))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_error_of_a_target_without_a_cache_passes_through(num_rows):
    """Nothing has to be taken back there, and the error that reaches the caller is the target's own."""
    model, num_forwards = build(), 0

    def failing(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 4:
            raise ConnectionError("the target")

    hook = OnForward(model, before=failing)
    ids = torch.cat([prompt(seed=seed) for seed in range(num_rows)])
    with hfspec.patched(model, noisy(), draft_budget=3):
        with pytest.raises(ConnectionError, match="the target"):
            model.generate(ids, use_cache=False, max_new_tokens=20)
        hook.remove()
        text = model.generate(ids, use_cache=False, **NEW)
    assert torch.equal(text, build().generate(ids, use_cache=False, **NEW))
