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
from hfspec.host import forwards, releases

#: Of a context's inputs, the one that says what is padding.
_MASK = "attention_mask"
#: Keywords that sessions make for every forward.
_MADE_HERE = {
    *("input_ids", "inputs_embeds", _MASK, "position_ids", "cache_position", *releases.TOKEN_TYPES),
    *(*releases.CACHE_KEYS, "use_cache", "logits_to_keep", "return_dict"),
}
#: How inputs are called that hold something for each id of the prompt.
_TYPES_OF_IDS, _MASKS_OF_IDS = "token_type_ids", "attention_mask"


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


class Media:
    """The images and sounds of a row, as a draft that sees them is handed them forward by forward.

    Most models are done with them after the first. Others take masks for each token, or what they have made of images;
    these read the prompt by itself, and what is behind it as their own preparation wants it.
    """

    def __init__(self, model: PreTrainedModel, context: Context, device: torch.device) -> None:
        self._model = model
        self._context = context
        self._device = device
        self._outputs = ModelOutput()  # of the prompt's forward
        self._kwargs: dict[str, Any] = {}
        self._length = 0  # that the kwargs have grown to
        #: Whether the first forward must be over the prompt, and no more.
        self.grows = forwards.grows_itself(model)

    def first(self, width: int) -> dict[str, Any]:
        """Keywords of the forward that reads the row's first `width` ids."""
        mask, given = given_mask(self._context), {}
        for name, value in self._context.inputs.items():
            if name == _MASK:
                continue
            is_of_ids = name.endswith((_TYPES_OF_IDS, _MASKS_OF_IDS))
            if is_of_ids and mask is not None and value.shape[:2] == mask.shape:
                value = Visible(mask).of(value)
            if name.endswith(_TYPES_OF_IDS):  # text comes behind the prompt
                value = functional.pad(value, (0, width - value.shape[1]))
            given[name] = _to(self._model, self._device, value)
        return given

    def were_read(self, given: dict[str, Any], outputs: ModelOutput, width: int) -> None:
        """Learn what that forward has given."""
        if self.grows:
            self._outputs, self._kwargs, self._length = outputs, given | {"use_cache": True}, width

    def behind(self, num_before: int, width: int) -> dict[str, Any]:
        """Keywords of a later forward, over `width` tokens behind so many: what the model's own preparation adds."""
        if not self.grows:
            return {}
        length = num_before + width
        places = {} if releases.FEEDS_BY_LENGTH else {"cache_position": torch.arange(length, device=self._device)}
        while self._length < length:
            self._kwargs = forwards.advance(self._model, self._outputs, self._kwargs | places, 1)
            self._length += 1
        ids = torch.zeros(1, length, dtype=torch.long, device=self._device)
        kwargs = self._kwargs | places | {_MASK: torch.ones_like(ids)}
        prepared = forwards.prepare_last(self._model, ids, width, kwargs)
        return {name: value for name, value in prepared.items() if name not in _MADE_HERE}


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
        """The ids of a text `[1, n]` that are not hidden, or what there is for each `[1, n, …]`."""
        if self._indices is None:
            return input_ids
        prompt = input_ids[:, : self._num_prompt].index_select(1, self._indices.to(input_ids.device))
        return torch.cat([prompt, input_ids[:, self._num_prompt :]], dim=1)


def _to(model: PreTrainedModel, device: torch.device, value: Any) -> Any:
    """A value as this model takes it: tensors on its device, numbers that are no ids in its dtype."""
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _to(model, device, each) for name, each in value.items()})
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, model.dtype) if value.is_floating_point() else value.to(device)
