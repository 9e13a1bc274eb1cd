"""The walk over made-up logits: no model. The whole of it is tested through calls in `tests/lossless`."""

import pytest
import torch
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import GenerationConfig
from transformers.utils import ModelOutput

from hfspec import Draft
from hfspec.accept.record import Record
from hfspec.accept.rules import Greedy, Proposal, Rejection, Seeded
from hfspec.accept.walk import Transcript, walk
from hfspec.rounds import Outcome, Verified
from hfspec.sampling.noise import SeededNoise
from tests.models import rows

VOCAB = 10
CHOICES = (4, 5, 6, 7)


def verified(*choices):
    """A forward whose likeliest tokens are these."""
    logits = torch.nn.functional.one_hot(torch.tensor([choices]), VOCAB).double()
    return Verified(logits, ModelOutput())


def transcript(max_length=100):
    return Transcript(
        rows(1, 2),
        Greedy(),
        LogitsProcessorList(),
        StoppingCriteriaList([MaxLengthCriteria(max_length)]),
        None,
        Record(GenerationConfig()),
    )


@pytest.mark.parametrize(
    ("drafted", "committed", "outcome"),
    [
        ((), (4,), Outcome(0, 0, 1)),
        ((4, 5, 6), (4, 5, 6, 7), Outcome(3, 3, 4)),
        ((4, 5, 9), (4, 5, 6), Outcome(3, 2, 3)),
        ((4, 9, 6), (4, 5), Outcome(2, 1, 2)),
        ((9, 5, 6), (4,), Outcome(1, 0, 1)),
    ],
    ids=["no draft", "all right", "last wrong", "middle wrong", "first wrong"],
)
def test_tokens_are_committed_up_to_the_first_wrong_one(drafted, committed, outcome):
    """Accepted tokens, then the recovered token, or the bonus token after a draft that was all right."""
    text = transcript()
    assert walk(text, Draft(rows(*drafted)), verified(*CHOICES[: len(drafted) + 1])) == outcome
    assert text.input_ids.tolist() == [[1, 2, *committed]]
    assert text.num_new == outcome.num_committed
    assert not text.is_finished


@pytest.mark.parametrize("num_allowed", [1, 2, 3, 4])
def test_the_walk_stops_where_a_criterion_ends_the_text(num_allowed):
    """Draft tokens after the end are neither judged nor committed."""
    text = transcript(max_length=2 + num_allowed)
    outcome = walk(text, Draft(rows(4, 5, 6)), verified(*CHOICES))
    assert outcome == Outcome(min(num_allowed, 3), min(num_allowed, 3), num_allowed)
    assert text.is_finished


@pytest.mark.parametrize("rule", [Greedy(), Seeded(SeededNoise())], ids=["greedy", "seeded"])
def test_the_proposal_changes_nothing_for_exact_rules(rule):
    """Greedy and seeded choose the same token whatever was proposed."""
    scores = torch.randn(1, VOCAB)
    chosen = []
    for proposal in [None, Proposal(3), Proposal(9, torch.full((VOCAB,), 1 / VOCAB))]:
        torch.manual_seed(1)
        chosen.append(int(rule.choose(scores, proposal)))
    assert len(set(chosen)) == 1


def test_rules_return_one_id_a_row():
    """`[1]` int64, accepted or not."""
    scores = torch.randn(1, VOCAB)
    for rule in (Greedy(), Seeded(SeededNoise()), Rejection()):
        for proposal in (None, Proposal(3)):
            chosen = rule.choose(scores, proposal)
            assert (chosen.shape, chosen.dtype) == ((1,), torch.long)
