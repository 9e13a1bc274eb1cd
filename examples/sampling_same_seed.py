"""Sampling, too, gives the same text under the same seed: the draft never decides what is drawn.

In bf16 two tokens can be so close that the width of a forward decides between them; `hfspec.verify`
measures that and says whether a difference is such a near-tie.

    python examples/sampling_same_seed.py
    python examples/sampling_same_seed.py --dtype float32 --seed 11
"""

import torch
import typer

import hfspec
from hfspec.weights.fetch import load

PROMPT = "Invent a name and a slogan for a bakery that opens at midnight."


def main(
    target: str = "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    draft: str = "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    dtype: str = "bfloat16",
    max_new_tokens: int = 64,
    seed: int = 7,
) -> tuple[list[str], hfspec.Verdict, hfspec.Stats]:
    """Sample one text without hfspec, then with it; returns both, verify's verdict and the counts."""
    model, tokenizer = load(target, getattr(torch, dtype), device_map="auto")
    small_model, _ = load(draft, getattr(torch, dtype), device_map="auto")
    chat = [{"role": "user", "content": PROMPT}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = encoded.to(model.device)
    options = {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": 0.8}

    def sample() -> str:
        torch.manual_seed(seed)
        ids = model.generate(**inputs, **options)
        text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return text

    texts = [sample()]
    hfspec.patch(model, draft=small_model)
    texts.append(sample())
    stats = hfspec.stats(model)
    for title, text in zip(("without", "with"), texts, strict=True):
        print(f"--- {title} hfspec, seed {seed}\n{text}\n")

    # The same comparison in one call, on the tokens; the random state is left alone.
    verdict = hfspec.verify(model, inputs, seed=seed, **options)
    print(f"verify: {verdict.summary()}")
    return texts, verdict, stats


if __name__ == "__main__":
    typer.run(main)
