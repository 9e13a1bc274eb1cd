"""Scripts that belong to no package, loaded to be tested."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def benchmark(name: str) -> ModuleType:
    """`benchmarks/{name}.py` as a module."""
    return _module("benchmarks", name)


def example(name: str) -> ModuleType:
    """`examples/{name}.py` as a module."""
    return _module("examples", name)


def _module(folder: str, name: str) -> ModuleType:
    full_name = f"{folder}_{name}"
    spec = importlib.util.spec_from_file_location(full_name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
