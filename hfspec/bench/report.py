"""From runs to what a reader wants to know: per prompt, per category, overall. Pure arithmetic.

A speed-up is plain's time per token divided by the method's, on one prompt; of several prompts it is the
geometric mean. It is never a ratio of mean tokens per second, which would weigh the fast prompts more.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hfspec import Metrics, Verdict
from hfspec.bench.ideal import Times, ideal_speedup
from hfspec.bench.measure import Results, Run
from hfspec.bench.methods import NAMES, PLAIN
from hfspec.bench.prompts import Prompt


@dataclass(frozen=True)
class Row:
    """One method on one prompt: the median of its repeats.

    Attributes:
        decode_seconds_per_token: after the first tokens; `None` if there were no others.
        speedup: plain's `seconds_per_token` ÷ this one's.
        metrics: of all repeats together.
        verdicts: of each repeat that could be compared.
    """

    method: str
    prompt_id: str
    category: str
    num_prompt_tokens: int
    num_tokens: float
    seconds_per_token: float
    decode_seconds_per_token: float | None
    ttft_seconds: float
    speedup: float
    seconds: float
    metrics: Metrics | None
    verdicts: tuple[Verdict, ...]

    @property
    def tokens_per_second(self) -> float:
        """New tokens ÷ seconds, prompt processing included."""
        return 1 / self.seconds_per_token


@dataclass(frozen=True)
class Speculation:
    """How hfspec came to its time.

    Attributes:
        shares: of the calls' time, in percent: prefill, draft, verify, plain and overhead (the rest: hfspec's
            loop, and the host's preparation of each call).
        overhead_ms_per_token: time inside hfspec's loop but outside every model.
        ideal: the speed-up of the best fixed K without overhead (see `hfspec.bench.ideal`), and
        ideal_length: that K.
        achieved: the speed-up after the first token.
    """

    acceptance_rate: float | None
    tokens_per_round: float | None
    shares: dict[str, float]
    overhead_ms_per_token: float
    ideal: float | None
    ideal_length: int | None
    achieved: float | None
    fallback_reasons: dict[str, int]

    @property
    def achieved_of_ideal(self) -> float | None:
        """Achieved ÷ ideal."""
        return self.achieved / self.ideal if self.achieved and self.ideal else None


@dataclass(frozen=True)
class Summary:
    """One method on all prompts of a category, or on all prompts (`category` is `None`).

    Attributes:
        tokens_per_second: all tokens ÷ all seconds.
        speedup: geometric mean over the prompts; beside it the median, the worst and the best prompt.
        ttft_ms: median over the prompts.
        num_compared: outputs that were compared with plain's: so many identical, so many that differ first
            at a near-tie.
    """

    method: str
    category: str | None
    num_prompts: int
    tokens_per_second: float
    speedup: float
    speedup_median: float
    speedup_worst: float
    speedup_best: float
    ttft_ms: float
    num_compared: int
    num_identical: int
    num_near_ties: int
    speculation: Speculation | None


@dataclass(frozen=True)
class Report:
    """Everything that was found, and under which conditions."""

    conditions: dict[str, Any]
    methods: list[str]
    categories: list[str]
    rows: list[Row]
    overall: list[Summary]
    by_category: list[Summary]
    not_run: dict[str, str]
    peak_rss_bytes: int
    peak_gpu_bytes: int

    def summary(self, method: str, category: str | None = None) -> Summary:
        """One method's summary."""
        among = self.overall if category is None else self.by_category
        return next(item for item in among if item.method == method and item.category == category)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "conditions": self.conditions,
            "overall": [_summary_dict(item) for item in self.overall],
            "by_category": [_summary_dict(item) for item in self.by_category],
            "prompts": [_row_dict(row) for row in self.rows],
            "not_run": self.not_run,
            "peak_rss_bytes": self.peak_rss_bytes,
            "peak_gpu_bytes": self.peak_gpu_bytes,
        }


def build(results: Results, conditions: dict[str, Any]) -> Report:
    """Sum the runs up."""
    rows = _rows(results.runs)
    methods = list(dict.fromkeys(row.method for row in rows))
    categories = list(dict.fromkeys(row.category for row in rows))
    return Report(
        conditions=conditions,
        methods=methods,
        categories=categories,
        rows=rows,
        overall=[_summarise(rows, method, None) for method in methods],
        by_category=[_summarise(rows, method, category) for category in categories for method in methods],
        not_run=results.not_run,
        peak_rss_bytes=results.peak_rss_bytes,
        peak_gpu_bytes=results.peak_gpu_bytes,
    )


