"""The conditions of a result, as `hfspec bench` writes them."""

from typing import Any


def conditions(**changed: Any) -> dict[str, Any]:
    """Those of a small run, but for what is changed."""
    return {
        "target": "some/Target",
        "draft": "some/Draft",
        "draft_kind": " (int8)",
        "dtype": "float32",
        "choice": "greedy",
        "num_prompts": 4,
        "max_new_tokens": 64,
        "repeats": 1,
        "command": "hfspec bench --quick",
        "machine": {"gpu": None, "cpu": "A CPU", "threads": 2, "cores": 4},
        "versions": {"torch": "2.9", "transformers": "5.0"},
    } | changed
