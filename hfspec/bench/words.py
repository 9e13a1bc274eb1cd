"""How results are worded: the same in a terminal, a chart and the README. Takes plain values, as JSON has them."""

from typing import Any


def pair(conditions: dict[str, Any]) -> str:
    """Target ← draft, without the folders or owners their names begin with."""
    target, draft = (conditions[name].rstrip("/").rsplit("/", 1)[-1] for name in ("target", "draft"))
    return f"{target} ← {draft}{conditions['draft_kind']}"


def task(conditions: dict[str, Any]) -> str:
    """What was run."""
    size = f"{conditions['num_prompts']} prompts × {conditions['max_new_tokens']} tokens"
    if conditions["repeats"] > 1:
        size += f" × {conditions['repeats']} runs"
    return f"{conditions['dtype']}, {conditions['choice']}, {size}"


def place(conditions: dict[str, Any]) -> str:
    """The hardware."""
    machine = conditions["machine"]
    return machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads of {machine['cores']} cores"


def host(conditions: dict[str, Any]) -> str:
    """The libraries underneath."""
    return ", ".join(f"{name} {conditions['versions'][name]}" for name in ("torch", "transformers"))


def speedup(value: float) -> str:
    """1 is plain's speed."""
    return f"{value:.2f}×"


def number(value: float | None) -> str:
    """A rate; a dash where there was nothing to count."""
    return "–" if value is None else f"{value:.2f}"


def sameness(num_compared: int, num_identical: int, num_near_ties: int) -> str:
    """How many outputs were plain's, and what the others were."""
    if not num_compared:
        return "other draws by design"
    text = f"{num_identical} of {num_compared}"
    if num_near_ties:
        text += f", near-ties: {num_near_ties}"
    if num_other := num_compared - num_identical - num_near_ties:
        text += f", OTHER: {num_other}"
    return text
