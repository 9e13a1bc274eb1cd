"""Runs every prompt by every method, in turn, and notes times, tokens and whether they are plain's.

One process, one pair of models in memory. The order of the methods moves on by one with every prompt, so
that a slow minute of the machine, or a warm cache, favours none of them.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from transformers.generation.streamers import BaseStreamer

from hfspec import Metrics, Verdict
from hfspec.bench.methods import HFSPEC, PLAIN, Method
from hfspec.bench.models import Sampling
from hfspec.bench.prompts import Prompt
from hfspec.compare import explain_difference

_WARM_UP_TOKENS = 8

Inputs = dict[str, torch.Tensor]
#: Called before each run with the prompt and the method's name.
Report = Callable[[Prompt, str], None]


@dataclass(frozen=True)
class Run:
    """One `generate()` call.

    Attributes:
        seconds: around the call.
        num_tokens: length of the output less length of the prompt.
        ttft_seconds: until the streamer got its first new tokens.
        num_first_tokens: how many these were; assisted generation hands over a whole round at once.
        metrics: what hfspec counted.
        verdict: against plain's tokens; `None` for plain itself, and for sampling methods that draw
            other tokens by design.
    """

    method: str
    prompt: Prompt
    repeat: int
    seconds: float
    num_tokens: int
    ttft_seconds: float
    num_first_tokens: int
    num_prompt_tokens: int
    metrics: Metrics | None = None
    verdict: Verdict | None = None

    @property
    def decode_seconds(self) -> float:
        """Time after the first tokens."""
        return self.seconds - self.ttft_seconds

    @property
    def num_decode_tokens(self) -> int:
        """Tokens after the first ones."""
        return self.num_tokens - self.num_first_tokens


@dataclass(frozen=True)
class Results:
    """All runs, the methods that could not run at all and why, and the memory it took.

    Attributes:
        peak_rss_bytes: the most memory the process had at the end of a call.
        peak_gpu_bytes: the most memory ever allocated on the GPU, 0 without one.
    """

    runs: list[Run]
    not_run: dict[str, str]
    peak_rss_bytes: int
    peak_gpu_bytes: int


class _FirstTokens(BaseStreamer):  # type: ignore[misc, unused-ignore]  # untyped on some releases
    """Notes when the first new tokens arrive, and how many they are. The prompt comes before them."""

    def __init__(self) -> None:
        self.arrived = 0.0
        self.num_tokens = 0
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
        elif not self.num_tokens:
            self.arrived = time.perf_counter()
            self.num_tokens = value.numel()

    def end(self) -> None:
        pass


def measure(
    methods: Sequence[Method],
    prompts: Sequence[tuple[Prompt, Inputs]],
    sampling: Sampling,
    max_new_tokens: int,
    repeats: int,
    report: Report,
    max_seconds: float = math.inf,
) -> Results:
    """Warm every method up, then run everything `repeats` times.

    Args:
        max_seconds: no prompt but the first is begun that would, at the pace so far, end later than this.
    """
    started = time.perf_counter()
    ready, not_run = _warm_up(methods, prompts[0][1])
    process = psutil.Process()
    runs: list[Run] = []
    peak = process.memory_info().rss
    judges = [_Judge(inputs, sampling.seed + n, max_new_tokens) for n, (_, inputs) in enumerate(prompts)]
    for turn in range(repeats * len(prompts)):
        if turn and (time.perf_counter() - started) * (turn + 1) / turn > max_seconds:
            break
        repeat, number = divmod(turn, len(prompts))
        (prompt, inputs), judge = prompts[number], judges[number]
        first = turn % len(ready)
        outputs = []
        for method in ready[first:] + ready[:first]:
            report(prompt, method.name)
            outputs.append((method, *_run(method, prompt, inputs, repeat, judge.seed, max_new_tokens)))
            peak = max(peak, process.memory_info().rss)
        judge.see_plain(next((method.model, ids) for method, _, ids in outputs if method.name == PLAIN))
        runs += [judge.judged(run, ids, sampling) for _, run, ids in outputs]
    peak_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return Results(runs, not_run, peak, peak_gpu)


def _warm_up(methods: Sequence[Method], inputs: Inputs) -> tuple[list[Method], dict[str, str]]:
    """One short call each; a method of Hugging Face's that refuses the pair is left out, with its reason."""
    ready: list[Method] = []
    not_run: dict[str, str] = {}
    for method in methods:
        try:
            method.generate(**inputs, max_new_tokens=_WARM_UP_TOKENS)
        except (ValueError, RuntimeError) as error:
            if method.name in (PLAIN, HFSPEC):
                raise
            not_run[method.name] = str(error).strip().splitlines()[0]
        else:
            ready.append(method)
    return ready, not_run


def _run(
    method: Method, prompt: Prompt, inputs: Inputs, repeat: int, seed: int, max_new_tokens: int
) -> tuple[Run, torch.Tensor]:
    streamer = _FirstTokens()
    torch.manual_seed(seed)
    started = time.perf_counter()
    ids = method.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer)
    if ids.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    num_prompt = inputs["input_ids"].shape[1]
    run = Run(
        method.name,
        prompt,
        repeat,
        seconds=seconds,
        num_tokens=ids.shape[1] - num_prompt,
        ttft_seconds=streamer.arrived - started,
        num_first_tokens=streamer.num_tokens,
        num_prompt_tokens=num_prompt,
        metrics=method.last_metrics,
    )
    return run, ids


class _Judge:
    """Compares outputs for one prompt with plain's first one; the same tokens are looked into only once."""

    def __init__(self, inputs: Inputs, seed: int, max_new_tokens: int) -> None:
        self.seed = seed
        self._inputs = inputs
        self._max_new_tokens = max_new_tokens
        self._plain: tuple[Any, torch.Tensor] | None = None
        self._verdicts: dict[tuple[int, ...], Verdict] = {}

    def see_plain(self, plain: tuple[Any, torch.Tensor]) -> None:
        """Keep the plain model and its ids, unless an earlier repeat brought them."""
        self._plain = self._plain or plain

    def judged(self, run: Run, ids: torch.Tensor, sampling: Sampling) -> Run:
        """The run with its verdict."""
        is_other_by_design = sampling.temperature is not None and run.method != HFSPEC
        if self._plain is None or run.method == PLAIN or is_other_by_design:
            return run
        key = tuple(ids[0].tolist())
        if key not in self._verdicts:
            model, plain_ids = self._plain
            chosen = {} if sampling.temperature is None else {"temperature": sampling.temperature}
            self._verdicts[key] = explain_difference(
                model,
                self._inputs,
                plain_ids,
                ids,
                seed=self.seed,
                max_new_tokens=self._max_new_tokens,
                do_sample=sampling.temperature is not None,
                **chosen,
            )
        return replace(run, verdict=self._verdicts[key])
