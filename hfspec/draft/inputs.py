"""What a draft model is given besides the text: an encoder's outputs, images and sounds.

Knows no cache and no round.
"""

import inspect
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hfspec.draft.base import Context
from hfspec.errors import DraftError

#: Of a context's inputs, the one that says what is padding.
_MASK = "attention_mask"
#: How inputs are called that hold something for each id of the prompt.
_TYPES_OF_IDS = "token_type_ids"


def media_names(context: Context) -> set[str]:
    """What besides ids and mask the call came with."""
    return set(context.inputs) - {_MASK}


def given_mask(context: Context) -> torch.Tensor | None:
    """The mask of the prompt as the call gave it, places of images included, `[1, prompt_length]`."""
    mask: torch.Tensor | None = context.inputs.get(_MASK)
    return mask


def of_encoder(model: PreTrainedModel, context: Context, device: torch.device) -> dict[str, Any]:
    """The keywords that hand a model which takes them what an encoder has made of the call's input.

    Raises:
        DraftError: the model has an encoder, and there is nothing to give it.
    """
    if not model.config.is_encoder_decoder:  # its mask would be the decoder's
        return {"encoder_outputs": _to(model, device, context.encoder_outputs)}
    mask = given_mask(context)
    masked = {} if mask is None else {_MASK: mask.to(device)}
    encoder = model.get_encoder()
    if encoder is context.encoder:
        return masked | {"encoder_outputs": context.encoder_outputs}
    if not media_names(context):
        raise DraftError("the draft has an encoder, and this call came without an encoder's input")
    accepted = inspect.signature(encoder.forward).parameters
    given = {name: _to(model, device, value) for name, value in context.inputs.items() if name in accepted}
    return masked | {"encoder_outputs": encoder(**given, return_dict=True)}


def media(model: PreTrainedModel, context: Context, width: int, device: torch.device) -> dict[str, Any]:
    """The images and sounds in a row's first `width` ids, for the forward that reads them."""
    mask, given = given_mask(context), {}
    for name, value in context.inputs.items():
        if name == _MASK:
            continue
        if name.endswith(_TYPES_OF_IDS):  # one for each id of the prompt; text comes behind it
            types = Visible(mask).of(value)
            value = functional.pad(types, (0, width - types.shape[1]))
        given[name] = _to(model, device, value)
    return given


def token_types(types: torch.Tensor, visible: "Visible", width: int, num_first: int) -> torch.Tensor:
    """What kind of token each of a row's next `width` ids is, `[1, width]`: text goes on as the prompt ended.

    Args:
        types: of the prompt's ids, `[1, prompt_length]`.
        num_first: in the first forward, how many ids the row reads, at the right end; 0 in others.
    """
    last = types[:, -1:].expand(-1, width)
    if not num_first:
        return last
    row = torch.cat([visible.of(types), last], dim=1)[:, :num_first]
    return functional.pad(row, (width - num_first, 0))


class Visible:
    """Which of a row's ids a draft reads: all but what the mask of its prompt `[1, prompt_length]` hides."""

    def __init__(self, mask: torch.Tensor | None) -> None:
        self._num_prompt = 0 if mask is None else mask.shape[1]
        # Found once, as that waits for the device.
        self._indices = None if mask is None else mask[0].nonzero()[:, 0]
        #: How many ids of the prompt are hidden.
        self.num_hidden = 0 if self._indices is None else self._num_prompt - len(self._indices)

    def of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The ids of a text `[1, n]` that are not hidden."""
        if self._indices is None:
            return input_ids
        prompt = input_ids.index_select(1, self._indices.to(input_ids.device))
        return torch.cat([prompt, input_ids[:, self._num_prompt :]], dim=-1)


def _to(model: PreTrainedModel, device: torch.device, value: Any) -> Any:
    """A value as this model takes it: tensors on its device, numbers that are no ids in its dtype."""
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _to(model, device, each) for name, each in value.items()})
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, model.dtype) if value.is_floating_point() else value.to(device)
