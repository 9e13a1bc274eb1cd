"""Code around the model stays as it is: a chat pipeline, with the text shown while it is written.

hfspec's own keywords, here a fixed draft budget, go through the pipeline to `generate()`.

    python examples/pipeline_and_streamer.py
    python examples/pipeline_and_streamer.py --dtype float32      # on a CPU without bf16 instructions
"""

import torch
import typer
from transformers import TextStreamer, pipeline

import hfspec
from hfspec.weights.fetch import load

PROMPT = "Write a SQL query that lists the five customers with the highest total order value."


def main(
    target: str = "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    draft: str = "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    dtype: str = "bfloat16",
    max_new_tokens: int = 96,
) -> tuple[str, hfspec.Stats]:
    """Stream one answer; returns it, and the counts."""
    model, tokenizer = load(target, getattr(torch, dtype), device_map="auto")
    small_model, _ = load(draft, getattr(torch, dtype), device_map="auto")
    hfspec.patch(model, draft=small_model)

    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chat = generator(
        [{"role": "user", "content": PROMPT}],
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        draft_budget=5,
    )[0]["generated_text"]

    stats = hfspec.stats(model)
    print(f"\n{stats.new_tokens} tokens from {stats.target_forward_passes} forwards of the target")
    return chat[-1]["content"], stats


if __name__ == "__main__":
    typer.run(main)
