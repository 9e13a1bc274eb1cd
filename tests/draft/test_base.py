"""The protocol: what a source of the user's own may be, and what it is told."""

from dataclasses import dataclass

import pytest
import torch

import hfspec
from hfspec import Context, Draft, DraftSession, DraftSource
from tests.models import PAD, VOCAB, both, noisy, plain_text, prompt, rows, shared

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
            return Draft.empty(input_ids.device)

    pair = both(shared(), Silent(), prompt(), NEW, draft_budget=3).assert_same()
    assert (pair.stats.rounds, pair.stats.plain_rounds, pair.stats.fallback_reason) == (0, 11, None)


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
