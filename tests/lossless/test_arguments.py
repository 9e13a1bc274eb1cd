"""Every argument of `generate()`, and every field of a generation config: what vanilla makes of it, we make of it.

A release that brings a new one fails here until somebody has thought about it.
"""

import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import hfspec
from tests.models import Scripted, assert_same, build, char_tokenizer, noisy, prompt, prompts

NEW = 20
#: Arguments of Hugging Face's own ways to speculate, which do nothing in other calls.
OF_ASSISTED = {
    "assistant_confidence_threshold": 0.2,
    "assistant_ensemble_weight": 0.3,
    "assistant_lookbehind": 4,
    "max_matching_ngram_size": 3,
    "num_assistant_tokens": 7,
    "num_assistant_tokens_schedule": "constant",
    "target_lookbehind": 4,
}
#: Arguments of beams, which do nothing in other calls.
OF_BEAMS = {"early_stopping": True, "length_penalty": 0.7, "low_memory": True}
#: Not arguments, or the prompt itself, which every case has.
NO_ARGUMENTS = {
    "_commit_hash",
    "_from_model_config",
    "transformers_version",
    "self",
    "inputs",
    "kwargs",
}


class EndsAtLength(StoppingCriteria):
    """Ends each row at another length."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.arange(input_ids.shape[0]) + 18 <= input_ids.shape[1]


class Silent(BaseStreamer):
    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A call that gives one argument a sense.

    Attributes:
        make: makes the keywords anew.
        num_rows: of the three prompts, so many.
        reason: words of the reason why it runs plain; `None` if it is sped up.
        may_fail: whether vanilla itself may refuse it, on some release or without the network.
    """

    make: Callable[[], dict[str, Any]]
    num_rows: int = 3
    reason: str | None = None
    may_fail: bool = False
    arch: str = "llama"


def case(num_rows: int = 3, reason: str | None = None, may_fail: bool = False, arch: str = "llama", **call: Any):
    """A `Case` of keywords that keep nothing."""
    return Case(lambda: dict(call), num_rows, reason, may_fail, arch)


