"""`Mark`: how the rows of a cache stood at one time."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mark:
    """What `Rows.back_to` goes back to."""

    num_slots: int
    positions: list[int]
    num_tokens: list[int]
    mask: torch.Tensor | None
    on_device: torch.Tensor | None
    has_inner_holes: bool
    num_packs: int
