"""Processors and criteria may write into the text that they are shown: what stands there is what is read on."""

from contextlib import nullcontext

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from hfspec import Draft
from tests.models import FunctionSource, both, noisy, prompt, prompts, shared

SAMPLED = {"do_sample": True, "temperature": 0.8}
CALLS = {
    "greedy": {"do_sample": False},
    "sampled": SAMPLED,
    "without a cache": {"do_sample": False, "use_cache": False},
}


class WritingCriterion(StoppingCriteria):
    """Writes token 11 into a place of the text, whenever that has a length that five divides."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        if input_ids.shape[1] % 5 == 0:
            input_ids[:, self.place] = 11
        return torch.zeros(len(input_ids), dtype=torch.bool)


class WritingProcessor(LogitsProcessor):
    """The same."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % 5 == 0:
            input_ids[:, self.place] = 11
        return scores


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("place", [-1, -2, 3])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("keyword", "writer"), [("stopping_criteria", WritingCriterion), ("logits_processor", WritingProcessor)]
)
def test_what_was_written_is_read_on(keyword, writer, call, place, num_rows, is_inference):
    """The last place, the one before (in the cache already), one in the prompt; also where tensors keep no count."""
    model = shared("llama", attn="sdpa")
    given = prompts(*[9] * num_rows)
    with torch.inference_mode() if is_inference else nullcontext():
        pair = both(
            model,
            noisy("llama", attn="sdpa"),
            None,
            lambda: given | call | {"max_new_tokens": 18, keyword: [writer(place)]},
            draft_budget=6,
        )
    pair.assert_same().assert_drafted()


def test_a_written_text_is_not_the_draft_models():
    """A draft source is handed copies: what it writes stays with it."""

    def vandal(input_ids, budget, number):
        input_ids.fill_(5)
        return Draft(torch.full((1, budget.num_tokens), 7))

    call = {"max_new_tokens": 12, "do_sample": False}
    both(shared(), FunctionSource(vandal), prompt(), call, draft_budget=3).assert_same().assert_drafted()
