"""A report as one picture: the speed-up of each method in each kind of work."""

from pathlib import Path
from typing import Any

from hfspec.bench import words
from hfspec.bench.methods import HFSPEC, NAMES, PLAIN
from hfspec.bench.report import Report

_COLOURS = {
    "hf-prompt-lookup": "#c9c9c9",
    "hf-assisted": "#f2b267",
    "hf-assisted-constant": "#d98a4b",
    "hf-assisted-heuristic": "#a85f2f",
    HFSPEC: "#2463a8",
}
_INK, _FAINT = "#222222", "#dddddd"
#: Share of the room between two categories that bars take up.
_FILLED = 0.8
#: With more categories than this, names take a line for each word.
_ROOMY = 7


def draw(report: Report, path: Path) -> None:
    """Write the chart as PNG (or as whatever the suffix says)."""
    # In the `bench` extra: the rest of the command line does without.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    methods = [name for name in NAMES if name in report.methods and name != PLAIN]
    groups: list[str | None] = [None, *report.categories]
    figure = Figure(figsize=(max(7.5, 1.8 + 0.23 * len(groups) * (len(methods) + 1.8)), 5.0), dpi=160)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    highest = 1.0
    for index, method in enumerate(methods):
        values = [report.summary(method, group).speedup for group in groups]
        highest = max(highest, *values)
        width = _FILLED / len(methods)
        places = [_place(number) + (index - (len(methods) - 1) / 2) * width for number in range(len(groups))]
        is_ours = method == HFSPEC
        bars = axes.bar(places, values, 0.94 * width, label=method, color=_COLOURS[method], zorder=2)
        axes.bar_label(
            bars,
            [f"{value:.2f}" for value in values],
            padding=2,
            fontsize=8 if len(methods) < 4 else 6.5,
            fontweight="bold" if is_ours else "normal",
            color=_COLOURS[HFSPEC] if is_ours else _INK,
            # A label that falls on the 1× line stays readable.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            zorder=4,
        )
    _finish(axes, report, groups, highest)
    figure.tight_layout()
    figure.savefig(path)


def _place(number: int) -> float:
    """Where a group stands; the first one, all prompts, stands a little apart."""
    return number + (0.25 if number else 0.0)


def _finish(axes: Any, report: Report, groups: list[str | None], highest: float) -> None:
    axes.axhline(1.0, color=_INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=3)
    axes.axvline(0.625, color=_FAINT, linewidth=1, zorder=1)
    right = _place(len(groups) - 1) + 0.55
    axes.set_xlim(-0.55, right)
    axes.set_ylim(0, 1.13 * highest)
    axes.annotate(
        "plain\ngenerate()",
        (right, 1.0),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=_INK,
        annotation_clip=False,
    )
    axes.set_xticks([_place(number) for number in range(len(groups))])
    axes.set_xticklabels([_label(report, group) for group in groups], fontsize=9)
    axes.get_xticklabels()[0].set_fontweight("bold")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_ylabel("speed-up over plain generate()")
    axes.grid(axis="y", color=_FAINT, linewidth=0.7, zorder=0)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(words.pair(report.conditions), loc="left", fontsize=12, fontweight="bold", pad=44)
    conditions = f"{words.task(report.conditions)}, batch 1, {words.place(report.conditions)}"
    axes.annotate(
        conditions, (0, 1), xytext=(0, 30), xycoords="axes fraction", textcoords="offset points", fontsize=8.5
    )
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=5, frameon=False, fontsize=9, borderaxespad=0.2)


def _label(report: Report, group: str | None) -> str:
    name = group or "all prompts"
    if len(report.categories) > _ROOMY:
        name = name.replace(" ", "\n").replace("_", "\n")
    return f"{name}\n({report.summary(PLAIN, group).num_prompts})"
