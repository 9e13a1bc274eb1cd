"""Batches: plain and hfspec on the same rows, in turn, in one process; every row compared with plain's batch.

Write what is measured with `python benchmarks/batch.py --output benchmarks/results/cpu-batch.json`.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import hfspec
from hfspec.bench import machine
from hfspec.bench.models import load_pair
from hfspec.bench.prompts import built_in, encode, spread
from hfspec.compare import explain_rows
from hfspec.weights.packaged import DEFAULT_DRAFT, DEFAULT_TARGET


def main() -> None:
    """Read the options, measure each size, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4,8", help="rows a batch")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft-int8", action="store_true")
    parser.add_argument("--budget", default="auto", help="draft budget: auto, ratio, or a number")
    parser.add_argument("--output", type=Path, help="write what is measured here, as JSON")
    arguments = parser.parse_args()

    conditions = machine.describe("python benchmarks/batch.py")
    pair = load_pair(DEFAULT_TARGET, DEFAULT_DRAFT, getattr(torch, arguments.dtype), is_draft_int8=arguments.draft_int8)
    patched = hfspec.patch(copy.copy(pair.target), draft=pair.draft, draft_budget=arguments.budget)
    console, results = Console(width=120), []
    for size in (int(each) for each in arguments.sizes.split(",")):
        inputs = encode(pair.tokenizer, spread(built_in(), size), pair.device)
        results.append(measure(pair.target, patched, inputs, size, arguments))
        console.print(table(results))
    if arguments.output:
        conditions["arguments"] = vars(arguments) | {"output": str(arguments.output)}
        arguments.output.write_text(json.dumps({"conditions": conditions, "results": results}, indent=2) + "\n")


def measure(plain, patched, inputs, size, arguments) -> dict:
    """Medians over the repeats, the first of which only warms up; and what became of the tokens."""
    call = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    seconds: dict[str, list[float]] = {"plain": [], "hfspec": []}
    outputs = {}
    for repeat in range(arguments.repeats + 1):
        for name, model in (("plain", plain), ("hfspec", patched))[:: 1 if repeat % 2 else -1]:
            started = time.perf_counter()
            outputs[name] = model.generate(**inputs, **call)
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    verdicts = explain_rows(plain, inputs, outputs["plain"], outputs["hfspec"], **call)
    last = hfspec.stats(patched).last
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "rows": size,
        "seconds": seconds,
        "speedup": medians["plain"] / medians["hfspec"],
        "acceptance_rate": last.acceptance_rate,
        "tokens_per_round": last.tokens_per_round,
        "metrics": last.to_dict(),
        "same_rows": sum(each.identical for each in verdicts),
        "near_ties": sum(bool(each.near_tie) for each in verdicts),
        "verdicts": [each.summary() for each in verdicts],
    }


def table(results: list[dict]) -> Table:
    """For people."""
    shown = Table("rows", "plain, s", "hfspec, s", "speed-up", "acceptance", "tokens a round", "same rows", "near-ties")
    for each in results:
        medians = [statistics.median(each["seconds"][name]) for name in ("plain", "hfspec")]
        shown.add_row(
            str(each["rows"]),
            *(f"{value:.1f}" for value in medians),
            f"{each['speedup']:.2f}×",
            f"{each['acceptance_rate'] or 0:.2f}",
            f"{each['tokens_per_round'] or 0:.2f}",
            f"{each['same_rows']} of {each['rows']}",
            str(each["near_ties"]),
        )
    return shown


if __name__ == "__main__":
    main()
