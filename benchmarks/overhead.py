"""What the decoding loop itself costs: milliseconds a token outside every model forward.

A toy (random Llama: 4 layers, hidden size 256, vocabulary of 32,000, float32, one thread) makes forwards
cheap, so that what Python does between them shows. Every forward of target and draft is timed and taken
away from the time of the call. Hugging Face assisted generation and hfspec draft five tokens in every round;
plain generate() is there for scale. Runs take turns; medians are printed.

    OMP_WAIT_POLICY=passive python benchmarks/overhead.py
"""

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as host_logging

import hfspec

NUM_DRAFT_TOKENS = 5
PROMPT_TOKENS = 64


class ForwardClock:
    """Adds up the time inside the forwards of the models it watches (not by hooks: a target with hooks runs plain)."""

    def __init__(self, *models: Any) -> None:
        self.seconds = 0.0
        self.num_forwards = 0
        for model in models:
            model.forward = self._timed(model.forward)

    def reset(self) -> None:
        """Start from nothing."""
        self.seconds, self.num_forwards = 0.0, 0

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return forward(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.num_forwards += 1

        return timed


def toy(seed: int) -> Any:
    """A random Llama that never ends a text by itself."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def outside_ms_per_token(generate: Callable[[], torch.Tensor], clock: ForwardClock) -> float:
    """Run one call and return the milliseconds a token that no forward accounts for."""
    clock.reset()
    started = time.perf_counter()
    ids = generate()
    seconds = time.perf_counter() - started
    return 1e3 * (seconds - clock.seconds) / (ids.shape[1] - PROMPT_TOKENS)


def compare(target: Any, draft: Any, num_tokens: int, repeats: int) -> tuple[dict[str, float], float]:
    """Median overhead of each method, in ms a token, and hfspec's acceptance rate.

    Raises:
        RuntimeError: hfspec made forwards that the clock did not see, so the difference would mean nothing.
    """
    clock = ForwardClock(target, draft)
    draft.generation_config.num_assistant_tokens = NUM_DRAFT_TOKENS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    prompt = torch.randint(1, 32_000, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    call = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": num_tokens,
        "do_sample": False,
    }
    patched = hfspec.patch(copy.copy(target), draft=draft, draft_budget=NUM_DRAFT_TOKENS)
    methods: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: target.generate(**call),
        "hf-assisted-constant": lambda: target.generate(**call, assistant_model=draft),
        "hfspec": lambda: patched.generate(**call),
    }
    measured: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name, generate in methods.items():
            outside = outside_ms_per_token(generate, clock)
            if repeat:  # the first one warms up
                measured[name].append(outside)
        counted = hfspec.stats(patched).last
        if clock.num_forwards < counted.target_forward_passes + counted.drafted_tokens:
            raise RuntimeError("some forwards went past the clock; time them where they happen now")
    medians = {name: statistics.median(values) for name, values in measured.items()}
    return medians, hfspec.stats(patched).last.acceptance_rate or 0.0


def main() -> None:
    """Measure with a draft that is always right, and with one that is always wrong."""
    parser = argparse.ArgumentParser(description="Milliseconds a token outside model forwards.")
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    host: Any = host_logging
    host.set_verbosity_error()  # its assisted generation warns of its own arguments

    print(f"ms a token outside model forwards ({options.tokens} tokens, {NUM_DRAFT_TOKENS} drafted a round)")
    for kind, seed in (("the target's twin", 0), ("another random model", 1)):
        medians, acceptance = compare(toy(seed=0), toy(seed), options.tokens, options.repeats)
        numbers = "   ".join(f"{name} {value:.2f}" for name, value in medians.items())
        print(f"draft: {kind:22} acceptance {acceptance:.2f}   {numbers}")


if __name__ == "__main__":
    main()
