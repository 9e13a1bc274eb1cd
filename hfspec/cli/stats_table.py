"""`hfspec.stats(model)` as a table for people."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table

from hfspec.metrics import Metrics, Stats, ratio


def parts(stats: Stats) -> Iterator[RenderableType]:
    """The table, then a line for each reason why something ran plain, rows were kept in step, or trees were cut."""
    table = Table(title="hfspec", title_justify="left")
    table.add_column("")
    table.add_column("last call", justify="right")
    table.add_column("all calls", justify="right")
    for (label, last), (_, total) in zip(_rows(stats.last), _rows(stats.total), strict=True):
        table.add_row(label, last, total)
    yield table
    if stats.proof is not None:
        yield f"forwards over several tokens {stats.proof.summary()}"
    for reason, times in stats.total.fallback_reasons.items():
        yield f"ran plain {times}×: {reason}"
    for reason, times in stats.total.plain_reasons.most_common():
        yield f"plain rounds {times}×: {reason}"
    for reason, times in stats.total.lockstep_reasons.items():
        yield f"rows kept in step {times}×: {reason}"
    for reason, times in stats.total.chain_reasons.items():
        yield f"trees cut to chains {times}×: {reason}"


def as_text(stats: Stats) -> str:
    """The same without colours."""
    console = Console(width=88, color_system=None)
    with console.capture() as capture:
        console.print(stats)
    return capture.get().rstrip()


def _rows(metrics: Metrics) -> list[tuple[str, str]]:
    def share(seconds: float) -> str:
        return _format(ratio(100 * seconds, metrics.total_seconds), "{:.0f} %")

    depths = list(metrics.acceptance_by_depth.items())[:5]
    return [
        ("calls (with a draft)", f"{metrics.calls} ({metrics.speculative_calls})"),
        ("new tokens", f"{metrics.new_tokens}"),
        (
            "target forwards (saved)",
            f"{metrics.target_forward_passes} ({metrics.target_forward_passes_saved})",
        ),
        ("rounds: with a draft / plain", f"{metrics.rounds} / {metrics.plain_rounds}"),
        ("proofs (forwards they took)", f"{metrics.trials} ({metrics.trial_forwards})"),
        ("draft tokens: accepted / drafted", f"{metrics.accepted_tokens} / {metrics.drafted_tokens}"),
        ("acceptance rate", _format(metrics.acceptance_rate, "{:.2f}")),
        ("acceptance at depth 1, 2, …", " ".join(f"{rate:.2f}".lstrip("0") for _, rate in depths) or "–"),
        ("tokens per round", _format(metrics.tokens_per_round, "{:.2f}")),
        ("rounds with a rejection", _format(metrics.rollback_rate, "{:.0%}")),
        (
            "one draft token / one verify, ms",
            " / ".join(_format(value, "{:.1f}") for value in (metrics.draft_latency_ms, metrics.verify_latency_ms)),
        ),
        ("overhead per round, ms", _format(metrics.overhead_ms, "{:.2f}")),
        (
            "first token / per token, ms",
            " / ".join(_format(value, "{:.1f}") for value in (metrics.ttft_ms, metrics.tpot_ms)),
        ),
        ("time: target", share(metrics.prefill_seconds + metrics.verify_seconds + metrics.plain_seconds)),
        ("time: draft", share(metrics.draft_seconds + metrics.draft_prefill_seconds)),
        ("time: hfspec itself", share(metrics.overhead_seconds)),
    ]


def _format(value: float | None, template: str) -> str:
    return "–" if value is None else template.format(value)
