"""The walk over made-up logits: no model. The whole of it is tested through calls in `tests/lossless`."""

import pytest
import torch
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerationConfig
from transformers.utils import ModelOutput

from hfspec import Draft
from hfspec.accept.record import Record
from hfspec.accept.rules import Greedy, Proposal, Rejection, Seeded
from hfspec.accept.walk import Transcript, walk
from hfspec.host import releases
from hfspec.host.prepared import Prepared
from hfspec.rounds import Outcome, Verified
from hfspec.sampling.noise import BatchNoise
from tests.models import PAD, rows, shared

VOCAB = 10
EOS = 2
CHOICES = (4, 5, 6, 7)


def verified(*choices_of_rows):
    """A forward whose likeliest tokens are these, row by row."""
    logits = torch.nn.functional.one_hot(torch.tensor(choices_of_rows), VOCAB).double()
    return Verified(logits, ModelOutput(), num_read=logits.shape[1])


def transcript(max_length=100, num_rows=1, rule=None, pad_id=None, record=None):
    """A text of two ids a row; with a `pad_id` the token `EOS` ends a row."""
    ids = rows(1, 3).expand(num_rows, -1)
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    config = GenerationConfig()
    config._pad_token_tensor = None if pad_id is None else torch.tensor(pad_id)
    if pad_id is not None:
        criteria.append(EosTokenCriteria(EOS))
    prepared = Prepared(shared(), ids, LogitsProcessorList(), criteria, config, {})
    return Transcript(prepared, rule or Greedy(), record or Record(config))


def drafts(*ids_of_rows):
    return [Draft(rows(*ids)) for ids in ids_of_rows]


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
    assert walk(text, drafts(drafted), verified(CHOICES[: len(drafted) + 1])) == outcome
    assert text.input_ids.tolist() == [[1, 3, *committed]]
    assert text.num_new == outcome.num_committed
    assert not text.is_finished


@pytest.mark.parametrize("num_allowed", [1, 2, 3, 4])
def test_the_walk_stops_where_a_criterion_ends_the_text(num_allowed):
    """Draft tokens after the end are neither judged nor committed."""
    text = transcript(max_length=2 + num_allowed)
    outcome = walk(text, drafts((4, 5, 6)), verified(CHOICES))
    assert outcome == Outcome(min(num_allowed, 3), min(num_allowed, 3), num_allowed)
    assert text.is_finished


# Rows in lock-step


@pytest.mark.parametrize(
    ("drafted", "num_committed"),
    [
        (((4, 5, 6), (7, 8, 9)), 4),
        (((4, 5, 6), (7, 8, 1)), 3),
        (((4, 1, 6), (7, 8, 1)), 2),
        (((4, 5, 6), (1, 8, 9)), 1),
    ],
    ids=["all right", "one row's last wrong", "another row's earlier wrong", "one row's first wrong"],
)
def test_rows_in_lock_step_go_as_far_as_the_worst_of_them(drafted, num_committed):
    """All rows commit the target's tokens, as many as the row whose draft was wrong first."""
    chosen = (4, 5, 6, 7), (7, 8, 9, 4)
    text = transcript(num_rows=2)
    outcome = walk(text, drafts(*drafted), verified(*chosen))
    assert outcome == Outcome(min(num_committed, 3), num_committed - 1, num_committed)
    assert text.input_ids.tolist() == [[1, 3, *ids[:num_committed]] for ids in chosen]


def test_a_row_that_has_ended_gets_padding():
    """The row's draft cannot be right where padding is due; the other goes on to its own end."""
    text = transcript(num_rows=2, pad_id=PAD)
    outcome = walk(text, drafts((4, EOS, 6), (7, 8, 9)), verified((4, EOS, 6, 7), (7, 8, 9, 4)))
    assert outcome == Outcome(3, 2, 3)
    assert text.input_ids.tolist() == [[1, 3, 4, EOS, PAD], [1, 3, 7, 8, 9]]
    assert text.unfinished == [False, True]
    assert text.is_padded(0)
    assert not text.is_padded(1)

    outcome = walk(text, drafts((PAD, PAD), (7, 8)), verified((5, 5, 5), (7, 8, EOS)))
    assert outcome == Outcome(2, 2, 3)
    assert text.input_ids[:, 5:].tolist() == [[PAD, PAD, PAD], [7, 8, EOS]]
    assert text.is_finished


