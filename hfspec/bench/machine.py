"""The conditions of a measurement: what a number is worth nothing without."""

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import hfspec


def describe() -> dict[str, Any]:
    """Versions, processor, threads and date, ready for JSON."""
    import psutil  # in the `bench` extra

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hfspec": hfspec.__version__,
        },
        "machine": {
            "cpu": _cpu_model(),
            "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        },
    }


def _cpu_model() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
