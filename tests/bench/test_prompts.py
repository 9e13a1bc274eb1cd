"""Prompts: the built-in set, Spec-Bench's form, spreading, and the chat template."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from hfspec.bench.errors import BenchError
from hfspec.bench.prompts import Prompt, built_in, encode, read, spread


def test_built_in_has_four_different_prompts_of_each_kind() -> None:
    prompts = built_in()
    assert set(Counter(prompt.category for prompt in prompts).values()) == {4}
    assert len({prompt.category for prompt in prompts}) == 6
    assert len({prompt.text for prompt in prompts}) == len({prompt.id for prompt in prompts}) == 24


def test_only_code_to_be_completed_is_raw() -> None:
    assert {prompt.category for prompt in built_in() if prompt.is_raw} == {"code completion"}


def test_texts_that_are_worked_on_have_a_realistic_length() -> None:
    for prompt in built_in():
        if prompt.category in ("summarise", "rewrite", "question"):
            assert 90 <= len(prompt.text.split()) <= 320, prompt.id


def test_read_takes_the_first_turn(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    entry = {"question_id": 81, "category": "writing", "turns": ["first", "second"]}
    path.write_text(json.dumps(entry) + "\n\n")
    assert read(path) == [Prompt("81", "writing", "first")]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"category": "a", "turns": ["x"]}',
        '{"question_id": 1, "category": "a", "turns": []}',
    ],
)
def test_a_line_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["x"]}\n' + line)
    with pytest.raises(BenchError, match="line 2"):
        read(path)


def test_a_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BenchError, match="no prompt"):
        read(tmp_path / "empty.jsonl")


def test_spread_takes_evenly_from_the_categories_in_order() -> None:
    prompts = [Prompt(f"{category}{n}", category, "") for category, num in (("a", 5), ("b", 2)) for n in range(num)]
    assert [prompt.id for prompt in spread(prompts, 4)] == ["a0", "a1", "b0", "b1"]
    assert [prompt.id for prompt in spread(prompts, 5)] == ["a0", "a1", "a2", "b0", "b1"]
    assert spread(prompts, None) == spread(prompts, 99) == prompts


@pytest.fixture
def tokenizer(pair_folders: tuple[str, str]) -> Any:
    """Of the tiny pair; like Llama's, it puts a token before every text, which its chat template has, too."""
    tokenizer = AutoTokenizer.from_pretrained(pair_folders[0])
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[end])
    tokenizer.chat_template = "<end>" + tokenizer.chat_template
    return tokenizer


def test_chat_goes_through_the_template_and_raw_text_does_not(tokenizer: Any) -> None:
    chat = encode(tokenizer, [Prompt("1", "a", "hello")], "cpu")
    raw = encode(tokenizer, [Prompt("1", "a", "hello", is_raw=True)], "cpu")
    assert tokenizer.decode(chat["input_ids"][0]) == "<end><hello>"
    assert tokenizer.decode(raw["input_ids"][0]) == "<end>hello"
    assert bool(chat["attention_mask"].all())


def test_several_prompts_are_each_encoded_as_alone_and_padded_at_the_left(tokenizer: Any) -> None:
    prompts = [Prompt("1", "a", "hello"), Prompt("2", "a", "hi", is_raw=True), Prompt("3", "a", "good morning")]
    together = encode(tokenizer, prompts, "cpu")
    assert together["input_ids"].shape == together["attention_mask"].shape
    for prompt, ids, mask in zip(prompts, together["input_ids"], together["attention_mask"], strict=True):
        alone = encode(tokenizer, [prompt], "cpu")["input_ids"][0]
        assert mask.tolist() == [0] * (len(ids) - len(alone)) + [1] * len(alone)
        assert torch.equal(ids[mask.bool()], alone)
