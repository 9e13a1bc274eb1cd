"""All states at once come to what the walk comes to: verdicts, texts, random numbers, records, streams."""

import random

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import EosTokenCriteria, GenerationConfig
from transformers.utils import ModelOutput

from hfspec import Draft
from hfspec.accept.processing import Processing
from hfspec.accept.record import Record
from hfspec.accept.rules import Greedy, Seeded
from hfspec.accept.vectorised import Vectorised
from hfspec.accept.walk import Walk
from hfspec.rounds import Verified
from hfspec.sampling.noise import BatchNoise
from tests.models import PAD, char_tokenizer, prompt
from tests.rounds import uneven

VOCAB, EOS = 97, [3, 4]
PROCESSORS = {
    "none": [],
    "token-blind": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)],
    "looking at the text": [RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2)],
    "both": [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(1.2)],
}
ENDS = {
    "length": list,
    "tokens": lambda: [EosTokenCriteria(EOS)],
    "strings": lambda: [StopStringCriteria(char_tokenizer(), ["a", "bc", "xyz"])],
}


class Streamed:
    """A streamer that notes, and raises at its n-th token."""

    def __init__(self, raises_at: int) -> None:
        self.raises_at, self.seen = raises_at, []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())
        if len(self.seen) == self.raises_at:
            raise ConnectionError


def settled(is_vectorised, texts, draft, logits, processors, ends, is_seeded, is_in_step, raises_at=None, ended=()):
    """One round over copies of everything; all that comes of it."""
    texts = uneven([text.clone() for text in texts])
    texts.num_prompt = 0
    for row in ended:
        texts.has_ended[row] = True
    num_rows = draft.num_rows
    torch.manual_seed(7)
    rule = Seeded(BatchNoise(num_rows)) if is_seeded else Greedy()
    streamer = None if raises_at is None else Streamed(raises_at)
    config = GenerationConfig(return_dict_in_generate=True, output_scores=True, output_logits=True)
    record = Record(config if num_rows == 1 or is_in_step else GenerationConfig())
    each = [LogitsProcessorList(PROCESSORS[processors])] * (1 if is_in_step else num_rows)
    criteria = StoppingCriteriaList([MaxLengthCriteria(40), *ENDS[ends]()])
    pad_id = PAD if ends == "tokens" and is_in_step else None
    acceptor = Walk(texts, rule, each, criteria, record, is_in_step, pad_id, streamer)
    if is_vectorised:
        processing = Processing(texts, each, is_in_step)
        acceptor = Vectorised(acceptor, texts, rule, processing, criteria, record, is_in_step, pad_id, streamer)
    try:
        verdicts = [
            (each.num_judged, each.num_accepted, each.token_ids, each.has_ended)
            for each in acceptor.settle(draft, verified(logits))
        ]
    except (ConnectionError, RuntimeError) as error:
        verdicts = type(error)
    scores = str([each.tolist() for each in record.scores or ()])  # nan equals nan there
    seen = None if streamer is None else streamer.seen
    return verdicts, texts.whole(PAD).tolist(), texts.has_ended, torch.get_rng_state().tolist(), scores, seen


def verified(logits):
    return Verified(logits, ModelOutput(), num_read=logits.shape[1])


def drawn(seed, num_rows, is_tree, is_in_step):
    """Texts, logits and a draft that follows the likeliest tokens for a while, siblings and all."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    texts = [prompt(9 if is_in_step else 8 + rng.randrange(5), seed=seed + row) for row in range(num_rows)]
    num_nodes = rng.randrange(0, 9)
    logits = 3 * torch.randn(num_rows, 1 + num_nodes, VOCAB)
    if rng.random() < 0.5:  # ends come up
        logits[:, rng.randrange(1 + num_nodes), EOS[0]] = 50.0
    ids = torch.empty(num_rows, num_nodes, dtype=torch.long)
    parents = torch.empty(num_rows, num_nodes, dtype=torch.long)
    for row in range(num_rows):
        states = {(): 0}  # siblings with one token have one future
        paths = [()]
        for node in range(num_nodes):
            parent = rng.randrange(-1, node) if is_tree else node - 1
            parents[row, node] = parent
            is_right = rng.random() < 0.8
            ids[row, node] = int(logits[row, parent + 1].argmax()) if is_right else rng.randrange(5, VOCAB)
            paths.append((*paths[parent + 1], int(ids[row, node])))
            logits[row, node + 1] = logits[row, states.setdefault(paths[-1], node + 1)]
    lengths = [num_nodes] * num_rows
    if not is_in_step:
        lengths = [rng.randrange(num_nodes + 1) for _ in range(num_rows)]
        lengths[rng.randrange(num_rows)] = num_nodes
    return texts, logits, Draft(ids, parents if is_tree and num_nodes else None).cut(lengths)


@pytest.mark.parametrize("is_seeded", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize(
    ("num_rows", "is_tree", "is_in_step"),
    [(1, False, False), (1, True, False), (4, False, False), (4, True, False), (4, False, True)],
    ids=["a chain", "a tree", "chains", "trees", "chains in step"],
)
def test_all_at_once_is_what_the_walk_does(num_rows, is_tree, is_in_step, processors, ends, is_seeded):
    """For random texts, logits and drafts; rows in step may have ended before."""
    for seed in range(12):
        texts, logits, draft = drawn(seed, num_rows, is_tree, is_in_step)
        ended = [seed % 4] if is_in_step and ends == "tokens" and seed % 3 == 0 else []
        call = (texts, draft, logits, processors, ends, is_seeded, is_in_step, None, ended)
        assert settled(True, *call) == settled(False, *call), seed


@pytest.mark.parametrize("is_seeded", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("raises_at", [1, 2, 4])
def test_a_streamer_that_raises_ends_both_alike(raises_at, is_seeded):
    """The tokens before it are committed and drawn, and no more."""
    for seed in range(8):
        texts, logits, draft = drawn(seed, 1, False, False)
        call = (texts, draft, logits, "none", "length", is_seeded, False, raises_at)
        assert settled(True, *call) == settled(False, *call), seed


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_without_a_distribution_gets_vanillas_error(bad):
    """Where the path comes to it; the tokens before are committed."""
    for seed in range(8):
        texts, logits, draft = drawn(seed, 1, False, False)
        logits[:, draft.num_tokens // 2] = bad
        call = (texts, draft, logits, "none", "length", True, False)
        assert settled(True, *call) == settled(False, *call), seed


def test_draws_of_other_threads_are_seen(monkeypatch):
    """Where noise was drawn between the look and the choice, the round is settled anew, with the noise there is."""
    texts, logits, draft = drawn(3, 1, False, False)
    call = (texts, draft, logits, "none", "length", True, False)
    honest, refused = BatchNoise.advance, []

    def late(self, rows, nums):
        if not refused:
            refused.append(rows)
            self._forget_ahead()
            return False
        return honest(self, rows, nums)

    expected = settled(True, *call)
    monkeypatch.setattr(BatchNoise, "advance", late)
    assert settled(True, *call) == expected
    assert refused
