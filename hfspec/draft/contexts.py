"""What the draft source is told of each row of a call."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from hfspec.draft.base import Context
from hfspec.host import forwards
from hfspec.host.prepared import Prepared
from hfspec.sampling.noise import BatchNoise
from hfspec.sampling.processors import for_row


def contexts_of(
    prepared: Prepared,
    selection: Literal["greedy", "seeded", "rejection"],
    noise: BatchNoise,
    encoder_inputs: Mapping[str, Any],
) -> list[Context]:
    """One context a row.

    Args:
        noise: of all rows.
        encoder_inputs: what an encoder was given, before the host repeated it for several sequences: the encoder of
            an encoder-decoder model, or the one that makes images and sounds into places of the text.
    """
    num_rows = prepared.num_rows
    outputs = prepared.encoder_outputs
    inputs_of = _of_the_encoder if prepared.model.config.is_encoder_decoder else _in_the_text
    return [
        Context(
            vocab_size=prepared.vocab_size,
            device=prepared.device,
            selection=selection,
            processors=for_row(prepared.processors, row, num_rows),
            noise=noise.share([row]),
            prompt_mask=prepared.text_mask(row),
            row=row,
            inputs=inputs_of(prepared, encoder_inputs, row),
            token_types=_token_types(prepared, row),
            encoder_outputs=None if outputs is None else forwards.row_of_outputs(outputs, row),
            encoder=None if outputs is None else prepared.model.get_encoder(),
        )
        for row in range(num_rows)
    ]


def _token_types(prepared: Prepared, row: int) -> torch.Tensor | None:
    """What kind of token each id of a row's prompt is, `[1, prompt_length]`; with images the model knows it."""
    types: torch.Tensor | None = prepared.model_kwargs.get("token_type_ids")
    if types is None or prepared.has_media or types.shape != prepared.input_ids.shape:
        return None
    return types[row : row + 1]


def _of_the_encoder(prepared: Prepared, given: Mapping[str, Any], row: int) -> dict[str, Any]:
    """What an encoder-decoder model's encoder was given for this row, and the mask of what it made of it."""
    inputs = {name: _row_of(value, row, prepared.num_rows) for name, value in given.items()}
    mask = prepared.model_kwargs.get("attention_mask")
    return inputs if mask is None else inputs | {"attention_mask": _row_of(mask, row, prepared.num_rows)}


def _in_the_text(prepared: Prepared, given: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The images and sounds of the call, and the mask of its prompt, if it is one prompt, read from its beginning.

    Nothing in `generate()` says which of a batch's images belong to which row.
    """
    if not given or prepared.model_kwargs.get("inputs_embeds") is not None:
        return {}
    num_prompts = prepared.num_rows // (prepared.generation_config.num_return_sequences or 1)
    # Not `is_empty`: a static cache of an earlier call, made empty again, is as good as new.
    has_read = prepared.cache is not None and int(prepared.cache.get_seq_length()) > 0
    if num_prompts > 1 or has_read:
        return {}
    mask = prepared.padding_mask(row)
    return dict(given) if mask is None else {**given, "attention_mask": mask}


def _row_of(value: Any, row: int, num_rows: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    source = row * value.shape[0] // num_rows
    return value[source : source + 1]
