"""Both acceptors over made-up logits: no model. The whole of them is tested through calls in `tests/lossless`."""

import pytest
import torch
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerationConfig
from transformers.utils import ModelOutput

from hfspec import Draft, Texts
from hfspec.accept.processing import Processing
from hfspec.accept.record import Record
from hfspec.accept.rules import Greedy, Proposal, Rejection, Seeded
from hfspec.accept.vectorised import Vectorised
from hfspec.accept.walk import Walk
from hfspec.host import releases
from hfspec.rounds import Verified
from hfspec.sampling.noise import BatchNoise
from tests.models import PAD, rows

VOCAB = 10
EOS = 2
CHOICES = (4, 5, 6, 7)


def verified(*choices_of_rows):
    """A forward whose likeliest tokens are these, row by row."""
    logits = torch.nn.functional.one_hot(torch.tensor(choices_of_rows), VOCAB).double()
    return Verified(logits, ModelOutput(), num_read=logits.shape[1])


class Written:
    """A text of two ids a row, rows in step, and its acceptor; with a `pad_id` the token `EOS` ends a row."""

    def __init__(self, is_vectorised, max_length=100, num_rows=1, rule=None, pad_id=None, record=None):
        self.texts = Texts(rows(1, 3).expand(num_rows, -1))
        criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
        if pad_id is not None:
            criteria.append(EosTokenCriteria(EOS))
        rule, record = rule or Greedy(), record or Record(GenerationConfig())
        shared = ([LogitsProcessorList()], criteria, record, num_rows > 1, pad_id)
        self.acceptor = Walk(self.texts, rule, *shared)
        if is_vectorised:
            processing = Processing(self.texts, shared[0], num_rows > 1)
            self.acceptor = Vectorised(self.acceptor, self.texts, rule, processing, *shared[1:])

    def settle(self, drafted, forward):
        """The counts of each row's verdict."""
        found = self.acceptor.settle(drafted, forward)
        return [(each.num_judged, each.num_accepted, each.num_committed) for each in found]

    @property
    def ids(self):
        return self.texts.whole(PAD).tolist()


def drafts(*ids_of_rows):
    return Draft(torch.tensor(ids_of_rows, dtype=torch.long).view(len(ids_of_rows), -1))


both_ways = pytest.mark.parametrize("is_vectorised", [False, True], ids=["walk", "vectorised"])


@both_ways
@pytest.mark.parametrize(
    ("drafted", "committed", "counts"),
    [
        ((), (4,), (0, 0, 1)),
        ((4, 5, 6), (4, 5, 6, 7), (3, 3, 4)),
        ((4, 5, 9), (4, 5, 6), (3, 2, 3)),
        ((4, 9, 6), (4, 5), (2, 1, 2)),
        ((9, 5, 6), (4,), (1, 0, 1)),
    ],
    ids=["no draft", "all right", "last wrong", "middle wrong", "first wrong"],
)
def test_tokens_are_committed_up_to_the_first_wrong_one(drafted, committed, counts, is_vectorised):
    """Accepted tokens, then the recovered token, or the bonus token after a draft that was all right."""
    text = Written(is_vectorised)
    assert text.settle(drafts(drafted), verified(CHOICES[: len(drafted) + 1])) == [counts]
    assert text.ids == [[1, 3, *committed]]
    assert text.texts.num_new == counts[2]
    assert text.texts.has_ended == [False]


@both_ways
@pytest.mark.parametrize("num_allowed", [1, 2, 3, 4])
def test_the_length_ends_the_text(num_allowed, is_vectorised):
    """No draft reaches further, which is the loop's affair; the last token ends it."""
    text = Written(is_vectorised, max_length=2 + num_allowed)
    drafted = (4, 5, 6)[: num_allowed - 1]
    assert text.settle(drafts(drafted), verified(CHOICES[:num_allowed])) == [(len(drafted), len(drafted), num_allowed)]
    assert text.texts.has_ended == [True]


@pytest.mark.parametrize("num_allowed", [1, 2, 3, 4])
def test_the_walk_stops_where_a_criterion_ends_the_text(num_allowed):
    """Draft tokens after the end are neither judged nor committed."""
    text = Written(False, max_length=2 + num_allowed)
    counts = (min(num_allowed, 3), min(num_allowed, 3), num_allowed)
    assert text.settle(drafts((4, 5, 6)), verified(CHOICES)) == [counts]
    assert text.texts.has_ended == [True]


@both_ways
@pytest.mark.parametrize("at", range(4))
def test_an_end_token_ends_the_text(at, is_vectorised):
    """Wherever it falls; a drafted one is accepted, and nothing comes behind it."""
    choices = [4, 5, 6, 7]
    choices[at] = EOS
    text = Written(is_vectorised, pad_id=PAD)
    accepted = min(at + 1, 3)
    assert text.settle(drafts(tuple(choices[:3])), verified(choices)) == [(accepted, accepted, at + 1)]
    assert text.ids == [[1, 3, *choices[: at + 1]]]
    assert text.texts.has_ended == [True]


# Rows in step


@both_ways
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
def test_rows_in_step_go_as_far_as_the_worst_of_them(drafted, num_committed, is_vectorised):
    """All rows commit the target's tokens, as many as the row whose draft was wrong first."""
    chosen = (4, 5, 6, 7), (7, 8, 9, 4)
    text = Written(is_vectorised, num_rows=2)
    counts = (min(num_committed, 3), num_committed - 1, num_committed)
    assert text.settle(drafts(*drafted), verified(*chosen)) == [counts] * 2
    assert text.ids == [[1, 3, *ids[:num_committed]] for ids in chosen]


