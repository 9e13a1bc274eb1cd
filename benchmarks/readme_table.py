"""The README's benchmark tables, made from what `hfspec bench --output` wrote: one table a result file, in order.

Rows are categories and, last, all prompts; cells are speed-ups over plain `generate()`, the losing ones included.

    python benchmarks/readme_table.py benchmarks/results/a.json                        # print
    python benchmarks/readme_table.py benchmarks/results/a.json --write README.md      # put between its markers
    python benchmarks/readme_table.py --check README.md      # are they what the files named there give?
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfspec.bench import words
from hfspec.bench.methods import HFSPEC, PLAIN

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

#: How a table names its file: relative to the document it stands in.
_SOURCE = re.compile(r"\[results\]\(([^)]+\.json)\)")


def table(result: dict[str, Any], source: str) -> str:
    """One result as Markdown: a line of conditions, the table, and what could not run."""
    summaries = result["by_category"] + result["overall"]
    methods = [item["method"] for item in result["overall"] if item["method"] != PLAIN]
    categories = list(dict.fromkeys(item["category"] for item in summaries))
    headings = ["", "prompts", "plain, tokens/s", *methods, *result["not_run"]]
    alignment = [":--", *["--:"] * (len(headings) - 1)]
    if HFSPEC in methods:
        headings += ["acceptance", "tokens a round", "same tokens"]
        alignment += ["--:", "--:", ":--"]
    rows = [headings, alignment]
    for category in categories:
        mine = {item["method"]: item for item in summaries if item["category"] == category}
        row = [category or "**all** (geometric mean)", f"{mine[PLAIN]['num_prompts']}"]
        row.append(f"{mine[PLAIN]['tokens_per_second']:.1f}")
        row += [_speedup(mine[name]["speedup"], is_total=category is None) for name in methods]
        row += ["–"] * len(result["not_run"])
        if HFSPEC in methods:
            row += _speculation(mine[HFSPEC])
        rows.append(row)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"`{name}` could not run: {' '.join(reason.split())}" for name, reason in result["not_run"].items()]
    return "\n\n".join([_conditions(result["conditions"], source), "\n".join(lines), *notes])


def _conditions(asked: dict[str, Any], source: str) -> str:
    return (
        f"**{words.pair(asked)}**, {words.task(asked)}, on {words.place(asked)}, {words.host(asked)}: "
        f"`{asked['command']}` ([results]({source}))"
    )


def _speedup(value: float, is_total: bool) -> str:
    text = words.speedup(value)
    return f"**{text}**" if is_total else text


def _speculation(item: dict[str, Any]) -> list[str]:
    """Acceptance, tokens a round and sameness of hfspec's runs."""
    found = item["speculation"] or {}
    same = words.sameness(item["num_compared"], item["num_identical"], item["num_near_ties"])
    return [words.number(found.get("acceptance_rate")), words.number(found.get("tokens_per_round")), same]


def tables(paths: Sequence[Path], folder: Path) -> str:
    """The tables of several result files, in order; their names are given relative to `folder`."""
    parts = []
    for path in paths:
        source = Path(os.path.relpath(path, folder)).as_posix()
        parts.append(table(json.loads(path.read_text(encoding="utf-8")), source))
    return "\n\n".join(parts)


def split(text: str, name: str) -> tuple[str, str, str]:
    """A document's text before, between and after the markers, which stay with the outer parts.

    Raises:
        SystemExit: it does not have each marker once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"{name} needs {BEGIN} and, after it, {END}, once each.")
    before, rest = text.split(BEGIN)
    between, after = rest.split(END)
    return before + BEGIN, between, END + after


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, write or check."""
    parser = argparse.ArgumentParser(description="The README's benchmark tables from result files.")
    parser.add_argument("results", type=Path, nargs="*", help="JSON files that `hfspec bench --output` wrote")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the tables between its markers")
    mode.add_argument("--check", type=Path, metavar="DOCUMENT", help="fail unless they are what stands there")
    options = parser.parse_args(arguments)
    document: Path | None = options.write or options.check
    if document is None:
        if not options.results:
            parser.error("name the result files")
        print(tables(options.results, Path()))
        return
    text = document.read_text(encoding="utf-8")
    before, between, after = split(text, document.name)
    folder = document.resolve().parent
    paths = options.results or [folder / source for source in _SOURCE.findall(between)]
    if not paths:
        raise SystemExit(f"{document.name} names no result file between its markers; name them here, with --write.")
    made = f"{before}\n{tables(paths, folder)}\n{after}"
    if options.write:
        document.write_text(made, encoding="utf-8")
    elif made != text:
        sys.exit(f"The tables of {document.name} are not what their result files give; make them anew with --write.")


if __name__ == "__main__":
    main()
