"""The table of all architectures as a Markdown page: written by the command, read by the test."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.zoo.verdict import EQUAL, PLAIN, VANILLA_FAILS, WRONG, Row

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
_VERSION = "Written on transformers "
_KINDS = {"causal": "Text", "seq2seq": "Text to text", "speech": "Sound to text", "image": "Text and pictures"}
_MEANINGS = {
    EQUAL: "sped up, same tokens",
    PLAIN: "runs plain, with a reason",
    VANILLA_FAILS: "fails without hfspec already",
    WRONG: "wrong",
}


def render(rows: Sequence[Row], version: str) -> str:
    """The whole page."""
    lines = [
        "# The zoo",
        "",
        "Every architecture in the release's tables of models that write text: a tiny random model each, called",
        "unpatched and patched with a draft of its own kind, greedy and sampled, with eager and SDPA attention, one",
        "text and three texts of different lengths. Models of text and pictures get text alone (but for BLIP and",
        "IDEFICS, which want a picture); `tests/multimodal` has pictures. *equal*: tokens, random state and warnings",
        "are the same, and some tokens were drafted. *plain*: the same tokens without speculation, for the reason that",
        "`hfspec.stats` gives. *fails*: vanilla cannot run the tiny model, or not on such a prompt.",
        "",
        f"{_VERSION}{version} by `python -m tests.zoo --write docs/zoo.md`; `tests/zoo/test_zoo.py` checks it.",
        "",
        "| of " + str(len(rows)) + " | " + " | ".join(_MEANINGS.values()) + " |",
        "| :-- |" + " --: |" * len(_MEANINGS),
        _counts("one text", [row.one for row in rows]),
        _counts("three texts", [row.three for row in rows]),
    ]
    for kind, title in _KINDS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| type | class | one text | three texts | note |",
            "| :-- | :-- | :-- | :-- | :-- |",
        ]
        lines += [line_of(row) for row in rows if row.species.kind == kind]
    return "\n".join(lines) + "\n"


def read(page: Path = PAGE) -> tuple[str, dict[str, str]]:
    """The transformers version a page was written on, and its lines by the architecture's name."""
    version, lines, kind = "", {}, ""
    kinds = {f"## {title}": kind for kind, title in _KINDS.items()}
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith(_VERSION):
            version = line.removeprefix(_VERSION).split(" ")[0]
        kind = kinds.get(line, kind)
        if kind and line.startswith("| `"):
            lines[f"{kind}: {line.split('`')[1]}"] = line
    return version, lines


def line_of(row: Row) -> str:
    """The row's line on the page."""
    cells = [f"`{row.species.model_type}`", f"`{row.species.class_name}`", row.one, row.three, row.note]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _counts(title: str, verdicts: Sequence[str]) -> str:
    counts = Counter(next(start for start in _MEANINGS if verdict.startswith(start)) for verdict in verdicts)
    return f"| {title} | " + " | ".join(str(counts[start]) for start in _MEANINGS) + " |"
