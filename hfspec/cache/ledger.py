"""`SpeculativeCache`: keys and values written into preallocated buffers, so that a rollback is a length change.

Vanilla's `DynamicCache` copies the whole cache for every token; this one writes each new slot once. Layers that
keep something else than one key and value per token (recurrent states, indexers) stay the host's own. Knows
nothing of drafts; `rollback.Rollback` brings it back.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from hfspec.host import caches, releases

#: Slots added when a buffer is full: a quarter of what is there, within these bounds.
_MIN_GROWTH, _MAX_GROWTH = 64, 1024


class SpeculativeLayer(DynamicLayer):
    """Keys and values of one layer, `[batch, heads, length, head_dim]`, as views into larger buffers.

    A view handed out earlier sees later overwrites of the slots that a rollback gave back.

    Attributes:
        length: slots written, those dropped again included.
        start: the first slot that is still kept; the buffers begin there.
        committed: no rollback will go back beyond this length.
    """

    is_sliding = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.length: int
        self.start: int
        self.committed: int
        self._key_buffer: torch.Tensor
        self._value_buffer: torch.Tensor
        SpeculativeLayer.reset(self)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write the new slots after the valid ones; return the keys and values that the new tokens may see."""
        num_new = key_states.shape[-2]
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self._begin(key_states, value_states)
            return (key_states, value_states) if self.start else (self.keys, self.values)
        first = self.first_visible(self.length)
        if self.length + num_new - self.start > self._key_buffer.shape[-2]:
            self._make_room(num_new)
        begin = self.length - self.start
        self._key_buffer.narrow(-2, begin, num_new).copy_(key_states)
        self._value_buffer.narrow(-2, begin, num_new).copy_(value_states)
        self._set_length(self.length + num_new)
        if first == self.start:
            return self.keys, self.values
        return self.keys[..., first - self.start :, :], self.values[..., first - self.start :, :]

    def first_visible(self, length: int) -> int:
        """The first slot that a token in slot `length` may see."""
        return 0

    def get_seq_length(self) -> int:
        """Slots written so far."""
        return self.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of what `update` returns for so many new tokens (4.57 passes their positions)."""
        num_new = query_length if isinstance(query_length, int) else query_length.shape[0]
        first = self.first_visible(self.length)
        return self.length + num_new - first, first

    def rollback(self, length: int) -> None:
        """Give back every slot from `length` on."""
        if self.is_initialized and length < self.length:
            self._set_length(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` slots, as the host says it; a count above 0 means what it means there.

        Raises:
            ValueError: the host takes no count above 0, or what would be the last slots are not kept any more.
        """
        is_length = tokens_to_remove > 0 or (tokens_to_remove == 0 and releases.CROPS_ALL_BY_ZERO)
        if is_length and not releases.CROPS_TO_LENGTH:
            raise ValueError(
                f"crop({tokens_to_remove}) is not understood: this release of transformers takes the number of tokens "
                f"to remove as a negative number, crop({-tokens_to_remove})"
            )
        length = tokens_to_remove if is_length else max(0, self.length + tokens_to_remove)
        if length < self.length and self.first_visible(length) < self.start:
            raise ValueError(
                f"the cache cannot be cropped to {length} tokens: of its {self.length} it keeps the last "
                f"{self.length - self.start}, which a window of attention can still see"
            )
        self.rollback(length)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep only these rows of the batch."""
        if self.is_initialized:
            rows = rows.to(self._key_buffer.device)
            self._replace(self._key_buffer.index_select(0, rows), self._value_buffer.index_select(0, rows))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The same, as the host's beam search says it."""
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The same, as the host's contrastive search said it: numbers or a mask."""
        if self.is_initialized:
            self._replace(self._key_buffer[indices], self._value_buffer[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row of the batch stand there so many times."""
        if self.is_initialized:
            self._replace(*(each.repeat_interleave(repeats, 0) for each in (self._key_buffer, self._value_buffer)))

    def move(self, rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> None:
        """Copy what row `rows[i]` has in slot `sources[i]` into its slot `places[i]`; `[n]` each."""
        rows, sources, places = (each.to(self._key_buffer.device) for each in (rows, sources, places))
        for buffer in (self._key_buffer, self._value_buffer):
            buffer[rows, :, places - self.start] = buffer[rows, :, sources - self.start]

    def arrange(self, slots: torch.Tensor) -> None:
        """Let slot `j` of row `i` hold what was in its slot `slots[i, j]`; `[batch, new length]`."""
        if not self.is_initialized:
            return
        new_length = slots.shape[1]
        new_start = self.first_visible(new_length)
        wanted = (slots[:, new_start:] - self.start).clamp_(min=0).to(self._key_buffer.device)
        for buffer in (self._key_buffer, self._value_buffer):
            for row, indices in enumerate(wanted):
                buffer[row, :, : len(indices)] = buffer[row].index_select(1, indices)
        self.start, self.committed = new_start, min(self.committed, new_length)
        self._set_length(new_length)

    def fill(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Hold these, `[batch, heads, kept, head_dim]`, as the last of `length` slots, and nothing else."""
        self.length = self.committed = length
        self.start = length - keys.shape[-2]
        self._replace(keys, values)

    def empty_vanilla(self) -> DynamicLayer:
        """The host's layer of this kind."""
        return DynamicLayer()

    def move_to(self, vanilla: DynamicLayer) -> None:
        """Hand the content over to an empty layer of the host's."""
        if self.is_initialized:
            first = self.first_visible(self.length) - self.start
            vanilla.update(self.keys[..., first:, :], self.values[..., first:, :])
            if hasattr(vanilla, "cumulative_length"):
                vanilla.cumulative_length = self.length
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = False
        self.length = self.start = self.committed = 0
        self.keys = self.values = self._key_buffer = self._value_buffer = torch.empty(0)

    def _begin(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the first slots, or as many of the last ones as later tokens may see."""
        length = key_states.shape[-2]
        self.start = self.first_visible(length)
        kept = length - self.start
        self._key_buffer = _with_slots(key_states, kept + _MIN_GROWTH)
        self._value_buffer = _with_slots(value_states, kept + _MIN_GROWTH)
        self._key_buffer[..., :kept, :] = key_states[..., self.start :, :]
        self._value_buffer[..., :kept, :] = value_states[..., self.start :, :]
        self.is_initialized = True
        self.committed = length
        self._set_length(length)

    def _make_room(self, num_new: int) -> None:
        new_start = max(self.start, self.first_visible(min(self.committed, self.length)))
        kept = self.length - new_start
        capacity = kept + num_new + min(max((kept + num_new) // 4, _MIN_GROWTH), _MAX_GROWTH)
        drop = new_start - self.start
        self._key_buffer = _moved(self._key_buffer, drop, kept, capacity)
        self._value_buffer = _moved(self._value_buffer, drop, kept, capacity)
        self.start = new_start
        self._set_length(self.length)

    def _replace(self, key_buffer: torch.Tensor, value_buffer: torch.Tensor) -> None:
        self._key_buffer, self._value_buffer = key_buffer, value_buffer
        self._set_length(self.length)

    def _set_length(self, length: int) -> None:
        self.length = length
        self.keys = self._key_buffer.narrow(-2, 0, length - self.start)
        self.values = self._value_buffer.narrow(-2, 0, length - self.start)


class SpeculativeSlidingLayer(SpeculativeLayer):
    """The same for sliding-window and chunked attention: slots no token can see any more are dropped in time."""

    is_sliding = True

    def __init__(self, sliding_window: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sliding_window = sliding_window

    def empty_vanilla(self) -> DynamicLayer:
        """The host's layer of this kind."""
        return DynamicSlidingWindowLayer(self.sliding_window)

    def first_visible(self, length: int) -> int:
        """The first slot that a token in slot `length` may see."""
        return max(0, length + 1 - self.sliding_window)


class SpeculativeCache(DynamicCache):
    """A `DynamicCache` that rolls back by a length change, made after the cache that the host prepared.

    Args:
        like: the host's empty cache; its layers say what each of ours has to be. Without layers (or without
            `like`) full-attention layers are made as the model first writes to them.
    """

    def __init__(self, like: Cache | None = None) -> None:
        super().__init__()
        self._like = like
        if like is not None and like.layers:
            self.layers = [_layer_like(layer) for layer in like.layers]
        self.layer_class_to_replicate = DynamicLayer if caches.is_changed(DynamicLayer) else SpeculativeLayer

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep only these rows of the batch."""
        for layer in self.layers:
            layer.select_rows(rows)

    def move(self, rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> None:
        """Copy what row `rows[i]` has in slot `sources[i]` into its slot `places[i]`; `[n]` each."""
        for layer in self.layers:
            layer.move(rows, sources, places)

    def arrange(self, slots: torch.Tensor) -> None:
        """Let slot `j` of row `i` hold what was in its slot `slots[i, j]`; `[batch, new length]`."""
        for layer in self.layers:
            layer.arrange(slots)

    def to_vanilla(self) -> Cache:
        """Move the content into the cache this one was made after, layer by layer."""
        vanilla = self._like if self._like is not None else DynamicCache()
        for index, layer in enumerate(self.layers):
            if index == len(vanilla.layers):  # the model has made it itself
                vanilla.layers.append(layer.empty_vanilla() if isinstance(layer, SpeculativeLayer) else layer)
            if isinstance(layer, SpeculativeLayer):
                layer.move_to(vanilla.layers[index])
        return vanilla


def speculative_cache(prepared: Cache) -> Cache:
    """Ours in place of an empty cache that the host prepared; of an encoder-decoder pair, the decoder's own."""
    if isinstance(prepared, EncoderDecoderCache):
        ours = SpeculativeCache(prepared.self_attention_cache)
        return EncoderDecoderCache(ours, prepared.cross_attention_cache)
    return SpeculativeCache(prepared)


def vanilla_cache(cache: Cache) -> Cache:
    """The cache as vanilla hands it back: what the host prepared, filled, or the user's own object."""
    if isinstance(cache, SpeculativeCache):
        return cache.to_vanilla()
    if isinstance(cache, EncoderDecoderCache):
        cache.self_attention_cache = vanilla_cache(cache.self_attention_cache)
    return cache


def _layer_like(layer: Any) -> Any:
    """Ours for the layers that keep a key and a value per token; others stay the host's."""
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and caches.is_changed(type(layer)):
        return layer  # somebody has put something into it that ours would leave out
    if type(layer) is DynamicLayer:
        return SpeculativeLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return SpeculativeSlidingLayer(layer.sliding_window)
    return layer


def _with_slots(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, head_dim = states.shape
    return states.new_empty(batch, heads, capacity, head_dim)


def _moved(buffer: torch.Tensor, drop: int, kept: int, capacity: int) -> torch.Tensor:
    moved = _with_slots(buffer, capacity)
    moved[..., :kept, :] = buffer[..., drop : drop + kept, :]
    return moved