CASES: dict[str, Case] = {
    **{name: case(**{name: value}) for name, value in (OF_ASSISTED | OF_BEAMS).items()},
    "assistant_early_exit": case(num_rows=1, reason="assisted", assistant_early_exit=1),
    "assistant_model": Case(lambda: {"assistant_model": noisy()}, num_rows=1, reason="assisted"),
    "bad_words_ids": case(bad_words_ids=[[5], [7, 8], [9]]),
    "begin_suppress_tokens": case(begin_suppress_tokens=list(range(3, 60))),
    "bos_token_id": case(bos_token_id=2),
    "cache_config": case(cache_config={}, may_fail=True),
    "cache_implementation": case(cache_implementation="static", disable_compile=True),
    "compile_config": Case(lambda: {"compile_config": CompileConfig(), "disable_compile": True}),
    "constraints": case(constraints=[], may_fail=True),
    "continuous_batching_config": case(continuous_batching_config=None),
    "custom_generate": Case(
        lambda: {"custom_generate": GenerationMixin._sample}, num_rows=1, reason="custom_generate", may_fail=True
    ),
    "decoder_start_token_id": case(decoder_start_token_id=5, arch="t5"),
    "disable_compile": case(disable_compile=True),
    "diversity_penalty": case(diversity_penalty=0.5, may_fail=True),
    "do_sample": case(do_sample=True),
    "dola_layers": case(dola_layers="low", may_fail=True, reason="custom_generate"),
    "encoder_no_repeat_ngram_size": case(encoder_no_repeat_ngram_size=2, arch="t5"),
    "encoder_repetition_penalty": case(encoder_repetition_penalty=1.5, arch="t5"),
    "eos_token_id": case(eos_token_id=[4, *range(20, 24)]),
    "epsilon_cutoff": case(do_sample=True, epsilon_cutoff=0.01),
    "eta_cutoff": case(do_sample=True, eta_cutoff=0.01),
    "exponential_decay_length_penalty": case(eos_token_id=4, exponential_decay_length_penalty=(3, 1.3)),
    "force_words_ids": case(force_words_ids=[[5]], num_beams=2, may_fail=True, reason="beam"),
    "forced_bos_token_id": case(forced_bos_token_id=9, arch="t5"),
    "forced_eos_token_id": case(forced_eos_token_id=9),
    "generation_config": Case(
        lambda: {"generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=5, pad_token_id=0)}
    ),
    "guidance_scale": case(guidance_scale=1.7, num_rows=1),
    "is_assistant": case(is_assistant=True, reason="assistant", may_fail=True),
    "logits_processor": Case(lambda: {"logits_processor": [MinLengthLogitsProcessor(14, 4)], "eos_token_id": 4}),
    "max_cache_len": case(cache_implementation="static", max_cache_len=64, disable_compile=True, may_fail=True),
    "max_length": case(max_length=21, max_new_tokens=None),
    "max_new_tokens": case(max_new_tokens=13),
    "max_time": case(max_time=1e6),
    "min_length": case(min_length=18, eos_token_id=[4, *range(20, 40)]),
    "min_new_tokens": case(min_new_tokens=11, eos_token_id=[4, *range(20, 40)]),
    "min_p": case(do_sample=True, min_p=0.05),
    "negative_prompt_attention_mask": Case(
        lambda: {
            "guidance_scale": 1.7,
            "negative_prompt_ids": prompt(5, seed=9),
            "negative_prompt_attention_mask": torch.tensor([[0, 1, 1, 1, 1]]),
        },
        num_rows=1,
    ),
    "negative_prompt_ids": Case(lambda: {"guidance_scale": 1.7, "negative_prompt_ids": prompt(5, seed=9)}, num_rows=1),
    "no_repeat_ngram_size": case(no_repeat_ngram_size=2),
    "num_beam_groups": case(num_beam_groups=2, num_beams=4, may_fail=True, reason="beam"),
    "num_beams": case(num_beams=2, reason="beam"),
    "num_return_sequences": case(num_return_sequences=2, do_sample=True),
    "output_attentions": case(output_attentions=True, return_dict_in_generate=True),
    "output_hidden_states": case(output_hidden_states=True, return_dict_in_generate=True),
    "output_logits": case(output_logits=True, return_dict_in_generate=True),
    "output_scores": case(output_scores=True, return_dict_in_generate=True, top_k=5, do_sample=True),
    "pad_token_id": case(pad_token_id=3, eos_token_id=[4, *range(20, 40)]),
    "penalty_alpha": case(penalty_alpha=0.6, top_k=4, may_fail=True, reason="custom_generate"),
    "prefill_chunk_size": case(prefill_chunk_size=4),
    "prefix_allowed_tokens_fn": case(
        prefix_allowed_tokens_fn=lambda row, ids: [int(ids[-1]) % 90 + 3 + row, 5, 50, 61]
    ),
    "prompt_lookup_num_tokens": case(num_rows=1, prompt_lookup_num_tokens=3, eos_token_id=4, reason="assisted"),
    "remove_invalid_values": case(remove_invalid_values=True),
    "renormalize_logits": case(renormalize_logits=True, do_sample=True, top_k=9),
    "repetition_penalty": case(repetition_penalty=1.4),
    "return_dict_in_generate": case(return_dict_in_generate=True),
    "return_legacy_cache": case(return_legacy_cache=True, return_dict_in_generate=True, may_fail=True),
    "sequence_bias": case(sequence_bias=[[[5], 3.0], [[7, 8], -9.0]]),
    "speculation_type": case(speculation_type=None),
    "stop_strings": Case(lambda: {"stop_strings": ["a", "?b", "Q"], "tokenizer": char_tokenizer()}),
    "stopping_criteria": Case(lambda: {"stopping_criteria": [EndsAtLength()]}),
    "streamer": Case(lambda: {"streamer": Silent()}, num_rows=1),
    "suppress_tokens": case(suppress_tokens=list(range(3, 50))),
    "synced_gpus": case(synced_gpus=False),
    "temperature": case(do_sample=True, temperature=2.5),
    "token_healing": Case(lambda: {"token_healing": True, "tokenizer": char_tokenizer()}, may_fail=True),
    "top_h": case(do_sample=True, top_h=0.4),
    "top_k": case(do_sample=True, top_k=3),
    "top_p": case(do_sample=True, top_p=0.7),
    "typical_p": case(do_sample=True, typical_p=0.6),
    "use_cache": case(use_cache=False),
    "use_model_defaults": case(use_model_defaults=False),
    "use_mtp": case(use_mtp=True, may_fail=True, reason="assisted"),
    "watermarking_config": Case(lambda: {"watermarking_config": WatermarkingConfig(bias=4.0)}),
    "watermarking_config (SynthID)": Case(
        lambda: {
            "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]),
            "do_sample": True,
        }
    ),
}


def arguments_of_the_release() -> set[str]:
    return {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters} - NO_ARGUMENTS


def test_every_argument_of_this_release_has_a_case():
    assert arguments_of_the_release() <= set(CASES)


@dataclass
class Outcome:
    """What came of a call."""

    result: Any
    error: str | None
    warned: list[str]
    random_state: torch.Tensor


def outcome(model: Any, call: dict[str, Any]) -> Outcome:
    torch.manual_seed(0)
    result, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = model.generate(**call)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    # Addresses of objects differ from call to call.
    warned = [re.sub(r"0x[0-9a-f]+", "", str(each.message)) for each in caught]
    return Outcome(result, error, warned, torch.get_rng_state())


IN_RELEASE = [name for name in CASES if name.split()[0] in arguments_of_the_release()]


@pytest.mark.parametrize("name", IN_RELEASE)
def test_an_argument_does_what_it_does_in_vanilla(name):
    """Same result or same error, same warnings, same random numbers, and sped up unless there is a reason."""
    given = CASES[name]
    inputs = {key: value[: given.num_rows] for key, value in prompts(9, 6, 8).items()}

    def call() -> dict[str, Any]:
        made = given.make()
        limit = {} if "generation_config" in made else {"max_new_tokens": NEW, "pad_token_id": 0}
        return inputs | limit | made

    # Not float64, in which vanilla itself gives nan behind padding.
    target = build(given.arch, dtype=torch.float32)
    expected = outcome(target, call())
    text = getattr(expected.result, "sequences", expected.result)
    draft = noisy(given.arch) if text is None else Scripted(text, accepts=(2, 0, 3, 1))
    with hfspec.patched(target, draft, draft_budget=4):
        found = outcome(target, call())
        last = hfspec.stats(target).last
    assert found.error == expected.error
    assert found.warned == expected.warned
    if expected.error is not None:
        assert given.may_fail, expected.error
        return
    assert_same(expected.result, found.result)
    assert torch.equal(found.random_state, expected.random_state)
    if given.reason is None:
        assert last.fallback_reason is None
        assert last.drafted_tokens > 0
        assert last.accepted_tokens > 0
    else:
        assert given.reason in (last.fallback_reason or "")
