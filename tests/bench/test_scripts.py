"""The scripts in `benchmarks/` that no other test runs, on tiny models."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from tests.scripts import benchmark


def test_overhead_counts_what_is_outside_forwards() -> None:
    overhead = benchmark("overhead")
    medians, acceptance = overhead.compare(overhead.toy(0), overhead.toy(0), num_tokens=12, repeats=1)
    assert set(medians) == {"plain", "hf-assisted-constant", "hfspec"}
    assert all(value > 0 for value in medians.values())
    assert acceptance == 1.0


@pytest.mark.usefixtures("stand_ins")
def test_batch_compares_every_row_and_says_how_it_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "batch.json"
    words = ["--sizes", "2,3", "--max-new-tokens", "8", "--repeats", "1", "--dtype", "float32", "--budget", "3"]
    monkeypatch.setattr(sys, "argv", ["batch.py", *words, "--output", str(output)])
    benchmark("batch").main()
    found = json.loads(output.read_text())
    assert [each["rows"] for each in found["results"]] == [2, 3]
    for each in found["results"]:
        assert each["same_rows"] == each["rows"]
        assert each["acceptance_rate"] == 1.0
        assert each["speedup"] > 0
    assert found["conditions"]["command"].startswith("python benchmarks/batch.py --sizes 2,3")


@pytest.mark.usefixtures("stand_ins")
def test_memory_counts_the_draft_only_where_there_is_one() -> None:
    memory = benchmark("memory")
    found = {
        way: memory.measure(argparse.Namespace(way=way, rows=2, max_new_tokens=4, budget=2)) for way in memory.WAYS
    }
    assert found["plain"]["draft_bytes"] == 0 < found["hfspec"]["draft_bytes"]
    assert all(each["peak_bytes"] > 0 for each in found.values())


def test_noise_counts_rows_and_compares_tokens() -> None:
    found = benchmark("noise").measure(vocab_size=500, num_rows=4, num_tokens=24, fastest=5, repeats=1)
    assert set(found) == {"plain", "5", "auto"}
    assert found["plain"]["rows_of_noise"] == 4 * 24
    assert all(each["is_same"] for each in found.values())
    assert found["5"]["rows_of_noise"] <= 1.5 * found["plain"]["rows_of_noise"]
