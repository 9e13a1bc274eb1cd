"""What a draft applies is the law that vanilla's own processing gives."""

import itertools

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as host

from hfspec.sampling.processors import DraftProcessors, stateless
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
