"""This machine, and the conditions of a measurement: what a number is worth nothing without."""

import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

import hfspec

#: What matters for small-batch inference.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "bf16", "i8mm")


def describe(program: str) -> dict[str, Any]:
    """Command, date, versions and machine, ready for JSON.

    Args:
        program: see `command`.
    """
    return {
        "command": command(program),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hfspec": hfspec.__version__,
        },
        "machine": devices()
        | {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "memory_bytes": psutil.virtual_memory().total,
            "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
    }


def command(program: str) -> str:
    """The command line of this process, to be typed again.

    Args:
        program: how it is called: `hfspec`, or `python benchmarks/x.py`.
    """
    return shlex.join([*program.split(), *sys.argv[1:]])


def devices() -> dict[str, Any]:
    """What can compute here, and the settings that change how."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(num_gpus)],
        "mps": torch.backends.mps.is_available(),
        "cpu": cpu_name(),
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": cpu_features(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        "HFSPEC_DISABLE": os.environ.get("HFSPEC_DISABLE"),
    }


def cpu_name() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """The processor's flags that matter here, where Linux lists them."""
    flags = _cpu_info("flags", "Features").split()
    return [flag for flag in _CPU_FLAGS if flag in flags]


def _cpu_info(*names: str) -> str:
    """The first processor's entry under one of these names; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(names)), "")
