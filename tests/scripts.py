"""Scripts that belong to no package, loaded to be tested."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def benchmark(name: str) -> ModuleType:
    """`benchmarks/{name}.py` as a module."""
    full_name = f"benchmarks_{name}"
    spec = importlib.util.spec_from_file_location(full_name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
