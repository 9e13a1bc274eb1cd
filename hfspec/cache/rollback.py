"""Brings any cache back to an earlier point of the text: by a length where it can, by a snapshot where it cannot.

A cache that keeps one state for the whole text (recurrent layers), or throws old slots away (static sliding
windows), cannot forget its last tokens. It is copied at a *checkpoint*, restored when tokens are rejected, and
the accepted ones are read again as the left part of the next forward: lazily, without a forward of their own.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, StaticLayer

from hfspec.cache.ledger import SpeculativeLayer
from hfspec.host import caches

#: What RecurrentGemma's layers keep of the text.
_STATES_OF_LAYERS = ("conv1d_state", "recurrent_states")


class _WayBack(ABC):
    """Counts the tokens that were read, and knows how to undo a forward that has failed.

    Attributes:
        num_read: tokens of the text that were read, from wherever the count began.
    """

    num_read: int

    @contextmanager
    def reading(self, num_tokens: int) -> Iterator[None]:
        """A forward over so many tokens a row; if it fails, whatever it has written is taken back."""
        try:
            yield
        except BaseException:
            self._take_back()
            raise
        self.num_read += num_tokens

    @abstractmethod
    def _take_back(self) -> None:
        """Undo whatever a forward has written before it failed."""

    @abstractmethod
    def checkpoint(self) -> None:
        """Everything read so far is committed: never go back beyond this point."""

    @abstractmethod
    def to(self, num_read: int) -> None:
        """Go back to so many tokens or, if that cannot be, to the last checkpoint; `num_read` then says how many."""


class Rollback(_WayBack):
    """How many tokens of the text a cache has read, and the way back.

    Args:
        cache: of any kind that `support.cache_problem` accepts, or none; filled by the model's forwards.
        num_read: tokens of the text in it. Any number will do for a start, as only differences count.
        layers: of the model, where some keep a state in themselves.
        others: further caches that the model's forwards write into, of whatever kind.
    """

    def __init__(
        self, cache: Any, num_read: int = 0, layers: Iterable[torch.nn.Module] = (), others: Iterable[object] = ()
    ) -> None:
        self.num_read = num_read
        self._cache = cache
        self._states = [layer for layer in layers if keeps_state(layer)]
        self._others = list(others)
        self._num_slots_before: int | None = None
        self._lengths_at_checkpoint: dict[int, int] = {}
        self._checkpoint_at = num_read
        self._restores: list[Callable[[], None]] = []

    @property
    def goes_back_at_will(self) -> bool:
        """Whether `to` reaches any point, not only the last checkpoint."""
        return not self._states and not self._others and all(_crops(layer) for layer in self._layers)

    def checkpoint(self) -> None:
        """Everything read so far is committed: never go back beyond this point."""
        if self.goes_back_at_will:
            self._lengths_at_checkpoint, self._checkpoint_at = self._lengths(), self.num_read
            for layer in self._layers:
                if isinstance(layer, SpeculativeLayer):
                    layer.committed = layer.length
            if self._num_slots_before is None:
                self._num_slots_before = int(self._cache.get_seq_length()) - self.num_read
        elif self.num_read != self._checkpoint_at or not self._restores:
            self._restores = [_snapshot(layer) for layer in self._layers]
            self._restores += [_snapshot_of_layer(layer) for layer in self._states]
            self._restores += [_snapshot_of_object(each) for each in self._others]
            self._checkpoint_at = self.num_read

    def to(self, num_read: int) -> None:
        """Go back to so many tokens or, if that cannot be, to the last checkpoint; `num_read` then says how many."""
        excess = self.num_read - num_read
        if excess <= 0:
            return
        if self.goes_back_at_will:
            is_ahead = self.num_read != self._checkpoint_at
            stood_still = self._stood_still() if is_ahead else set()
            for number, layer in enumerate(self._layers):
                if number not in stood_still:
                    _forget(layer, excess)
            self.num_read = num_read
        else:
            self._restore()

    @property
    def _layers(self) -> list[Any]:
        return caches.text_layers(self._cache)

    def _lengths(self) -> dict[int, int]:
        """The slots of those layers that know them without a look at the device, by the layers' numbers."""
        return {
            number: int(layer.get_seq_length())
            for number, layer in enumerate(self._layers)
            if isinstance(layer, DynamicLayer)
        }

    def _stood_still(self) -> set[int]:
        """Which layers have not grown since the checkpoint: Mllama has some that hold an image, and no text."""
        before = self._lengths_at_checkpoint
        return {number for number, length in self._lengths().items() if before.get(number) == length}

    def _take_back(self) -> None:
        if not self.goes_back_at_will:
            self._restore()
            return
        stood_still = self._stood_still()
        for number, layer in enumerate(self._layers):
            if hasattr(layer, "get_seq_length") and number not in stood_still:
                excess = int(layer.get_seq_length()) - (self._num_slots_before or 0) - self.num_read
                if excess > 0:
                    _forget(layer, excess)

    def _restore(self) -> None:
        for restore in self._restores:
            restore()
        self.num_read = self._checkpoint_at


