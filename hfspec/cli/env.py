"""`hfspec env`: what is installed here, what it can run on, and which models are in the cache.

Loads no model and reaches no network.
"""

import importlib.metadata
import json
import platform
from typing import Any

from packaging.requirements import Requirement

from hfspec.bench import machine
from hfspec.cli.output import AsJson, print_json, print_pairs
from hfspec.weights.places import cache_folder

#: The transformers releases that hfspec's own tests run on.
TESTED_TRANSFORMERS = ("4.57.6", "5.17.0", "5.24.0")

_PACKAGES = ("hfspec", "torch", "transformers", "accelerate", "bitsandbytes", "gguf")


def env(as_json: AsJson = False) -> None:
    """Show versions, devices, CPU features and the model cache.

    Put its output into a bug report. "in range" says whether an installed version is one hfspec supports;
    on CPUs, `amx_bf16` or `avx512_bf16` is what makes bf16 models fast.
    """
    facts = environment()
    if as_json:
        print_json(facts)
        return
    print_pairs("Versions", {"python": facts["python"]} | _version_lines(facts))
    print_pairs("Devices", facts["devices"])
    print_pairs("Model cache", facts["cache"]["models"] or {"empty": "`hfspec demo` fills it"})
    print_pairs("", {"cache folder": facts["cache"]["folder"]})


def environment() -> dict[str, Any]:
    """Everything the command knows, ready for JSON."""
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "command": machine.command("hfspec"),
        "python": platform.python_version(),
        "versions": versions,
        "in_range": _ranges(versions),
        "transformers_is_tested": versions["transformers"] in TESTED_TRANSFORMERS,
        "devices": machine.devices(),
        "cache": {"folder": str(cache_folder()), "models": _cached_models()},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ranges(versions: dict[str, str | None]) -> dict[str, bool]:
    """Whether each requirement of the installed hfspec is met; empty in a checkout that is not installed."""
    if versions["hfspec"] is None:
        return {}
    requirements = map(Requirement, importlib.metadata.requires("hfspec") or [])
    needed = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    return {item.name: _meets(_version(item.name), item) for item in needed}


def _meets(version: str | None, requirement: Requirement) -> bool:
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _version_lines(facts: dict[str, Any]) -> dict[str, str]:
    lines = {}
    for name, version in facts["versions"].items():
        line = version or "not installed"
        if name in facts["in_range"]:
            line += " (in range)" if facts["in_range"][name] else " (OUT OF RANGE)"
        lines[name] = line
    if not facts["transformers_is_tested"]:
        lines["transformers"] += f"; tested releases: {', '.join(TESTED_TRANSFORMERS)}"
    return lines


def _cached_models() -> dict[str, str]:
    """Name and size of each converted model."""
    models = {}
    for provenance in sorted(cache_folder().glob("models/*/hfspec.json")):
        num_bytes = sum(file.stat().st_size for file in provenance.parent.iterdir())
        models[json.loads(provenance.read_text())["hub_id"]] = f"{num_bytes / 1e9:.2f} GB"
    return models
