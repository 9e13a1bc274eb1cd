"""What a draft applies is the law that vanilla's own processing gives."""

import itertools

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as host

from hfspec.sampling import processors as processors_module
from hfspec.sampling.processors import DraftProcessors, are_row_independent, stateless
from tests.models import CountingProcessor, prompt

WARPERS = {
    "temperature": lambda: host.TemperatureLogitsWarper(0.7),
    "top_k": lambda: host.TopKLogitsWarper(9),
    "top_p": lambda: host.TopPLogitsWarper(0.8),
    "min_p": lambda: host.MinPLogitsWarper(0.05),
    "typical": lambda: host.TypicalLogitsWarper(0.7),
    "penalty": lambda: host.RepetitionPenaltyLogitsProcessor(1.5),
    "suppress": lambda: host.SuppressTokensLogitsProcessor([1, 2, 3, 40]),
}


#: One of each processor that a draft may apply too.
MADE = {
    "EpsilonLogitsWarper": lambda: host.EpsilonLogitsWarper(0.01),
    "EtaLogitsWarper": lambda: host.EtaLogitsWarper(0.01),
    "InfNanRemoveLogitsProcessor": lambda: host.InfNanRemoveLogitsProcessor(),
    "LogitNormalization": lambda: host.LogitNormalization(),
    "MinPLogitsWarper": lambda: host.MinPLogitsWarper(0.1),
    "TemperatureLogitsWarper": lambda: host.TemperatureLogitsWarper(0.7),
    "TopHLogitsWarper": lambda: host.TopHLogitsWarper(0.5),
    "TopKLogitsWarper": lambda: host.TopKLogitsWarper(9),
    "TopPLogitsWarper": lambda: host.TopPLogitsWarper(0.8),
    "TypicalLogitsWarper": lambda: host.TypicalLogitsWarper(0.7),
    "ExponentialDecayLengthPenalty": lambda: host.ExponentialDecayLengthPenalty((1, 1.5), torch.tensor([5]), 4),
    "ForcedBOSTokenLogitsProcessor": lambda: host.ForcedBOSTokenLogitsProcessor(5),
    "ForcedEOSTokenLogitsProcessor": lambda: host.ForcedEOSTokenLogitsProcessor(9, torch.tensor([5])),
    "MinLengthLogitsProcessor": lambda: host.MinLengthLogitsProcessor(9, torch.tensor([5])),
    "MinNewTokensLengthLogitsProcessor": lambda: host.MinNewTokensLengthLogitsProcessor(4, 9, torch.tensor([5])),
    "NoBadWordsLogitsProcessor": lambda: host.NoBadWordsLogitsProcessor([[4], [7, 8]]),
    "NoRepeatNGramLogitsProcessor": lambda: host.NoRepeatNGramLogitsProcessor(1),
    "RepetitionPenaltyLogitsProcessor": lambda: host.RepetitionPenaltyLogitsProcessor(1.5),
    "SequenceBiasLogitsProcessor": lambda: host.SequenceBiasLogitsProcessor({(4,): 2.0}),
    "SuppressTokensAtBeginLogitsProcessor": lambda: host.SuppressTokensAtBeginLogitsProcessor([5], 8),
    "SuppressTokensLogitsProcessor": lambda: host.SuppressTokensLogitsProcessor([5]),
}


def law(scores, token_ids, vocab=97):
    """`[vocab]`, from scores that may belong to some tokens only."""
    probs = scores.softmax(-1)
    if token_ids is None:
        return probs[0]
    return torch.zeros(1, vocab).scatter(1, token_ids, probs)[0]


@pytest.mark.parametrize("names", list(itertools.permutations(WARPERS, 3)), ids="-".join)
def test_the_short_way_gives_the_whole_law(names):
    """In every order of three: the law over the k best alone equals full processing's."""
    processors = LogitsProcessorList([WARPERS[name]() for name in names])
    logits = 3 * torch.randn(1, 97)
    expected = processors(prompt(8), logits.clone()).softmax(-1)[0]
    torch.testing.assert_close(law(*DraftProcessors(processors)(prompt(8), logits.clone())), expected)


def test_only_the_k_best_are_worked_on():
    """After a top-k the others are gone, which is what makes it cheap."""
    processors = LogitsProcessorList([WARPERS["top_k"](), WARPERS["top_p"]()])
    scores, token_ids = DraftProcessors(processors)(prompt(8), torch.randn(1, 97))
    assert scores.shape == token_ids.shape == (1, 9)


def test_a_top_k_beyond_the_vocabulary_keeps_all():
    """k above the number of tokens is no error."""
    processors = LogitsProcessorList([host.TopKLogitsWarper(500)])
    logits = torch.randn(1, 97)
    assert torch.allclose(law(*DraftProcessors(processors)(prompt(8), logits.clone())), logits.softmax(-1)[0])


class MyTopK(host.TopKLogitsWarper):
    """A subclass may keep state, so it is not taken for its base."""


def test_what_may_keep_state_is_left_out():
    """Custom processors and subclasses are never called by a draft; vanilla's calls are theirs alone."""
    custom = CountingProcessor()
    processors = LogitsProcessorList([WARPERS["temperature"](), custom, MyTopK(2)])
    assert [type(each) for each in stateless(processors)] == [host.TemperatureLogitsWarper]
    DraftProcessors(processors)(prompt(8), torch.randn(1, 97))
    assert custom.num_calls == 0


def test_no_processors_change_nothing():
    """Without any the logits are the scores."""
    logits = torch.randn(1, 97)
    scores, token_ids = DraftProcessors(LogitsProcessorList())(prompt(8), logits.clone())
    assert torch.equal(scores, logits)
    assert token_ids is None


def test_processors_of_single_rows():
    """The host's own that look at one row may be called for it alone; no others may."""
    assert are_row_independent(LogitsProcessorList([make() for make in WARPERS.values()]))
    assert are_row_independent(LogitsProcessorList())


@pytest.mark.parametrize(
    "other",
    [
        CountingProcessor(),
        MyTopK(2),
        host.EncoderRepetitionPenaltyLogitsProcessor(1.5, prompt(4)),
        host.EncoderNoRepeatNGramLogitsProcessor(2, prompt(4)),
        host.PrefixConstrainedLogitsProcessor(lambda row, ids: [1], 1),
    ],
    ids=lambda other: type(other).__name__,
)
def test_processors_that_need_the_whole_batch(other):
    """One that counts calls, is somebody's own, holds something of every row or tells rows apart decides for all."""
    assert not are_row_independent(LogitsProcessorList([WARPERS["top_k"](), other]))


@pytest.mark.parametrize("name", [*processors_module._TOKEN_BLIND, *processors_module._TOKEN_AWARE])
def test_what_is_called_row_by_row_gives_the_batchs_scores(name):
    """Each of the processors taken for row-independent: for all rows at once, or for each by itself, it is one law."""
    if not hasattr(host, name):
        pytest.skip("not in this release")
    processor = MADE[name]()
    ids, logits = torch.randint(3, 97, (3, 8)), 3 * torch.randn(3, 97)
    at_once = processor(ids, logits.clone())
    alone = torch.cat([processor(ids[row : row + 1], logits[row : row + 1].clone()) for row in range(3)])
    assert torch.equal(at_once, alone)
