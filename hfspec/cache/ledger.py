"""`SpeculativeCache`: keys and values written into preallocated buffers, so that a rollback is a length change.

Vanilla's `DynamicCache` copies the whole cache for every token; this one writes each new slot once.
Holds full-attention layers of one batch whose rows have one length. Knows nothing of drafts.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

#: Slots added when a buffer is full: a quarter of what is there, within these bounds.
_MIN_GROWTH, _MAX_GROWTH = 64, 1024


class SpeculativeLayer(DynamicLayer):
    """Keys and values of one layer, `[batch, heads, length, head_dim]`, as views into larger buffers.

    A view handed out earlier sees later overwrites of the slots that a rollback gave back.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_initialized = False
        self.length = 0
        self._key_buffer = self._value_buffer = torch.empty(0)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write the new slots after the valid ones; return all valid keys and values."""
        new_length = self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self._key_buffer = _with_slots(key_states, new_length + _MIN_GROWTH)
            self._value_buffer = _with_slots(value_states, new_length + _MIN_GROWTH)
            self.is_initialized = True
        elif new_length > self._key_buffer.shape[-2]:
            capacity = new_length + min(max(new_length // 4, _MIN_GROWTH), _MAX_GROWTH)
            self._key_buffer = _grown(self._key_buffer, self.length, capacity)
            self._value_buffer = _grown(self._value_buffer, self.length, capacity)
        self._key_buffer[..., self.length : new_length, :] = key_states
        self._value_buffer[..., self.length : new_length, :] = value_states
        self._set_length(new_length)
        return self.keys, self.values

    def rollback(self, length: int) -> None:
        """Give back every slot from `length` on."""
        if length < self.length:
            self._set_length(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` slots (the host's way to say it; see `rollback_cache`)."""
        self.rollback(self.length + tokens_to_remove)

    def _set_length(self, length: int) -> None:
        self.length = length
        self.keys = self._key_buffer[..., :length, :]
        self.values = self._value_buffer[..., :length, :]


class SpeculativeCache(DynamicCache):
    """A `DynamicCache` whose layers are `SpeculativeLayer`s, made as the model first writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = SpeculativeLayer

    def rollback(self, length: int) -> None:
        """Bring every layer back to `length` slots; a length not reached yet changes nothing."""
        for layer in self.layers:
            layer.rollback(length)

    def to_vanilla(self) -> DynamicCache:
        """Move the content into a plain `DynamicCache`, layer by layer, leaving this cache empty."""
        vanilla = DynamicCache()
        for index, layer in enumerate(self.layers):
            vanilla.update(layer.keys, layer.values, index)
            self.layers[index] = SpeculativeLayer()
        return vanilla


def rollback_cache(cache: Cache, length: int) -> None:
    """Bring any cache that `support.cache_problem` accepts back to `length` slots.

    Crops by a negative count only: what a positive one or 0 means differs between transformers releases.
    """
    if isinstance(cache, SpeculativeCache):
        cache.rollback(length)
        return
    excess = cache.get_seq_length() - length
    if excess > 0:
        cache.crop(-excess)


def _with_slots(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, head_dim = states.shape
    return states.new_empty(batch, heads, capacity, head_dim)


def _grown(buffer: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    grown = _with_slots(buffer, capacity)
    grown[..., :length, :] = buffer[..., :length, :]
    return grown