@both_ways
def test_a_row_that_has_ended_gets_padding(is_vectorised):
    """The row's draft cannot be right where padding is due; the other goes on to its own end."""
    text = Written(is_vectorised, num_rows=2, pad_id=PAD)
    counts = text.settle(drafts((4, EOS, 6), (7, 8, 9)), verified((4, EOS, 6, 7), (7, 8, 9, 4)))
    assert counts == [(3, 2, 3)] * 2
    assert text.ids == [[1, 3, 4, EOS, PAD], [1, 3, 7, 8, 9]]
    assert text.texts.has_ended == [True, False]

    counts = text.settle(drafts((PAD, PAD), (7, 8)), verified((5, 5, 5), (7, 8, EOS)))
    assert counts == [(2, 2, 3)] * 2
    assert [ids[5:] for ids in text.ids] == [[PAD, PAD, PAD], [7, 8, EOS]]
    assert text.texts.has_ended == [True, True]


@both_ways
def test_without_padding_finished_rows_go_on(is_vectorised):
    """Where vanilla goes on writing finished rows as any others, so does it here, to the last row's end."""
    text = Written(is_vectorised, num_rows=2, max_length=5)
    text.settle(drafts((4, 5), (7, 8)), verified((4, 5, 6), (7, 8, 9)))
    assert text.ids == [[1, 3, 4, 5, 6], [1, 3, 7, 8, 9]]
    assert text.texts.has_ended == [True, True]


class Once(Greedy):
    """Notes what it was asked: the proposals, one a row."""

    heeds_proposals = True

    def __init__(self):
        self.seen = []

    def choose(self, scores, proposals, rows):
        self.seen.append(proposals and [each.token_ids for each in proposals])
        return super().choose(scores, proposals, rows)


def test_a_rule_is_shown_all_rows_proposals():
    """One proposal a row at each draft token, none for the bonus token."""
    rule = Once()
    Written(False, num_rows=2, rule=rule).settle(drafts((4, 5), (7, 8)), verified((4, 5, 6), (7, 8, 9)))
    assert rule.seen == [[[4], [7]], [[5], [8]], None]


@pytest.mark.parametrize("make", [Greedy, lambda: Seeded(BatchNoise(2))], ids=["greedy", "seeded"])
def test_the_proposal_changes_nothing_for_exact_rules(make):
    """Greedy and seeded choose the same tokens whatever was proposed."""
    scores = torch.randn(2, VOCAB)
    chosen = []
    for proposal in [None, Proposal([3]), Proposal([9], torch.full((1, VOCAB), 1 / VOCAB))]:
        torch.manual_seed(1)
        chosen.append(tuple(make().choose(scores, proposal and [proposal] * 2, [0, 1]).tolist()))
    assert len(set(chosen)) == 1


def test_rules_return_one_id_a_row():
    """`[rows]` int64, accepted or not."""
    for num_rows in (1, 3):
        scores = torch.randn(num_rows, VOCAB)
        for rule in (Greedy(), Seeded(BatchNoise(num_rows)), Rejection()):
            for proposals in (None, [Proposal([3])] * num_rows):
                chosen = rule.choose(scores, proposals, range(num_rows))
                assert (chosen.shape, chosen.dtype) == ((num_rows,), torch.long)


def test_rejection_judges_each_row_by_itself():
    """A sure proposal is accepted in its row, an impossible one rejected in another, in the same call."""
    scores = torch.full((2, VOCAB), -torch.inf)
    scores[0, 3] = scores[1, 4] = 0.0
    assert Rejection().choose(scores, [Proposal([3]), Proposal([3])], [0, 1]).tolist() == [3, 4]


@both_ways
class TestRecord:
    """States of a wide forward are handed out as if each token had had one of its own."""

    def test_scores_and_states_of_the_committed_tokens_alone(self, is_vectorised):
        asked = {"output_hidden_states": True, "output_attentions": True, "output_scores": True}
        record = Record(GenerationConfig(return_dict_in_generate=True, output_logits=True, **asked))
        text = Written(is_vectorised, record=record)
        outputs = ModelOutput(
            hidden_states=(torch.arange(5.0).view(1, 5, 1),), attentions=(torch.rand(1, 1, 5, 9).tril(4),)
        )
        # Two committed tokens had been left unread, so the forward is wider than the logits.
        wide = Verified(verified((4, 5, 6)).logits, outputs, num_read=5)
        text.settle(drafts((4, 9)), wide)
        out = record.output(text.texts.whole(PAD), lambda: None)
        assert out.sequences.tolist() == [[1, 3, 4, 5]]
        assert len(out.logits) == len(out.scores) == 2
        assert [step[0].flatten().tolist() for step in out.hidden_states] == [[2.0], [3.0]]
        assert [tuple(step[0].shape) for step in out.attentions] == [(1, 1, 1, 7), (1, 1, 1, 8)]
        assert torch.equal(out.attentions[1][0][0, 0, 0], outputs.attentions[0][0, 0, 3, :8])

    def test_an_encoder_decoders_fields(self, is_vectorised):
        encoder = ModelOutput(last_hidden_state=torch.rand(1, 3, 4), hidden_states=(torch.rand(1, 3, 4),))
        config = GenerationConfig(return_dict_in_generate=True, output_hidden_states=True)
        out = Record(config, encoder).output(rows(1), lambda: "cache")
        assert out[releases.CACHE_KEY] == "cache"
        assert out.encoder_hidden_states is encoder.hidden_states
        assert out.decoder_hidden_states == ()
        assert out.encoder_attentions is None
        assert out.decoder_attentions is None