def _rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each prompt and method; in the order of the prompts and of `NAMES`."""
    groups: dict[Prompt, dict[str, list[Run]]] = {}
    for run in runs:
        groups.setdefault(run.prompt, {}).setdefault(run.method, []).append(run)
    rows = []
    for by_method in groups.values():
        plain = _seconds_per_token(by_method[PLAIN])
        rows += [_row(by_method[method], plain) for method in sorted(by_method, key=NAMES.index)]
    return rows


def _row(repeats: Sequence[Run], plain_seconds_per_token: float) -> Row:
    first = repeats[0]
    seconds_per_token = _seconds_per_token(repeats)
    decode = [run.decode_seconds / run.num_decode_tokens for run in repeats if run.num_decode_tokens > 0]
    metrics = None
    if first.metrics is not None:
        metrics = Metrics()
        for run in repeats:
            if run.metrics is not None:
                metrics.add(run.metrics)
    return Row(
        method=first.method,
        prompt_id=first.prompt.id,
        category=first.prompt.category,
        num_prompt_tokens=first.num_prompt_tokens,
        num_tokens=statistics.median(run.num_tokens for run in repeats),
        seconds_per_token=seconds_per_token,
        decode_seconds_per_token=statistics.median(decode) if decode else None,
        ttft_seconds=statistics.median(run.ttft_seconds for run in repeats),
        speedup=plain_seconds_per_token / seconds_per_token,
        seconds=sum(run.seconds for run in repeats),
        metrics=metrics,
        verdicts=tuple(run.verdict for run in repeats if run.verdict is not None),
    )


def _seconds_per_token(repeats: Sequence[Run]) -> float:
    return statistics.median(run.seconds / run.num_tokens for run in repeats)


def _summarise(rows: Sequence[Row], method: str, category: str | None) -> Summary:
    chosen = [row for row in rows if category in (None, row.category)]
    mine = [row for row in chosen if row.method == method]
    speedups = [row.speedup for row in mine]
    verdicts = [verdict for row in mine for verdict in row.verdicts]
    return Summary(
        method=method,
        category=category,
        num_prompts=len(mine),
        tokens_per_second=sum(row.num_tokens for row in mine)
        / sum(row.num_tokens * row.seconds_per_token for row in mine),
        speedup=statistics.geometric_mean(speedups),
        speedup_median=statistics.median(speedups),
        speedup_worst=min(speedups),
        speedup_best=max(speedups),
        ttft_ms=1e3 * statistics.median(row.ttft_seconds for row in mine),
        num_compared=len(verdicts),
        num_identical=sum(verdict.identical for verdict in verdicts),
        num_near_ties=sum(verdict.near_tie is True for verdict in verdicts),
        speculation=_speculation(mine, [row for row in chosen if row.method == PLAIN]),
    )


def _speculation(mine: Sequence[Row], plain: Sequence[Row]) -> Speculation | None:
    total = Metrics()
    for row in mine:
        if row.metrics is None:
            return None
        total.add(row.metrics)
    seconds = sum(row.seconds for row in mine)
    shares = {
        "prefill": total.prefill_seconds,
        "draft": total.draft_seconds + total.draft_prefill_seconds,
        "verify": total.verify_seconds,
        "plain": total.plain_seconds,
    }
    shares["overhead"] = max(0.0, seconds - sum(shares.values()))
    plain_token, my_token = _decode_seconds_per_token(plain), _decode_seconds_per_token(mine)
    times = Times.of(total, plain_token) if plain_token else None
    ideal, length = ideal_speedup(total, times) if times else (None, None)
    return Speculation(
        acceptance_rate=total.acceptance_rate,
        tokens_per_round=total.tokens_per_round,
        shares={name: 100 * part / seconds for name, part in shares.items()},
        overhead_ms_per_token=1e3 * total.overhead_seconds / total.new_tokens,
        ideal=ideal,
        ideal_length=length,
        achieved=plain_token / my_token if plain_token and my_token else None,
        fallback_reasons=dict(total.fallback_reasons),
    )


def _decode_seconds_per_token(rows: Sequence[Row]) -> float | None:
    """Mean over prompts, weighted by their tokens."""
    timed = [(row.decode_seconds_per_token, row.num_tokens) for row in rows]
    weighted = [(seconds * tokens, tokens) for seconds, tokens in timed if seconds is not None]
    return sum(part for part, _ in weighted) / sum(tokens for _, tokens in weighted) if weighted else None


def _summary_dict(summary: Summary) -> dict[str, Any]:
    value = asdict(summary)
    if summary.speculation is not None:
        value["speculation"]["achieved_of_ideal"] = summary.speculation.achieved_of_ideal
    return value


def _row_dict(row: Row) -> dict[str, Any]:
    value = asdict(replace(row, metrics=None))
    value["tokens_per_second"] = row.tokens_per_second
    value["metrics"] = dict(vars(row.metrics)) if row.metrics else None
    return value
