"""Distributions over tokens, compared."""

import torch


def total_variation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Half of what two distributions differ by in all: 0 for equal ones, 1 for disjoint ones."""
    return float((one - other).abs().sum() / 2)
