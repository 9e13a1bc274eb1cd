"""Every logits processor of the installed release that can work on text: same tokens, greedy and sampled."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import logits_process

from hfspec.sampling import processors as ours
from tests.models import VOCAB, Scripted, both, noisy, plain_text, prompt, shared

IDS = prompt(6)
SYNTHID = {
    "ngram_len": 3,
    "keys": [654, 400, 836],
    "sampling_table_size": 64,
    "sampling_table_seed": 0,
    "context_history_size": 16,
    "device": torch.device("cpu"),
}
#: How to make each, by class name.
TEXT: dict[str, Callable[[type], Any]] = {
    "AlternatingCodebooksLogitsProcessor": lambda make: make(6, 40, 20),
    "EncoderNoRepeatNGramLogitsProcessor": lambda make: make(1, IDS),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda make: make(3.0, IDS),
    "EpsilonLogitsWarper": lambda make: make(0.02),
    "EtaLogitsWarper": lambda make: make(0.02),
    "ExponentialDecayLengthPenalty": lambda make: make((2, 1.2), torch.tensor([5]), 6),
    "ForcedBOSTokenLogitsProcessor": lambda make: make(1),
    "ForcedEOSTokenLogitsProcessor": lambda make: make(20, torch.tensor([5])),
    "InfNanRemoveLogitsProcessor": lambda make: make(),
    "LogitNormalization": lambda make: make(),
    "MinLengthLogitsProcessor": lambda make: make(12, torch.tensor([5])),
    "MinNewTokensLengthLogitsProcessor": lambda make: make(6, 6, torch.tensor([5])),
    "MinPLogitsWarper": lambda make: make(0.1),
    "NoBadWordsLogitsProcessor": lambda make: make([[7], [8, 9], [48]], torch.tensor([5])),
    "NoRepeatNGramLogitsProcessor": lambda make: make(1),
    "PrefixConstrainedLogitsProcessor": lambda make: make(lambda batch, ids: list(range(3 + len(ids) % 5, 90)), 1),
    "RepetitionPenaltyLogitsProcessor": lambda make: make(3.0),
    "SequenceBiasLogitsProcessor": lambda make: make([[[48], -9.0], [[3, 4], 9.0]]),
    "SuppressTokensAtBeginLogitsProcessor": lambda make: make([48, 49], 6),
    "SuppressTokensLogitsProcessor": lambda make: make(list(range(40, 60))),
    "SynthIDTextWatermarkLogitsProcessor": lambda make: make(**SYNTHID),
    "TemperatureLogitsWarper": lambda make: make(2.0),
    "TopHLogitsWarper": lambda make: make(0.5),
    "TopKLogitsWarper": lambda make: make(3),
    "TopPLogitsWarper": lambda make: make(0.6),
    "TypicalLogitsWarper": lambda make: make(0.5),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda make: make(
        1.5, shared(), unconditional_ids=prompt(3, seed=9)
    ),
    "WatermarkLogitsProcessor": lambda make: make(VOCAB, "cpu"),
}
#: Bases, and those for speech, music and groups of beams, which read codebooks, time stamps or twice the rows.
OTHERS = {
    "BarkEosPrioritizerLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "HammingDiversityLogitsProcessor",
    "LogitsProcessor",
    "WhisperNoSpeechDetection",
    "WhisperTimeStampLogitsProcessor",
}


def installed() -> set[str]:
    found = vars(logits_process).items()
    base = logits_process.LogitsProcessor
    return {name for name, each in found if inspect.isclass(each) and issubclass(each, base)}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", sorted(set(TEXT) & installed()))
def test_processor(name, do_sample):
    """Position i is processed with exactly the prefix before it, whatever was drafted."""
    make = lambda: {  # noqa: E731 - a function, as both runs need a processor of their own
        "max_new_tokens": 20,
        "do_sample": do_sample,
        "logits_processor": [TEXT[name](getattr(logits_process, name))],
    }
    both(shared(), noisy(), IDS, make, draft_budget=4).assert_same().assert_drafted()
    script = Scripted(plain_text(shared(), IDS, **make()), [3, 0, 2])
    both(shared(), script, IDS, make, draft_budget=4).assert_same().assert_drafted()
    assert {outcome.num_accepted for outcome in script.outcomes} >= {0, 2, 3}


def test_no_processor_of_this_release_is_forgotten():
    """A class that a new release adds must be put into the table above, or named as not for text."""
    assert installed() <= set(TEXT) | OTHERS


def test_what_a_draft_may_apply_keeps_no_state():
    """No processor counted as stateless changes its own attributes when called."""
    for name in sorted({*ours._TOKEN_BLIND, *ours._TOKEN_AWARE} & installed()):
        processor = TEXT[name](getattr(logits_process, name))
        scores = torch.randn(1, VOCAB)
        first = processor(IDS, scores.clone())
        processor(prompt(9), torch.randn(1, VOCAB))
        assert torch.equal(processor(IDS, scores.clone()), first), name
