"""How results are worded, where no other test looks."""

import pytest

from hfspec.bench import words
from tests.bench.conditions import conditions


def test_names_lose_their_folders_and_single_runs_are_not_counted() -> None:
    assert words.pair(conditions(draft="models/draft/")) == "Target ← draft (int8)"
    assert words.task(conditions()) == "float32, greedy, 4 prompts × 64 tokens"
    assert words.task(conditions(repeats=3)) == "float32, greedy, 4 prompts × 64 tokens × 3 runs"


def test_a_gpu_is_named_instead_of_the_processor() -> None:
    assert words.place(conditions()) == "A CPU, 2 threads of 4 cores"
    assert words.place(conditions(machine={"gpu": "A GPU"})) == "A GPU"


@pytest.mark.parametrize(
    ("counts", "text"),
    [((4, 4, 0), "4 of 4"), ((4, 1, 2), "1 of 4, near-ties: 2, OTHER: 1"), ((0, 0, 0), "other draws by design")],
)
def test_what_is_not_plains_is_named(counts: tuple[int, int, int], text: str) -> None:
    assert words.sameness(*counts) == text
