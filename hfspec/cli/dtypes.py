"""What `--dtype` takes, and which one this machine computes in fastest."""

import enum

import torch

from hfspec.bench.machine import cpu_features

_BF16_CPU_FEATURES = frozenset({"amx_bf16", "avx512_bf16", "bf16"})


class Dtype(str, enum.Enum):
    """A dtype by name, or `auto`."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    def resolve(self, device: str) -> torch.dtype:
        """The dtype itself; automatic is bf16 where the hardware computes in it, else float32."""
        name = self.value
        if self is Dtype.AUTO:
            has_bf16 = device == "cuda" or not _BF16_CPU_FEATURES.isdisjoint(cpu_features())
            name = "bfloat16" if has_bf16 else "float32"
        dtype: torch.dtype = getattr(torch, name)
        return dtype
