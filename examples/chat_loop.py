"""A conversation in which nothing is read twice: each turn hands its cache to the next.

python examples/chat_loop.py                    # three turns from the list below
python examples/chat_loop.py --interactive      # yours; an empty line ends it
"""

from collections.abc import Iterator
from typing import Any

import torch
import typer

import hfspec
from hfspec.weights.fetch import load

TURNS = ("Name a data structure with fast lookups.", "When is it slow?", "Show it in three lines of Python.")


def main(
    target: str = "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    draft: str = "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    dtype: str = "bfloat16",
    max_new_tokens: int = 64,
    interactive: bool = False,
) -> tuple[torch.Tensor, hfspec.Stats]:
    """Hold the conversation; returns all its ids and the counts."""
    model, tokenizer = load(target, getattr(torch, dtype), device_map="auto")
    small_model, _ = load(draft, getattr(torch, dtype), device_map="auto")
    hfspec.patch(model, draft=small_model)

    chat: list[dict[str, str]] = []
    ids, text = torch.empty(1, 0, dtype=torch.long, device=model.device), ""
    cache: dict[str, Any] = {}
    for question in _typed() if interactive else TURNS:
        chat.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        # Only what was added is encoded: the ids so far are those that the cache was made from.
        added = tokenizer(prompt.removeprefix(text), add_special_tokens=False, return_tensors="pt").input_ids
        ids = torch.cat([ids, added.to(model.device)], dim=-1)
        call = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **call, **cache)
        name = "cache" if "cache" in out else "past_key_values"  # transformers 5.24 renamed it
        cache = {name: out[name]}
        new_ids, ids = out.sequences[0, ids.shape[1] :], out.sequences
        chat.append({"role": "assistant", "content": tokenizer.decode(new_ids, skip_special_tokens=True)})
        text = prompt + tokenizer.decode(new_ids)
        print(f"> {question}\n{chat[-1]['content']}\n")
    print(hfspec.stats(model))
    return ids, hfspec.stats(model)


def _typed() -> Iterator[str]:
    while question := input("> ").strip():
        yield question


if __name__ == "__main__":
    typer.run(main)
