"""The conditions: the command line as it can be typed again, and a machine that has a name."""

import sys

import pytest

from hfspec.bench import machine


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/bin/hfspec", "bench", "--target", "my model", "--quick"])
    assert machine.command("hfspec") == "hfspec bench --target 'my model' --quick"
    monkeypatch.setattr(sys, "argv", ["benchmarks/batch.py", "--sizes", "4,8"])
    conditions = machine.describe("python benchmarks/batch.py")
    assert conditions["command"] == "python benchmarks/batch.py --sizes 4,8"


def test_the_machine_is_described() -> None:
    found = machine.describe("hfspec")["machine"]
    assert found["cpu"] == machine.cpu_name() != ""
    assert found["memory_bytes"] > 1e8
    assert found.items() >= machine.devices().items()
