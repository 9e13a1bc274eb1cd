"""The noise behind `torch.multinomial`, drawn ahead of time without disturbing anybody.

`torch.multinomial(probs, 1)` is `argmax(probs / noise)` with `noise ~ Exp(1)` from the default
generator of the device. Whoever knows the generator's state knows the noise of the positions to
come: a draft source may look at it, and propose what the target is likely to pick (DESIGN §3B;
Daliri et al. 2024, arXiv 2408.07978).
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def _default_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_default_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def unmoved(device: torch.device) -> Iterator[None]:
    """Put the default generators of the CPU and of `device` back to where they were, if the body moves them."""
    devices = {torch.device("cpu"), device}
    before = {each: _default_state(each) for each in devices}
    try:
        yield
    finally:
        for each, state in before.items():
            if not torch.equal(state, _default_state(each)):
                _set_default_state(each, state)


#: Bytes of noise that are kept ahead; what is further ahead is drawn again from the saved states when it is needed.
_MAX_BYTES = 64 << 20


class SeededNoise:
    """The default generator of one device, with a look at what it will give.

    Peeking draws from a private generator put into the same state, so the default one moves only
    when `multinomial` or `settle` says so. If other code draws in between, what was peeked is stale and
    is dropped: the result is still vanilla's.
    """

    def __init__(self) -> None:
        self._states: deque[torch.Tensor] = deque()  # before the next draw, before the one after it, …
        self._noise: OrderedDict[int, torch.Tensor] = OrderedDict()  # by number of the draw since the beginning
        self._num_drawn = 0
        self._private: torch.Generator | None = None

    def peek(self, like: torch.Tensor, position: int) -> torch.Tensor:
        """Noise of the `position`-th (0, 1, …) draw from now, shaped as `like` `[batch, vocab]`."""
        if not self._is_current(like):
            self._forget()
        if not self._states:
            self._states.append(_default_state(like.device))
        while len(self._states) <= position:
            self._draw(like, len(self._states) - 1)
        noise = self._noise.get(self._num_drawn + position)
        return noise if noise is not None else self._draw(like, position)

    def multinomial(self, probs: torch.Tensor) -> torch.Tensor:
        """What `torch.multinomial(probs, 1).squeeze(1)` returns, leaving the generator as it would.

        Args:
            probs: `[batch, vocab]`, float32.

        Returns:
            Token ids `[batch]`.
        """
        noise = self._noise.get(self._num_drawn) if self._is_current(probs) else None
        # The sum is finite unless a probability is nan or inf; then vanilla's own error is wanted.
        if noise is not None and bool(probs.sum().isfinite()):
            self.settle(1)
            return (probs / noise).argmax(dim=-1)
        self._forget()
        return torch.multinomial(probs, num_samples=1).squeeze(1)

    def settle(self, num_draws: int) -> None:
        """Leave the generator as after so many of the draws that were peeked at.

        Where other code has drawn meanwhile, fewer may be known: it is then left as after those.
        """
        num_known = min(num_draws, len(self._states) - 1)
        for _ in range(num_known):
            self._states.popleft()
            self._noise.pop(self._num_drawn, None)
            self._num_drawn += 1
        if num_known > 0 and self._private is not None:
            _set_default_state(self._private.device, self._states[0])

    def _draw(self, like: torch.Tensor, position: int) -> torch.Tensor:
        """Draw the noise of a position whose state is known, and learn the state after it."""
        if self._private is None:
            self._private = torch.Generator(like.device)
        self._private.set_state(self._states[position])
        noise = torch.empty(like.shape, dtype=like.dtype, device=like.device).exponential_(1, generator=self._private)
        if position + 1 == len(self._states):
            self._states.append(self._private.get_state())
        self._noise[self._num_drawn + position] = noise
        while len(self._noise) > max(2, _MAX_BYTES // (noise.nbytes + 1)):
            self._noise.popitem(last=False)
        return noise

    def _forget(self) -> None:
        self._states.clear()
        self._noise.clear()

    def _is_current(self, like: torch.Tensor) -> bool:
        if not self._states:
            return False
        last = next(iter(self._noise.values()), None)
        same_kind = last is None or (
            last.shape == like.shape and last.dtype == like.dtype and last.device == like.device
        )
        return same_kind and torch.equal(self._states[0], _default_state(like.device))


class RowNoise:
    """One row's share of the noise that is drawn for a whole batch at once.

    Args:
        noise: the batch's.
        row: which row this is, of `num_rows`.
        runs_ahead: whether the row draws at its own pace. The batch's generator then stays where it is until
            `settle`; otherwise it is moved by the draws for the whole batch, and rows only peek.
    """

    def __init__(self, noise: SeededNoise, row: int, num_rows: int, runs_ahead: bool) -> None:
        self._noise = noise
        self._row = row
        self._num_rows = num_rows
        self._runs_ahead = runs_ahead
        self._num_drawn = 0

    def peek(self, like: torch.Tensor, position: int) -> torch.Tensor:
        """This row's noise, `[1, vocab]`, of the `position`-th draw from where the row is."""
        batch = like.expand(self._num_rows, -1)
        noise = self._noise.peek(batch, self._num_drawn + position)
        return noise[self._row : self._row + 1]

    def multinomial(self, probs: torch.Tensor) -> torch.Tensor:
        """What this row of the batch's draw gives for `probs` `[1, vocab]`: a token id `[1]`."""
        if not bool(probs.sum().isfinite()):
            return torch.multinomial(probs, num_samples=1).squeeze(1)  # for vanilla's own error
        noise = self.peek(probs, 0)
        self._num_drawn += self._runs_ahead
        return (probs / noise).argmax(dim=-1)
