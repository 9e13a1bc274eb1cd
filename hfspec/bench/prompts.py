"""Where prompts come from, and how they become input ids. Knows nothing of methods or times."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hfspec.bench.builtin import BY_CATEGORY, RAW_CATEGORIES
from hfspec.bench.errors import BenchError


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        is_raw: text to be continued, not a message to be answered: no chat template.
    """

    id: str
    category: str
    text: str
    is_raw: bool = False


def built_in() -> list[Prompt]:
    """The 24 prompts of `hfspec.bench.builtin`."""
    return [
        Prompt(f"{category} {number}", category, text, category in RAW_CATEGORIES)
        for category, texts in BY_CATEGORY.items()
        for number, text in enumerate(texts, start=1)
    ]


def read(path: Path) -> list[Prompt]:
    """Read Spec-Bench's form: a JSON object a line with `question_id`, `category` and `turns`.

    The first turn is the prompt.

    Raises:
        BenchError: the file cannot be read, or a line has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--prompts {path}: the file cannot be read ({error}).") from error
    prompts = [_parse(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise BenchError(f"--prompts {path}: there is no prompt in this file.")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
        text = entry["turns"][0]
        if not isinstance(text, str):
            raise TypeError("the first turn is not a text")
        return Prompt(str(entry["question_id"]), str(entry["category"]), text)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(
            f"{where}: expected a JSON object with question_id, category and turns (a list of texts); "
            f"got {type(error).__name__}: {error}."
        ) from error


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Take `limit` prompts, as evenly from the categories as can be, in their original order."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    seen: dict[str, int] = {}
    turns = []
    for index, prompt in enumerate(prompts):
        turns.append((seen.get(prompt.category, 0), index))
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
    return [prompts[index] for index in sorted(index for _, index in sorted(turns)[:limit])]


def encode(tokenizer: Any, prompts: Sequence[Prompt], device: str) -> dict[str, torch.Tensor]:
    """Input ids and their mask, `[prompts, longest]`, shorter rows padded at the left."""
    rows = [_ids(tokenizer, prompt) for prompt in prompts]
    # Any id will do as padding: the mask hides it.
    padding = {"input_ids": tokenizer.pad_token_id or 0, "attention_mask": 0}
    values = {"input_ids": rows, "attention_mask": [torch.ones_like(row) for row in rows]}
    return {
        name: pad_sequence(values[name], batch_first=True, padding_value=value, padding_side="left").to(device)
        for name, value in padding.items()
    }


def _ids(tokenizer: Any, prompt: Prompt) -> torch.Tensor:
    """What the model is to read, `[length]`: the tokenizer's chat template, where there is one, around the text."""
    text, is_chat = prompt.text, bool(tokenizer.chat_template) and not prompt.is_raw
    if is_chat:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    # A template brings its special tokens itself; the tokenizer's own would be doubled.
    ids: torch.Tensor = tokenizer(text, add_special_tokens=not is_chat, return_tensors="pt")["input_ids"][0]
    return ids
