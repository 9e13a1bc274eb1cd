"""What the draft source is told of each row of a call."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.nn.functional import pad

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
            prompt_length=prepared.input_ids.shape[1],
            row=row,
            max_read=prepared.generation_config.prefill_chunk_size,
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
    """The images and sounds in a row's prompt, and the mask of its prompt, if that is read from its beginning."""
    if not given or prepared.model_kwargs.get("inputs_embeds") is not None:
        return {}
    num_sequences = prepared.generation_config.num_return_sequences or 1
    # Not `is_empty`: a static cache of an earlier call, made empty again, is as good as new.
    has_read = prepared.cache is not None and int(prepared.cache.get_seq_length()) > 0
    if has_read:
        return {}
    prompts, mask = prepared.input_ids[::num_sequences], prepared.padding_mask(row)
    mine = dict(given) if len(prompts) == 1 else _of_prompt(prepared, given, prompts, row // num_sequences)
    return mine if mask is None or not mine else {**mine, "attention_mask": mask}


def _of_prompt(prepared: Prepared, given: Mapping[str, Any], prompts: torch.Tensor, index: int) -> dict[str, Any]:
    """Of a batch's images those of one of its `prompts` `[prompts, length]`; nothing where that cannot be told.

    Nothing in `generate()` says which image belongs to which prompt, but each has a run of places in the ids.
    """
    media_ids = torch.tensor(prepared.media_token_ids, device=prompts.device)
    is_media = torch.isin(prompts, media_ids)
    num_images = (is_media & ~pad(is_media, (1, -1))).sum(dim=1).tolist()
    first, last = sum(num_images[:index]), sum(num_images[: index + 1])
    # Where images come as patches end to end, their grids say how many each has.
    grids = next((value for name, value in given.items() if name.endswith("grid_thw")), None)
    patches = [] if grids is None else grids.prod(dim=-1).tolist()
    mine = {}
    for name, value in given.items():
        if value.shape[:2] == prompts.shape:
            mine[name] = value[index : index + 1]
        elif len(value) == sum(num_images):
            mine[name] = value[first:last]
        elif len(value) == len(prompts):
            mine[name] = value[index : index + 1]
        elif patches and len(value) == sum(patches):
            mine[name] = value[sum(patches[:first]) : sum(patches[:last])]
        else:
            return {}
    return mine


def _row_of(value: Any, row: int, num_rows: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    source = row * value.shape[0] // num_rows
    return value[source : source + 1]
