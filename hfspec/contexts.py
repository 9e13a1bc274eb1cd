"""What the draft source is told of each row of a call."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from hfspec import compat
from hfspec.draft.base import Context, Peek
from hfspec.prepared import Prepared
from hfspec.sampling.processors import for_row


def contexts_of(
    prepared: Prepared,
    selection: Literal["greedy", "seeded", "rejection"],
    noises: Sequence[Peek],
    encoder_inputs: Mapping[str, Any],
) -> list[Context]:
    """One context a row.

    Args:
        noises: the noise of each row.
        encoder_inputs: what the encoder of an encoder-decoder model was given, before the host repeated it for
            several sequences.
    """
    num_rows = prepared.num_rows
    outputs = prepared.encoder_outputs
    return [
        Context(
            vocab_size=prepared.vocab_size,
            device=prepared.device,
            selection=selection,
            processors=for_row(prepared.processors, row, num_rows),
            noise=noises[row],
            prompt_mask=prepared.text_mask(row),
            row=row,
            inputs={name: _row_of(value, row, num_rows) for name, value in encoder_inputs.items()},
            encoder_outputs=None if outputs is None else compat.row_of_outputs(outputs, row),
            encoder=None if outputs is None else prepared.model.get_encoder(),
        )
        for row in range(num_rows)
    ]


def _row_of(value: Any, row: int, num_rows: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    source = row * value.shape[0] // num_rows
    return value[source : source + 1]
