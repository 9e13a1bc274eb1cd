"""A report as tables for a terminal. A method that is slower than plain is shown like any other, in red."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hfspec.bench import words
from hfspec.bench.methods import HFSPEC, NAMES, PLAIN
from hfspec.bench.report import Report, Speculation, Summary

ALL = "all"


def everything(report: Report) -> Iterator[RenderableType]:
    """All tables and notes, top down: prompts first, so that the summaries are what is left on the screen."""
    yield _prompt_table(report)
    yield _conditions(report)
    yield _method_table(report)
    yield _category_table(report)
    if HFSPEC in report.methods:
        yield _time_table(report)
        yield _ideal_table(report)
    yield from notes(report)
    yield _memory(report)


def _prompt_table(report: Report) -> Table:
    """Speed-ups prompt by prompt."""
    others = [name for name in report.methods if name != PLAIN]
    table = _table("Speed-up by prompt", "prompt", "plain\ntokens/s", *others)
    plain = {row.prompt_id: row for row in report.rows if row.method == PLAIN}
    for prompt_id, row in plain.items():
        mine = {each.method: each for each in report.rows if each.prompt_id == prompt_id}
        cells = [_speedup(mine[name].speedup) for name in others]
        table.add_row(prompt_id, f"{row.tokens_per_second:.1f}", *cells)
    return table


def _conditions(report: Report) -> Text:
    """Pair, call and machine in two lines."""
    asked = report.conditions
    return Text(
        f"{words.pair(asked)}, {words.task(asked)}\n"
        f"{words.place(asked)}; {words.host(asked)}, hfspec {asked['versions']['hfspec']}"
    )


def _method_table(report: Report) -> Table:
    table = _table(
        "Methods",
        "method",
        "tokens/s",
        "speed-up",
        "median",
        "worst",
        "best",
        "first token",
        "same tokens",
    )
    for item in report.overall:
        speedups = (item.speedup, item.speedup_median, item.speedup_worst, item.speedup_best)
        table.add_row(
            item.method,
            f"{item.tokens_per_second:.1f}",
            *map(_speedup, speedups),
            f"{item.ttft_ms:.0f} ms",
            sameness(item),
        )
    for name in report.not_run:
        table.add_row(name, *["–"] * 6, "could not run (below)")
    return table


def _category_table(report: Report) -> Table:
    others = [name for name in report.methods if name != PLAIN]
    table = _table("Speed-up by category (geometric mean)", "category", "prompts", "plain\ntokens/s", *others)
    for category in (*report.categories, None):
        plain = report.summary(PLAIN, category)
        cells = [_speedup(report.summary(name, category).speedup) for name in others]
        if category is None:
            table.add_section()
        table.add_row(category or ALL, str(plain.num_prompts), f"{plain.tokens_per_second:.1f}", *cells)
    return table


def _time_table(report: Report) -> Table:
    table = _table(
        "hfspec: where the time of the calls goes, in %",
        "category",
        "prefill",
        "draft",
        "verify",
        "plain",
        "overhead",
        "overhead, ms\na token",
    )
    for name, item in _speculations(report, table):
        shares = [f"{share:.1f}" for share in item.shares.values()]
        table.add_row(name, *shares, words.number(item.overhead_ms_per_token))
    return table


def _ideal_table(report: Report) -> Table:
    table = _table(
        "hfspec: what the draft brought, and how near that comes to its ideal (after the first token)",
        "category",
        "acceptance",
        "tokens\na round",
        "achieved\nspeed-up",
        "ideal\nspeed-up",
        "at K",
        "achieved\n÷ ideal",
    )
    for name, item in _speculations(report, table):
        numbers = (item.acceptance_rate, item.tokens_per_round, item.achieved, item.ideal)
        length = "–" if item.ideal_length is None else str(item.ideal_length)
        table.add_row(name, *map(words.number, numbers), length, words.number(item.achieved_of_ideal))
    return table


def _speculations(report: Report, table: Table) -> Iterator[tuple[str, Speculation]]:
    """By category and, below a line in the table, overall."""
    for category in (*report.categories, None):
        speculation = report.summary(HFSPEC, category).speculation
        if category is None:
            table.add_section()
        if speculation is not None:
            yield category or ALL, speculation


def notes(report: Report, labels: Mapping[str, str] = MappingProxyType({})) -> Iterator[Text]:
    """Every difference from plain's tokens, every method that could not run, and why hfspec ran plain.

    Args:
        labels: what methods are called, where that is not their name.
    """
    for row in report.rows:
        for summary in dict.fromkeys(verdict.summary() for verdict in row.verdicts if not verdict.identical):
            yield Text(f"{labels.get(row.method, row.method)}, {row.prompt_id}: {summary}")
    for name, reason in report.not_run.items():
        yield Text(f"{labels.get(name, name)} could not run: {reason}")
    if HFSPEC in report.methods:
        speculation = report.summary(HFSPEC).speculation
        for reason, times in (speculation.fallback_reasons if speculation else {}).items():
            yield Text(f"hfspec ran plain {times}×: {reason}")


def _memory(report: Report) -> Text:
    line = f"most memory of the process at the end of a call: {report.peak_rss_bytes / 1e9:.2f} GB"
    if report.peak_gpu_bytes:
        line += f"; most on the GPU: {report.peak_gpu_bytes / 1e9:.2f} GB"
    return Text(line)


def sameness(item: Summary) -> str:
    """How many of a method's outputs were plain's."""
    if item.method == PLAIN:
        return "–"
    return words.sameness(item.num_compared, item.num_identical, item.num_near_ties)


def _speedup(value: float) -> Text:
    return Text(words.speedup(value), style="red" if value < 0.995 else "")


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        heading = heading.replace("hf-", "hf ").replace("-", "\n") if heading in NAMES else heading
        table.add_column(heading, justify="left" if heading == "same tokens" else "right")
    return table
