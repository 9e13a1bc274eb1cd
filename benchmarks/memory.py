"""Peak memory of a ragged batch against plain's and the draft's, each measured in a process of its own.

Run it with `python benchmarks/memory.py --rows 8 --output benchmarks/results/cpu-batch-memory.json`. The bar is
plain's peak + the draft's weights + 10 %.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

import hfspec
from hfspec.bench import machine
from hfspec.bench.prompts import built_in, encode, spread
from hfspec.weights.fetch import load
from hfspec.weights.packaged import DEFAULT_DRAFT, DEFAULT_TARGET

WAYS = ("plain", "hfspec")


def main() -> None:
    """Measure both ways, each in a process of its own, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--budget", type=int, default=3, help="draft tokens a round")
    parser.add_argument("--output", type=Path, help="write what is measured here, as JSON")
    parser.add_argument("--way", choices=WAYS, help="measure this way in this process, and print it")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments)))
        return
    conditions = machine.describe("python benchmarks/memory.py")
    command = [sys.executable, __file__, "--rows", str(arguments.rows), "--budget", str(arguments.budget)]
    command += ["--max-new-tokens", str(arguments.max_new_tokens)]
    found = {}
    for way in WAYS:
        measured = subprocess.run([*command, "--way", way], check=True, capture_output=True)
        found[way] = json.loads(measured.stdout)
    allowed = 1.1 * (found["plain"]["peak_bytes"] + found["hfspec"]["draft_bytes"])
    result = found | {"share_of_allowed": found["hfspec"]["peak_bytes"] / allowed, "conditions": conditions}
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def measure(arguments: argparse.Namespace) -> dict[str, int]:
    """Peak resident memory of one call, weights included."""
    model, tokenizer = load(DEFAULT_TARGET, torch.bfloat16)
    inputs = encode(tokenizer, spread(built_in(), arguments.rows), "cpu")
    draft_bytes = 0
    if arguments.way == "hfspec":
        draft = load(DEFAULT_DRAFT, torch.bfloat16)[0]
        draft_bytes = sum(weight.nbytes for weight in draft.parameters())
        hfspec.patch(model, draft=draft, draft_budget=arguments.budget)
    model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False)
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "draft_bytes": draft_bytes}


if __name__ == "__main__":
    main()
