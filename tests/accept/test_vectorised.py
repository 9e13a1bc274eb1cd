"""All states at once come to what the walk comes to: verdicts, texts, random numbers, records, streams."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import EosTokenCriteria, GenerationConfig
from transformers.utils import ModelOutput

from hfspec import Draft, Texts
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
    "until a length": [MinLengthLogitsProcessor(13, EOS)],
    "both": [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(1.2)],
}
ENDS = {
    "length": list,
    "tokens": lambda: [EosTokenCriteria(EOS)],
    "strings": lambda: [StopStringCriteria(char_tokenizer(), ["a", "bc", "xyz"])],
    "tokens and strings": lambda: [EosTokenCriteria(EOS), StopStringCriteria(char_tokenizer(), ["a", "bc", "xyz"])],
}
SHAPES = {
    "a chain": (1, False, False),
    "a tree": (1, True, False),
    "chains": (4, False, False),
    "trees": (4, True, False),
    "chains in step": (4, False, True),
}


class Streamed:
    """A streamer that notes, and raises at its n-th token."""

    def __init__(self, raises_at: int) -> None:
        self.raises_at, self.seen = raises_at, []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())
        if len(self.seen) == self.raises_at:
            raise ConnectionError


@dataclass(frozen=True)
class Case:
    """One round to settle: texts, logits, a draft as the loop lets it through, and the call they belong to."""

    texts: Sequence[torch.Tensor]
    logits: torch.Tensor
    draft: Draft
    max_length: int
    is_in_step: bool
    is_seeded: bool
    processors: str = "none"
    ends: str = "length"
    ended: Sequence[int] = ()
    raises_at: int | None = None

    @property
    def pad_id(self) -> int | None:
        return PAD if self.is_in_step and "tokens" in self.ends else None

    @property
    def may_stream(self) -> bool:
        return self.is_in_step or len(self.texts) == 1

    def acceptor(
        self, is_vectorised: bool, noise: BatchNoise
    ) -> tuple[Texts, Record, Streamed | None, Walk | Vectorised]:
        texts = uneven([text.clone() for text in self.texts])
        for row in self.ended:
            texts.has_ended[row] = True
        num_rows = len(self.texts)
        rule = Seeded(noise) if self.is_seeded else Greedy()
        streamer = None if self.raises_at is None else Streamed(self.raises_at)
        config = GenerationConfig(return_dict_in_generate=True, output_scores=True, output_logits=True)
        record = Record(config if self.may_stream else GenerationConfig())
        each = [LogitsProcessorList(PROCESSORS[self.processors])] * (1 if self.is_in_step else num_rows)
        criteria = StoppingCriteriaList([MaxLengthCriteria(self.max_length), *ENDS[self.ends]()])
        shared = (criteria, record, self.is_in_step, self.pad_id, streamer)
        acceptor = Walk(texts, rule, each, *shared)
        if is_vectorised:
            acceptor = Vectorised(acceptor, texts, rule, Processing(texts, each, self.is_in_step), *shared)
        return texts, record, streamer, acceptor

    def settled(self, is_vectorised: bool, noise: BatchNoise | None = None, num_before: int = 0) -> tuple[Any, ...]:
        """Settle it over copies of everything, after so many random numbers; all that comes of it."""
        noise = noise or BatchNoise(len(self.texts))
        texts, record, streamer, acceptor = self.acceptor(is_vectorised, noise)
        torch.manual_seed(7)
        torch.rand(num_before)
        verified = Verified(self.logits.clone(), ModelOutput(), num_read=self.logits.shape[1])
        try:
            outcomes = acceptor.settle(self.draft, verified)
            verdicts = [(each.num_judged, each.path, each.token_ids, each.has_ended) for each in outcomes]
            assert outcomes.num_committed_on(torch.device("cpu")).tolist() == outcomes.num_committed
        except (ConnectionError, RuntimeError) as error:
            verdicts = (type(error), str(error))
        written = [texts.ids(row, 0) for row in range(len(self.texts))]
        scores = str([[each.tolist() for each in kept or ()] for kept in (record.scores, record._logits)])  # nan is nan
        seen = None if streamer is None else streamer.seen
        return verdicts, written, texts.has_ended, torch.get_rng_state().tolist(), scores, seen


def assert_alike(case: Case) -> tuple[Any, ...]:
    """What the walk does with it, which is what the other does."""
    expected = case.settled(False)
    assert case.settled(True) == expected
    return expected


def drawn(rng: random.Random, shape: str, bad: float | None = None, **call: Any) -> Case:
    """Texts, logits and a draft that follows the likeliest tokens for a while, siblings with one token among them."""
    num_rows, is_tree, is_in_step = SHAPES[shape]
    ends = call.get("ends", "length")
    torch.manual_seed(rng.randrange(1 << 30))
    lengths = [rng.randrange(2, 13)] * num_rows if is_in_step else [rng.randrange(2, 13) for _ in range(num_rows)]
    texts = [prompt(length, seed=rng.randrange(1 << 30)) for length in lengths]
    num_nodes = rng.randrange(0, 17)
    logits = 3 * torch.randn(num_rows, 1 + num_nodes, VOCAB)
    for _ in range(rng.randrange(3)):  # ends come up
        logits[rng.randrange(num_rows), rng.randrange(1 + num_nodes), rng.choice([*EOS, 67])] = 50.0
    if bad is not None:
        logits[rng.randrange(num_rows), rng.randrange(1 + num_nodes)] = bad
    ids = torch.empty(num_rows, num_nodes, dtype=torch.long)
    parents = torch.empty(num_rows, num_nodes, dtype=torch.long)
    for row in range(num_rows):
        states = {(): 0}  # siblings with one token have one future
        paths = [()]
        for node in range(num_nodes):
            parent = rng.randrange(-1, node) if is_tree else node - 1
            if is_tree and rng.random() < 0.5:
                parent = node - 1  # deep ones too
            parents[row, node] = parent
            is_right = rng.random() < 0.85
            ids[row, node] = int(logits[row, parent + 1].argmax()) if is_right else rng.randrange(5, VOCAB)
            paths.append((*paths[parent + 1], int(ids[row, node])))
            logits[row, node + 1] = logits[row, states.setdefault(paths[-1], node + 1)]
    ended = [row for row in range(num_rows) if is_in_step and ends != "length" and rng.random() < 0.2][1:]
    if "tokens" in ends:
        ids[ended] = PAD
    draft = Draft(ids, parents if is_tree and num_nodes else None)
    if not is_in_step:
        sizes = [rng.randrange(num_nodes + 1) for _ in range(num_rows)]
        sizes[rng.randrange(num_rows)] = num_nodes
        draft = draft.cut(sizes)
    max_length = max(lengths) + 1 + rng.randrange(20)
    limits = [max_length - length - 1 for length in lengths]
    draft = draft.no_deeper([min(limits)] * num_rows if is_in_step else limits)
    logits = logits[:, : 1 + draft.num_tokens]
    return Case(texts, logits, draft, max_length, is_in_step, ended=ended, **call)


any_case = given(
    rng=st.randoms(use_true_random=True),
    processors=st.sampled_from(list(PROCESSORS)),
    ends=st.sampled_from(list(ENDS)),
    is_seeded=st.booleans(),
)
each_shape = pytest.mark.parametrize("shape", SHAPES)
streaming_shapes = pytest.mark.parametrize("shape", ["a chain", "a tree", "chains in step"])


@each_shape
@any_case
def test_all_at_once_is_what_the_walk_does(shape, rng, processors, ends, is_seeded):
    """For random texts, logits and drafts; rows in step may have ended before."""
    assert_alike(drawn(rng, shape, processors=processors, ends=ends, is_seeded=is_seeded))


@streaming_shapes
@any_case
def test_a_streamer_sees_the_same(shape, rng, processors, ends, is_seeded):
    """Also where it raises: the tokens before are committed and drawn, and no more."""
    raises_at = rng.choice([0, 1, 2, 3, 4, 8])
    call = {"processors": processors, "ends": ends, "is_seeded": is_seeded, "raises_at": raises_at}
    verdicts, *_, seen = assert_alike(drawn(rng, shape, **call))
    assert (verdicts[0] is ConnectionError) == (len(seen) == raises_at)


@each_shape
@any_case
def test_a_state_without_a_distribution_gets_vanillas_error(shape, rng, processors, ends, is_seeded):
    """Where the path comes to it, after the tokens before it; greedy takes it as it comes."""
    bad = rng.choice([float("nan"), float("inf"), -float("inf")])
    assert_alike(drawn(rng, shape, bad, processors=processors, ends=ends, is_seeded=is_seeded))


class Busy(BatchNoise):
    """Another thread draws once, just before draws are made for the `nth` time."""

    def __init__(self, num_rows: int, nth: int) -> None:
        super().__init__(num_rows)
        self.nth = nth

    def advance(self, rows: Sequence[int], nums: Sequence[int]) -> bool:
        self.nth -= 1
        if self.nth == 0:
            torch.rand(3)
        return super().advance(rows, nums)


@each_shape
@any_case
def test_draws_of_other_threads_are_seen(shape, rng, processors, ends, is_seeded):
    """Noise drawn between the look and the choice: the round is settled anew, with the noise there is."""
    case = drawn(rng, shape, processors=processors, ends=ends, is_seeded=True)
    noise = Busy(len(case.texts), nth=1)
    settled = case.settled(True, noise)
    was_asked = noise.nth < 1  # not by the walk, which does short texts with stop strings
    assert settled == case.settled(False, num_before=3 if was_asked else 0)
    assert was_asked or "strings" in ends


@streaming_shapes
@any_case
def test_tokens_that_were_streamed_stay_where_another_thread_draws(shape, rng, processors, ends, is_seeded):
    """The round ends with them, as if the draft went no further, rows in step that have ended by then included."""
    case = drawn(rng, shape, processors=processors, ends=ends, is_seeded=True, raises_at=0)
    num_streamed, num_rows = rng.randrange(1, 5), len(case.texts)
    noise = Busy(num_rows, nth=num_streamed + 1)
    verdicts, written, has_ended, state, *noted = case.settled(True, noise)
    if noise.nth > 0:  # nobody was in between
        assert (verdicts, written, has_ended, state, *noted) == case.settled(False)
        return
    cut = replace(case, draft=case.draft.no_deeper([num_streamed - 1] * num_rows))
    walked, *expected, _, scores, seen = cut.settled(False)
    torch.rand(3)
    assert [each[2:] for each in verdicts] == [each[2:] for each in walked]
    assert [written, has_ended, state, *noted] == [*expected, torch.get_rng_state().tolist(), scores, seen]