class StateRollback(_WayBack):
    """The same for a state that is no cache of the host's kind: copied whole at a checkpoint, and put back.

    Args:
        model_kwargs: what the model's forwards are given, the state among it.
        key: under which keyword.
    """

    def __init__(self, model_kwargs: dict[str, Any], key: str) -> None:
        self.num_read = 0
        self._model_kwargs = model_kwargs
        self._key = key
        self._checkpoint_at = -1
        self._saved: Any = None

    def checkpoint(self) -> None:
        """Everything read so far is committed: never go back beyond this point."""
        if self.num_read != self._checkpoint_at:
            self._saved = _copied(self._model_kwargs[self._key])
            self._checkpoint_at = self.num_read

    def to(self, num_read: int) -> None:
        """Go back to the last checkpoint, if so many tokens are fewer than were read."""
        if num_read < self.num_read:
            self._take_back()

    def _take_back(self) -> None:
        self._model_kwargs[self._key] = _copied(self._saved)
        self.num_read = self._checkpoint_at


def keeps_state(layer: torch.nn.Module) -> bool:
    """Whether a layer of a model keeps a state of the text in itself."""
    return any(name in vars(layer) for name in _STATES_OF_LAYERS)


def _crops(layer: Any) -> bool:
    """Whether the layer can forget its last tokens, however many and whenever."""
    kind = type(layer)
    return isinstance(layer, SpeculativeLayer) or (kind in caches.CROPPABLE_LAYERS and not caches.is_changed(kind))


def _forget(layer: Any, num_slots: int) -> None:
    """Let a layer that crops forget its last slots."""
    layer.crop(-num_slots)  # 0, or a positive count, means different things in different releases
    if isinstance(layer, StaticLayer) and layer.is_initialized:
        _clear_last(layer, num_slots)


def _snapshot(layer: Any) -> Callable[[], None]:
    """Copy a layer's state; the function returned puts it back, as often as it is called."""
    if isinstance(layer, SpeculativeLayer):
        length = layer.committed = layer.length
        return lambda: layer.rollback(length)
    # Keys and values of dynamic layers are replaced at every update, never written into: a reference will do.
    is_replaced = isinstance(layer, DynamicLayer) and not caches.is_changed(type(layer))
    by_reference = ("keys", "values") if is_replaced else ()
    saved = {name: value if name in by_reference else _copied(value) for name, value in vars(layer).items()}

    def restore() -> None:
        for name, value in saved.items():
            if name in by_reference:
                setattr(layer, name, value)
            else:
                setattr(layer, name, _put_back(value, getattr(layer, name, None)))

    return restore


def _snapshot_of_layer(layer: torch.nn.Module) -> Callable[[], None]:
    """The same for what a layer of the model keeps in itself."""
    saved = {name: _copied(value) for name, value in vars(layer).items() if name in _STATES_OF_LAYERS}

    def restore() -> None:
        for name, value in saved.items():
            setattr(layer, name, _copied(value))

    return restore


def _snapshot_of_object(state: object) -> Callable[[], None]:
    """The same for an object whose kind is not known: everything in it is copied."""
    saved = _copied(vars(state))

    def restore() -> None:
        vars(state).update(_copied(saved))

    return restore


def _clear_last(layer: StaticLayer, num_slots: int) -> None:
    """Leave nothing behind in slots that were given back: they are zero in vanilla's static cache."""
    end = int(layer.get_seq_length()) + num_slots
    for states in (layer.keys, layer.values):
        states[..., end - num_slots : end, :] = 0


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(each) for each in value)
    if type(value).__module__.startswith("transformers."):  # a layer, or a cache of a model's own
        copied = copy.copy(value)
        vars(copied).update({name: _copied(each) for name, each in vars(value).items()})
        return copied
    return value


def _put_back(saved: Any, current: Any) -> Any:
    """A copy of what was saved, written into the current tensor where that fits: its address may matter."""
    if isinstance(saved, torch.Tensor):
        fits = isinstance(current, torch.Tensor) and current.shape == saved.shape and current.device == saved.device
        is_locked = fits and current.is_inference() and not torch.is_inference_mode_enabled()
        return current.copy_(saved) if fits and not is_locked else saved.clone()
    if isinstance(saved, dict):
        return {key: _put_back(each, (current or {}).get(key)) for key, each in saved.items()}
    if isinstance(saved, list):
        return [_copied(each) for each in saved]
    return saved
