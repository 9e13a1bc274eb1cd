"""`python -m tests.zoo`: examine all architectures, or some, and write the page.

python -m tests.zoo --write docs/zoo.md
python -m tests.zoo llama bart
"""

import argparse
import logging
import os
import time
from pathlib import Path

# Before torch: no network, no idle threads that spin.
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from tests.zoo.page import render
from tests.zoo.tiny import all_species
from tests.zoo.verdict import examine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument(
        "types", nargs="*", help="model types or kinds (causal, seq2seq, speech, image); all by default"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table of all architectures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("hfspec").setLevel(logging.ERROR)
    if arguments.write and arguments.types:
        parser.error("a page has all architectures: leave the types out")

    rows = []
    for species in all_species():
        if arguments.types and not {species.model_type, species.kind} & set(arguments.types):
            continue
        started = time.perf_counter()
        row = examine(species)
        seconds = time.perf_counter() - started
        rows.append(row)
        print(f"{seconds:5.1f} s  {species.name} | {row.one} | {row.three} | {row.note}", flush=True)
    if arguments.write:
        arguments.write.parent.mkdir(exist_ok=True)
        arguments.write.write_text(render(rows, transformers.__version__), encoding="utf-8")


if __name__ == "__main__":
    main()