def test_without_padding_finished_rows_go_on():
    """Where vanilla goes on writing finished rows as any others, so does the transcript, to the last row's end."""
    text = transcript(num_rows=2, max_length=5)
    walk(text, drafts((4, 5), (7, 8)), verified((4, 5, 6), (7, 8, 9)))
    assert text.input_ids.tolist() == [[1, 3, 4, 5, 6], [1, 3, 7, 8, 9]]
    assert text.is_finished


class Once(Greedy):
    """Notes what it was asked: the proposals, one a row."""

    def __init__(self):
        self.seen = []

    def choose(self, scores, proposals):
        self.seen.append(proposals and [each.token_id for each in proposals])
        return super().choose(scores, proposals)


def test_a_rule_is_shown_all_rows_proposals():
    """One proposal a row at each draft token, none for the bonus token."""
    rule = Once()
    walk(transcript(num_rows=2, rule=rule), drafts((4, 5), (7, 8)), verified((4, 5, 6), (7, 8, 9)))
    assert rule.seen == [[4, 7], [5, 8], None]


@pytest.mark.parametrize("rule", [Greedy(), Seeded(BatchNoise(2).share())], ids=["greedy", "seeded"])
def test_the_proposal_changes_nothing_for_exact_rules(rule):
    """Greedy and seeded choose the same tokens whatever was proposed."""
    scores = torch.randn(2, VOCAB)
    chosen = []
    for proposal in [None, Proposal(3), Proposal(9, torch.full((VOCAB,), 1 / VOCAB))]:
        torch.manual_seed(1)
        chosen.append(tuple(rule.choose(scores, proposal and [proposal] * 2).tolist()))
    assert len(set(chosen)) == 1


def test_rules_return_one_id_a_row():
    """`[rows]` int64, accepted or not."""
    for num_rows in (1, 3):
        scores = torch.randn(num_rows, VOCAB)
        for rule in (Greedy(), Seeded(BatchNoise(num_rows).share()), Rejection()):
            for proposals in (None, [Proposal(3)] * num_rows):
                chosen = rule.choose(scores, proposals)
                assert (chosen.shape, chosen.dtype) == ((num_rows,), torch.long)


def test_rejection_judges_each_row_by_itself():
    """A sure proposal is accepted in its row, an impossible one rejected in another, in the same call."""
    scores = torch.full((2, VOCAB), -torch.inf)
    scores[0, 3] = scores[1, 4] = 0.0
    assert Rejection().choose(scores, [Proposal(3), Proposal(3)]).tolist() == [3, 4]


class TestRecord:
    """States of a wide forward are handed out as if each token had had one of its own."""

    def record(self, **asked):
        return Record(GenerationConfig(return_dict_in_generate=True, output_logits=True, **asked))

    def test_scores_and_states_of_the_committed_tokens_alone(self):
        record = self.record(output_hidden_states=True, output_attentions=True, output_scores=True)
        text = transcript(record=record)
        outputs = ModelOutput(
            hidden_states=(torch.arange(5.0).view(1, 5, 1),), attentions=(torch.rand(1, 1, 5, 9).tril(4),)
        )
        # Two committed tokens had been left unread, so the forward is wider than the logits.
        wide = Verified(verified((4, 5, 6)).logits, outputs, num_read=5)
        walk(text, drafts((4, 9)), wide)
        out = record.output(text.input_ids, lambda: None)
        assert out.sequences.tolist() == [[1, 3, 4, 5]]
        assert len(out.logits) == len(out.scores) == 2
        assert [step[0].flatten().tolist() for step in out.hidden_states] == [[2.0], [3.0]]
        assert [tuple(step[0].shape) for step in out.attentions] == [(1, 1, 1, 7), (1, 1, 1, 8)]
        assert torch.equal(out.attentions[1][0][0, 0, 0], outputs.attentions[0][0, 0, 3, :8])

    def test_an_encoder_decoders_fields(self):
        encoder = ModelOutput(last_hidden_state=torch.rand(1, 3, 4), hidden_states=(torch.rand(1, 3, 4),))
        config = GenerationConfig(return_dict_in_generate=True, output_hidden_states=True)
        out = Record(config, encoder).output(rows(1), lambda: "cache")
        assert out[releases.CACHE_KEY] == "cache"
        assert out.encoder_hidden_states is encoder.hidden_states
        assert out.decoder_hidden_states == ()
        assert out.encoder_attentions is None
        assert out.decoder_attentions is None
