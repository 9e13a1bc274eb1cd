"""The protocol: what a source of the user's own may be, and what it is told."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

import hfspec
from hfspec import CallView, Context, Draft, DraftSession, DraftSource, RoundBudget
from hfspec.draft.guard import Guard
from hfspec.rounds import Outcomes
from hfspec.sampling.noise import BatchNoise
from tests.models import PAD, VOCAB, FunctionSource, both, noisy, plain_text, prompt, rows, shared
from tests.rounds import outcome, uneven

NEW = {"max_new_tokens": 12}


class Listening(DraftSource, DraftSession):
    """Notes all it is told, and proposes one token."""

    def __init__(self):
        self.contexts, self.texts, self.budgets, self.outcomes, self.num_stops = [], [], [], [], 0

    def start(self, context: Context) -> DraftSession:
        self.contexts.append(context)
        return self

    def propose(self, input_ids, budget):
        self.texts.append(input_ids.clone())
        self.budgets.append(budget.num_tokens)
        return Draft(rows(5))

    def observe(self, outcome):
        self.outcomes.append(outcome)

    def stop(self):
        self.num_stops += 1


@pytest.mark.parametrize(
    ("call", "acceptance", "selection"),
    [
        ({}, "seeded", "greedy"),
        ({"do_sample": True}, "seeded", "seeded"),
        ({"do_sample": True}, "rejection", "rejection"),
    ],
)
def test_a_source_is_told_how_the_target_chooses(call, acceptance, selection):
    """The context names the rule, the width of the logits and the device."""
    source = Listening()
    with hfspec.patched(shared(), source, acceptance=acceptance, draft_budget=2):
        shared().generate(prompt(), **NEW, **call)
    (context,) = source.contexts
    assert (context.selection, context.vocab_size, context.device.type) == (selection, VOCAB, "cpu")
    assert context.prompt_mask is None


def test_a_source_is_told_where_the_prompt_is_padding():
    """The mask of a padded prompt comes along."""
    ids = torch.cat([rows(PAD, PAD), prompt()], dim=-1)
    mask = (ids != PAD).long()
    source = Listening()
    with hfspec.patched(shared(attn="sdpa"), source, draft_budget=2):
        shared(attn="sdpa").generate(ids, attention_mask=mask, **NEW)
    assert torch.equal(source.contexts[0].prompt_mask, mask)


def test_a_source_sees_the_text_grow_and_each_verdict():
    """Each `propose` sees all committed tokens, and each draft gets one verdict, then one `stop`."""
    source = Listening()
    text = plain_text(shared(), prompt(), **NEW)
    with hfspec.patched(shared(), source, draft_budget=2):
        shared().generate(prompt(), **NEW)
    assert all(torch.equal(seen, text[:, : seen.shape[1]]) for seen in source.texts)
    assert source.texts[0].shape[1] == 8
    assert len(source.outcomes) >= len(source.texts)
    assert source.num_stops == 1


def test_a_source_is_stopped_after_an_error_too():
    """`stop` comes once however the call ends."""

    class HangsUp:
        def put(self, value):
            if value.dim() == 1 and HangsUp.count > 4:
                raise ConnectionError
            HangsUp.count += 1

        count = 0

    source = Listening()
    with hfspec.patched(shared(), source, draft_budget=2), pytest.raises(ConnectionError):
        shared().generate(prompt(), streamer=HangsUp(), **NEW)
    assert source.num_stops == 1


def test_a_source_may_be_a_dataclass():
    """A source that compares by value, and so has no hash, serves as any other."""

    @dataclass
    class Same(DraftSource, DraftSession):
        token: int

        def start(self, context):
            return self

        def propose(self, input_ids, budget):
            return Draft(rows(self.token))

    both(shared(), Same(5), prompt(), NEW, draft_budget=2).assert_same().assert_drafted()


def test_an_empty_draft_is_a_plain_round():
    """A source with nothing to propose costs nothing but the asking."""

    class Silent(DraftSource, DraftSession):
        def start(self, context):
            return self

        def propose(self, input_ids, budget):
            return Draft.empty(1, input_ids.device)

    pair = both(shared(), Silent(), prompt(), NEW, draft_budget=3).assert_same()
    assert (pair.stats.rounds, pair.stats.plain_rounds, pair.stats.fallback_reason) == (0, 11, None)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_source_that_draws_random_numbers_leaves_vanillas_stream(do_sample):
    """Same seed, same text, with any draft: what a source draws for itself does not move the caller's stream."""
    source = FunctionSource(lambda ids, budget, num_round: Draft(torch.randint(3, VOCAB, (1, budget.num_tokens))))
    source.may_draw = True
    call = NEW | {"do_sample": do_sample}
    both(shared(), source, prompt(), call, draft_budget=3).assert_same().assert_drafted()


def test_a_source_cannot_write_into_the_text():
    """A source that writes into the ids it was shown changes nothing."""

    def propose(ids, budget, num_round):
        ids.fill_(5)
        return Draft(rows(5))

    both(shared(), FunctionSource(propose), prompt(), NEW, draft_budget=3).assert_same().assert_drafted()


def test_a_call_without_rounds_starts_no_source():
    """A call of one token drafts nothing, so no source is started."""
    source = Listening()
    both(shared(), source, prompt(), {"max_new_tokens": 1}, draft_budget=3).assert_same()
    assert source.contexts == []


