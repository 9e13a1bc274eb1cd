"""What the tiny models are asked: one text, or three of different lengths, or sounds or pictures."""

from typing import Any

import torch

from tests.zoo.overrides import FEATURES, PICTURE_MASKS, ROWS_PER_TEXT, WITH_TEXT
from tests.zoo.tiny import PAD, Species

_LENGTHS = (5, 9, 7)
_FIRST_ID, _LAST_ID = 3, 79  # neither the special tokens nor the ids of images and sounds


def inputs(species: Species, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """`generate()`'s inputs: padded on the left, or for an encoder on the right, where rows differ in length."""
    generator = torch.Generator().manual_seed(3)
    features = species.override(FEATURES, None)
    sound = {}
    if features is not None:
        name, shape = features
        sound = {name: torch.randn(batch, *shape, generator=generator).to(dtype)}
        if species.model_type not in WITH_TEXT:
            return sound
    lengths = torch.tensor(_LENGTHS[:batch] if batch > 1 else (9,))
    lengths = lengths.repeat_interleave(species.override(ROWS_PER_TEXT, 1))
    ids = torch.randint(_FIRST_ID, _LAST_ID, (len(lengths), 9), generator=generator)
    mask = (torch.arange(9) >= 9 - lengths[:, None]).long()
    if (name := PICTURE_MASKS.get(species.model_type)) is not None:
        sound[name] = torch.ones(len(lengths), 9, 1, dtype=torch.long)
    if species.kind == "seq2seq":
        mask = mask.flip(1)
    return sound | {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
