"""Sampled batches whose rows drift apart: rows of noise drawn, and the time of the process, against plain generate().

A tiny random Llama with a vocabulary of 150,000 makes forwards cheap and noise dear. A scripted source knows plain's
output and proposes it rightly for one token a round in the first row, and for more the further down the row is, so
that rows drift apart.

    OMP_WAIT_POLICY=passive python benchmarks/noise.py
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as host_logging

import hfspec
from hfspec import Draft, DraftSession, DraftSource, RoundBudget

PROMPT_TOKENS = 8


class Drifting(DraftSource):
    """Proposes what plain wrote: rightly for 1 (first row) to `fastest` (last row) tokens, then a wrong token."""

    may_draw = False

    def __init__(self, text: torch.Tensor, fastest: int) -> None:
        self.text = text.tolist()
        self.fastest = fastest

    def start(self, context: Any) -> DraftSession:
        """Begin a row."""
        num_right = 1 + (self.fastest - 1) * context.row // max(1, len(self.text) - 1)
        return _DriftingSession(self.text[context.row], num_right, context.vocab_size)


class _DriftingSession(DraftSession):
    def __init__(self, text: list[int], num_right: int, vocab_size: int) -> None:
        self._text, self._num_right, self._vocab_size = text, num_right, vocab_size

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        start = input_ids.shape[1]
        ids = [*self._text[start : start + budget.num_tokens], *[0] * budget.num_tokens][: budget.num_tokens]
        if self._num_right < len(ids):
            ids[self._num_right] = (ids[self._num_right] + 1) % self._vocab_size
        return Draft(torch.tensor([ids], dtype=torch.long))


def toy(vocab_size: int) -> Any:
    """A tiny random Llama that never ends a text by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


@contextmanager
def noise_drawn() -> Iterator[list[tuple[int, float]]]:
    """Note of all noise drawn in the body, by `multinomial` or ahead of it, how many rows and seconds it was."""
    drawn: list[tuple[int, float]] = []
    multinomial, exponential = torch.multinomial, torch.Tensor.exponential_

    def counting_multinomial(probs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        started = time.process_time()
        ids = multinomial(probs, *args, **kwargs)
        drawn.append((len(probs), time.process_time() - started))
        return ids

    def counting_exponential(noise: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        started = time.process_time()
        exponential(noise, *args, **kwargs)
        drawn.append((len(noise), time.process_time() - started))
        return noise

    torch.multinomial = counting_multinomial
    torch.Tensor.exponential_ = counting_exponential  # type: ignore[method-assign, assignment]
    try:
        yield drawn
    finally:
        torch.multinomial, torch.Tensor.exponential_ = multinomial, exponential  # type: ignore[method-assign]


def measure(vocab_size: int, num_rows: int, num_tokens: int, fastest: int, repeats: int) -> dict[str, dict[str, float]]:
    """Of plain and of each draft budget: seconds of the process, rows of noise, whether the tokens are plain's."""
    model = toy(vocab_size)
    ids = torch.randint(3, vocab_size, (num_rows, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    call = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0, "max_new_tokens": num_tokens}

    def run() -> tuple[torch.Tensor, float, float, int]:
        torch.manual_seed(7)
        started = time.process_time()
        with noise_drawn() as drawn:
            text = model.generate(ids, **call)
        seconds = time.process_time() - started
        return text, seconds, sum(each for _, each in drawn), sum(rows for rows, _ in drawn)

    expected = run()[0]
    found: dict[str, list[tuple[torch.Tensor, float, float, int]]] = {"plain": [], "5": [], "auto": []}
    for _ in range(repeats):
        for name, each in found.items():
            if name == "plain":
                each.append(run())
                continue
            budget: Any = name if name == "auto" else int(name)
            with hfspec.patched(model, Drifting(expected, fastest), draft_budget=budget):
                each.append(run())
    return {
        name: {
            "seconds": statistics.median(seconds for _, seconds, _, _ in each),
            "noise_seconds": statistics.median(seconds for _, _, seconds, _ in each),
            "rows_of_noise": max(drawn for *_, drawn in each),
            "is_same": all(torch.equal(text, expected) for text, *_ in each),
        }
        for name, each in found.items()
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=150_000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--fastest", type=int, default=5, help="draft tokens that the last row accepts a round")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    host_logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = measure(
        arguments.vocab_size, arguments.rows, arguments.max_new_tokens, arguments.fastest, arguments.repeats
    )
    shown = Table("draft budget", "CPU, s", "of plain", "for noise, s", "rows of noise", "of plain", "same tokens")
    plain = found["plain"]
    for name, each in found.items():
        shares = [each[key] / plain[key] for key in ("seconds", "rows_of_noise")]
        shown.add_row(
            name,
            f"{each['seconds']:.2f}",
            f"{shares[0]:.2f}",
            f"{each['noise_seconds']:.2f}",
            f"{each['rows_of_noise']:.0f}",
            f"{shares[1]:.2f}",
            "yes" if each["is_same"] else "NO",
        )
    Console().print(shown)


if __name__ == "__main__":
    main()
