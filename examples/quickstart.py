"""The one line and what it brings: the same answer, sooner, and the counts that say why.

python examples/quickstart.py
python examples/quickstart.py --dtype float32      # on a CPU without bf16 instructions
python examples/quickstart.py --target my/model --draft my/small-model
"""

import time

import torch
import typer

import hfspec
from hfspec.weights.fetch import load

PROMPT = "Write a Python function that says whether a word is a palindrome, with a docstring and two tests."


def main(
    target: str = "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    draft: str = "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    dtype: str = "bfloat16",
    max_new_tokens: int = 96,
) -> tuple[torch.Tensor, torch.Tensor, hfspec.Stats]:
    """Generate plainly, then with hfspec; returns both outputs and the counts."""
    model, tokenizer = load(target, getattr(torch, dtype), device_map="auto")
    small_model, _ = load(draft, getattr(torch, dtype), device_map="auto")
    chat = [{"role": "user", "content": PROMPT}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = dict(encoded.to(model.device)) | {"max_new_tokens": max_new_tokens, "do_sample": False}

    started = time.perf_counter()
    plain = model.generate(**inputs)
    plain_seconds = time.perf_counter() - started

    hfspec.patch(model, draft=small_model)

    started = time.perf_counter()
    fast = model.generate(**inputs)
    seconds = time.perf_counter() - started

    print(tokenizer.decode(fast[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"\nplain {plain_seconds:.1f} s, hfspec {seconds:.1f} s, same tokens: {torch.equal(plain, fast)}")
    stats = hfspec.stats(model)
    print(stats)

    hfspec.unpatch(model)  # and the model is as it was
    return plain, fast, stats


if __name__ == "__main__":
    typer.run(main)
