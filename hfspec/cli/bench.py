"""`hfspec bench`: plain, Hugging Face's own ways and hfspec, on the same prompts and weights.

Options, progress and printing; what is measured, and how, is in `hfspec.bench`.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from hfspec.bench import chart, machine, report, tables
from hfspec.bench.errors import BenchError
from hfspec.bench.measure import measure
from hfspec.bench.methods import build, parse_names
from hfspec.bench.models import Sampling, load_pair
from hfspec.bench.prompts import built_in, encode, read, spread
from hfspec.cli.dtypes import Dtype
from hfspec.cli.output import AsJson, as_text, print_json
from hfspec.cli.running import progress
from hfspec.config import DraftBudget
from hfspec.weights.packaged import DEFAULT_DRAFT, DEFAULT_TARGET

_ALL_METHODS = "plain,hf-assisted,hf-assisted-constant,hf-assisted-heuristic,hf-prompt-lookup,hfspec"


@dataclass(frozen=True)
class _Size:
    """How much is run, where the user has not said."""

    limit: int | None
    max_new_tokens: int
    methods: str


_FULL = _Size(limit=None, max_new_tokens=128, methods=_ALL_METHODS)
_QUICK = _Size(limit=6, max_new_tokens=64, methods="plain,hf-assisted,hfspec")


def bench(
    target: Annotated[str, typer.Option(help="The model to speed up.")] = DEFAULT_TARGET,
    draft: Annotated[str, typer.Option(help="The small model.")] = DEFAULT_DRAFT,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts in Spec-Bench's form (JSON lines); else 24 built-in ones of six kinds."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="So many prompts, spread over the categories; else all.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help=f"What to compare; plain is always run.  \\[default: {_ALL_METHODS}]")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens an answer, at most.  \\[default: 128]")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of both models. auto: bfloat16 if the hardware has it.")] = Dtype.AUTO,
    draft_int8: Annotated[
        bool, typer.Option("--draft-int8", help="Quantise the draft's linear layers (CPU), for every method.")
    ] = False,
    draft_random: Annotated[
        bool, typer.Option("--draft-random", help="Give the draft random weights: the hopeless case.")
    ] = False,
    budget: Annotated[str, typer.Option(help="hfspec's draft budget: auto, ratio, or a number.")] = "auto",
    sample: Annotated[bool, typer.Option("--sample", help="Sample, seeded, instead of greedily.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, help="With --sample.")] = 0.7,
    seed: Annotated[int, typer.Option(help="With --sample.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each prompt; medians are reported.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One prompt of each kind, 64 tokens, three methods."),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write everything here as JSON, beside what is printed.")] = None,
    chart_path: Annotated[Path | None, typer.Option("--chart", help="Draw speed-ups by category here (PNG).")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much faster generate() gets here.

    Every prompt is answered by every method in turn, in one process, with the same weights and arguments.

    Speeds, first tokens and the tokens themselves are compared with plain generate(); for hfspec also where
    the time goes, and how near it comes to what the draft would allow.
    """
    _check(output, chart_path)
    size = _QUICK if quick else _FULL
    if threads is not None:
        torch.set_num_threads(threads)

    names = parse_names(methods or size.methods)
    draft_budget = DraftBudget.parse(budget)
    chosen = spread(read(prompts) if prompts else built_in(), limit or size.limit)
    max_new_tokens = max_new_tokens or size.max_new_tokens
    sampling = Sampling(temperature if sample else None, seed)
    torch_dtype = dtype.resolve("cuda" if torch.cuda.is_available() else "cpu")
    conditions = machine.describe("hfspec") | {
        "target": target,
        "draft": draft,
        "draft_kind": _draft_kind(draft_int8, draft_random),
        "dtype": str(torch_dtype).removeprefix("torch."),
        "choice": f"sampling at {temperature:g}, seed {seed}" if sample else "greedy",
        "budget": budget,
        "prompts": prompts.name if prompts else "built-in",
        "num_prompts": len(chosen),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
    }

    pair = load_pair(target, draft, torch_dtype, is_draft_int8=draft_int8, is_draft_random=draft_random)
    inputs = [(prompt, encode(pair.tokenizer, [prompt], pair.device)) for prompt in chosen]
    with pair.choosing_by(sampling), progress(len(inputs) * len(names) * repeats) as note:
        results = measure(build(names, pair, draft_budget), inputs, sampling, max_new_tokens, repeats, note)
    found = report.build(results, conditions)

    if as_json:
        print_json(found.to_dict())
    else:
        # Into a file or a pipe rich would write 80 columns, too few for six methods.
        console = Console(width=None if sys.stdout.isatty() else 110)
        for part in tables.everything(found):
            console.print(part)
    if output is not None:
        output.write_text(as_text(found.to_dict()) + "\n", encoding="utf-8")
    if chart_path is not None:
        chart.draw(found, chart_path)


def _check(output: Path | None, chart_path: Path | None) -> None:
    """Fail now rather than after the measurements.

    Raises:
        BenchError: matplotlib is needed and missing, or an output cannot be written.
    """
    if chart_path is not None and find_spec("matplotlib") is None:
        raise BenchError("--chart needs matplotlib: pip install 'hfspec[bench]'.")
    for path in (output, chart_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"{path} cannot be written: there is no folder {path.parent}.")
        if path is not None and path.is_dir():
            raise BenchError(f"{path} cannot be written: it is a folder; name a file in it.")


def _draft_kind(is_int8: bool, is_random: bool) -> str:
    kinds = [word for word, is_meant in (("int8", is_int8), ("random weights", is_random)) if is_meant]
    return f" ({', '.join(kinds)})" if kinds else ""