def test_a_protocol_method_that_is_missing_is_seen_at_birth():
    """`start` and `propose` must be there."""
    with pytest.raises(TypeError, match="start"):
        type("Half", (DraftSource,), {})()
    with pytest.raises(TypeError, match="propose"):
        type("Half", (DraftSession,), {})()


def test_a_good_draft_is_accepted_more_often_than_a_bad_one():
    """Acceptance tells drafts apart: same weights, noisy weights, other weights."""
    rates = [
        both(shared(), draft, prompt(), {"max_new_tokens": 60}, draft_budget=3).stats.acceptance_rate
        for draft in (shared(), noisy(), shared(seed=1))
    ]
    assert rates[0] == 1.0 > rates[1] > rates[2]


def test_a_source_is_told_of_each_row():
    """One context a row, with its number, its mask and its own noise; `select` leaves the others at work."""
    ids = torch.cat([prompt(5), torch.cat([rows(PAD, PAD), prompt(3, seed=1)], dim=-1)])
    mask = (ids != PAD).long()
    source = Listening()
    model = shared("llama", attn="sdpa")
    with hfspec.patched(model, source, draft_budget=2):
        model.generate(ids, attention_mask=mask, do_sample=True, **NEW)
    assert [each.row for each in source.contexts] == [0, 1]
    assert source.contexts[0].prompt_mask is None
    assert torch.equal(source.contexts[1].prompt_mask, mask[1:].to(source.contexts[1].prompt_mask.dtype))
    assert source.contexts[0].noise is not source.contexts[1].noise
    assert source.num_stops == 2


def test_rows_without_a_shared_session_are_asked_in_turn():
    """The protocol's default: each row's own session is told its own verdict, and stopped when its row leaves."""
    sessions = [Listening(), Listening(), Listening()]

    class Rows(DraftSource):
        def start(self, context):
            return sessions[context.row]

    batch = Rows().start_batch(view(3))
    texts = [prompt(3 + row, seed=row) for row in range(3)]
    draft = batch.propose(uneven(texts), RoundBudget(4, reads_confidence=True))
    assert draft.lengths == (1, 1, 1)
    assert all(torch.equal(each.texts[0], text) for each, text in zip(sessions, texts, strict=True))
    batch.read(uneven(texts), Outcomes(tuple(outcome(1, row % 2, 1 + row % 2) for row in range(3))))
    assert [each.outcomes[0].num_accepted for each in sessions] == [0, 1, 0]
    batch.select([2])
    assert [each.num_stops for each in sessions] == [1, 1, 0]
    batch.propose(uneven([texts[2]]), RoundBudget(2))
    assert [len(each.texts) for each in sessions] == [1, 1, 2]
    batch.stop()
    assert [each.num_stops for each in sessions] == [1, 1, 1]


def view(num_rows):
    contexts = [Context(VOCAB, torch.device("cpu"), row=row) for row in range(num_rows)]
    return CallView(contexts, BatchNoise(num_rows))


class TestGuard:
    """What stands between the loop and any source."""

    def guard(self, source, num_rows=2):
        self.reasons = []
        return Guard(source, view(num_rows), self.reasons.append)

    def texts(self, num_rows=2):
        return uneven([prompt(4 + row, seed=row) for row in range(num_rows)])

    def test_nothing_is_started_for_a_plain_round(self):
        source = Listening()
        draft = self.guard(source).propose(self.texts(), RoundBudget(0))
        assert draft.lengths == (0, 0)
        assert source.contexts == []

    def test_one_bad_draft_ends_drafting_for_all_rows(self):
        class Bad(Listening):
            def propose(self, input_ids, budget):
                return Draft(rows(5) if input_ids.shape[1] == 4 else rows(VOCAB))

        guard = self.guard(Bad())
        for _ in range(2):
            assert guard.propose(self.texts(), RoundBudget(3)).lengths == (0, 0)
        assert guard.has_failed
        assert len(self.reasons) == 1
        assert "vocabulary" in self.reasons[0]

    def test_too_few_drafts_are_a_failure(self):
        class Few(Listening):
            def start_batch(self, call):
                honest = type(DraftSource.start_batch(self, call))
                few = type("Few", (honest,), {"propose": lambda self, texts, budget: Draft(rows(5))})
                return few([], call.contexts)

        guard = self.guard(Few())
        assert guard.propose(self.texts(), RoundBudget(3)).lengths == (0, 0)
        assert len(self.reasons) == 1

    def test_the_rows_left_are_those_checked(self):
        source = Listening()
        guard = self.guard(source, num_rows=3)
        guard.propose(self.texts(3), RoundBudget(2))
        guard.select([1])
        texts = uneven([prompt(9)])
        assert guard.propose(texts, RoundBudget(2)).num_rows == 1
        guard.read(texts, Outcomes((outcome(1, 1, 2),)))
        guard.stop()
        assert self.reasons == []
        assert len(source.outcomes) == 1


def test_a_source_that_draws_says_so(monkeypatch):
    """Generators are saved and put back for those alone: it is not safe while other threads draw."""
    put_back = []

    def counted(device):
        put_back.append(device)
        return nullcontext()

    monkeypatch.setattr("hfspec.draft.guard.unmoved", counted)
    source = FunctionSource(lambda *_: Draft(rows(5)))
    with hfspec.patched(shared(), source, draft_budget=2):
        shared().generate(prompt(), **NEW)
        assert not put_back
        source.may_draw = True
        shared().generate(prompt(), **NEW)
        assert put_back
