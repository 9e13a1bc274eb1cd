"""Lets recurrent layers that can go on from their state by one token only read several: one after the other.

The rest of the model (embeddings, attention, experts, the head) still reads them in one go, and so do the weights
of such a layer as long as they stay in a fast memory between two tokens.
"""

import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hfspec.host.modules import modules_where

#: They start from nothing, or limit time steps, whenever several tokens come at once (see `tests/zoo`).
_ONE_BY_ONE = (
    "FalconMambaMixer",
    "JambaMambaMixer",
    "MambaMixer",
    "RecurrentGemmaRecurrentBlock",
    "ZambaMambaMixer",
)

#: Keywords with something for each token.
_PER_TOKEN = ("hidden_states", "input_states", "position_ids")

_lock = threading.Lock()
#: Which thread is within `stepping`: others that use the layer meanwhile find it as it was.
_here = threading.local()
#: How many calls have a layer step just now.
_num_calls: dict[int, int] = {}


def stepping_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of a model that have to be fed token by token."""
    return modules_where(model, _goes_by_one)


def _goes_by_one(module: torch.nn.Module) -> bool:
    return type(module).__name__ in _ONE_BY_ONE or getattr(module, "time_step_limit", (0.0,))[0] > 0


@contextmanager
def stepping(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block, these layers take the tokens of a forward one after the other.

    Nothing stays on the model. Calls in several threads share what is put on, and the last one takes it off.
    """
    if not layers:
        yield
        return
    for layer in layers:
        _put_on(layer)
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1
        for layer in layers:
            _take_off(layer)


def _put_on(layer: torch.nn.Module) -> None:
    with _lock:
        _num_calls[id(layer)] = _num_calls.get(id(layer), 0) + 1
        if _num_calls[id(layer)] == 1:
            vars(layer)["forward"] = _Stepped(layer, vars(layer).get("forward"))


def _take_off(layer: torch.nn.Module) -> None:
    with _lock:
        _num_calls[id(layer)] -= 1
        if not _num_calls[id(layer)]:
            del _num_calls[id(layer)]
            before = vars(layer).pop("forward").was_on_instance
            if before is not None:  # Accelerate's hooks, say
                vars(layer)["forward"] = before


class _Stepped:
    """A layer's `forward` that takes several tokens one after the other.

    Args:
        layer: whose `forward` it stands for.
        was_on_instance: what stood in the instance's dict before, if anything did.
    """

    def __init__(self, layer: torch.nn.Module, was_on_instance: Any) -> None:
        self._layer = weakref.ref(layer)
        self._forward: Callable[..., Any] = layer.forward
        self.was_on_instance = was_on_instance
        functools.update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = next((name for name in _PER_TOKEN if name in kwargs), None)
        hidden_states: torch.Tensor = args[0] if args else kwargs[name or ""]
        num_tokens = hidden_states.shape[1]
        if num_tokens == 1 or not getattr(_here, "depth", 0):
            return self._forward(*args, **kwargs)
        if kwargs.get("attention_mask") is not None:  # it hides padding of the prompt, which has been read
            kwargs["attention_mask"] = None
        steps = []
        for index in range(num_tokens):
            token = slice(index, index + 1)
            mine = {name: kwargs[name][:, token] for name in _PER_TOKEN if kwargs.get(name) is not None}
            first = (args[0][:, token], *args[1:]) if args else ()
            steps.append(self._forward(*first, **(kwargs | mine)))
        if isinstance(steps[0], tuple):
            return (torch.cat([step[0] for step in steps], dim=1), *steps[-1][1:])
        return torch.cat(steps, dim=1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The copy of a layer has the forward that the layer had before, on its own weights."""
        layer: Any = self._layer()
        if self.was_on_instance is not None:
            return copy.deepcopy(self.was_on_instance, memo)
        return types.MethodType(type(layer).forward, memo.get(id(layer), layer))
