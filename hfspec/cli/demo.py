"""`hfspec demo`: plain, assisted and hfspec, side by side on a real pair of models, with the same prompts.

A small `hfspec bench` with a time limit: both measure in the same way.
"""

from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfspec.bench import machine, report, tables, words
from hfspec.bench.measure import measure
from hfspec.bench.methods import HFSPEC, PLAIN, build
from hfspec.bench.models import Sampling, load_pair
from hfspec.bench.prompts import Prompt, encode
from hfspec.cli.dtypes import Dtype
from hfspec.cli.output import AsJson, print_json
from hfspec.cli.running import progress
from hfspec.config import DraftBudget
from hfspec.weights.packaged import DEFAULT_DRAFT, DEFAULT_TARGET

PROMPTS = (
    "Write a Python class for a bank account with deposit, withdraw and a transaction history.",
    "Explain in a few sentences what a hash table is and when it is slow.",
    "Write a SQL query that lists the five customers with the highest total order value, and explain it.",
    "Refactor this into a list comprehension:\n\n"
    "result = []\nfor row in rows:\n    if row.active:\n        result.append(row.name.strip().lower())",
    "My pasta sauce tastes flat. Suggest three quick ways to improve it.",
)

#: What is compared, in words for people who see it for the first time.
LABELS = {PLAIN: "plain generate()", "hf-assisted": "HF assisted generation", HFSPEC: "hfspec"}


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
    torch_dtype = dtype.resolve("cuda" if torch.cuda.is_available() else "cpu")
    before = machine.describe("hfspec")
    pair = load_pair(target, draft, torch_dtype)
    prompts = [Prompt(f"prompt {number}", "demo", text) for number, text in enumerate(PROMPTS[:num_prompts], start=1)]
    inputs = [(prompt, encode(pair.tokenizer, [prompt], pair.device)) for prompt in prompts]
    with pair.choosing_by(Sampling()), progress(len(prompts) * len(LABELS)) as note:
        results = measure(
            build(list(LABELS), pair, DraftBudget()),
            inputs,
            Sampling(),
            max_new_tokens,
            repeats=1,
            report=lambda prompt, method: note(prompt, LABELS[method]),
            max_seconds=60 * max_minutes,
        )
    asked = {
        "target": target,
        "draft": draft,
        "dtype": str(torch_dtype).removeprefix("torch."),
        "device": pair.device,
        "max_new_tokens": max_new_tokens,
        "num_prompts": len({run.prompt for run in results.runs}),
    }
    found = report.build(results, before | asked)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found, asked)


def _print(found: report.Report, asked: dict[str, Any]) -> None:
    console = Console()
    console.print(Text(", ".join(f"{name} {value}" for name, value in asked.items()), style="dim"))
    table = Table()
    for heading in ("", "tokens/s", "speed-up", "same tokens"):
        table.add_column(heading, justify="left" if heading in ("", "same tokens") else "right")
    for item in found.overall:
        speeds = f"{item.tokens_per_second:.1f}", words.speedup(item.speedup)
        table.add_row(LABELS[item.method], *speeds, tables.sameness(item))
    console.print(table)
    speculation = found.summary(HFSPEC).speculation
    if speculation is not None and speculation.acceptance_rate is not None:
        rate, per_round = words.number(speculation.acceptance_rate), words.number(speculation.tokens_per_round)
        console.print(f"hfspec: acceptance rate {rate}, tokens per round {per_round}")
    for note in tables.notes(found, LABELS):
        console.print(note)
