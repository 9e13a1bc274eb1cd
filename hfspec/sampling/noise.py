"""The noise behind `torch.multinomial`, drawn ahead of time without disturbing anybody.

`torch.multinomial(probs, 1)` is `argmax(probs / noise)` with `noise ~ Exp(1)` from the default
generator of the device. Whoever knows the generator's state knows the noise of the positions to
come: a draft source may look at it, and propose what the target is likely to pick (DESIGN §3B;
Daliri et al. 2024, arXiv 2408.07978).
"""

import threading
from collections import OrderedDict
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


#: Bytes of noise that are kept; other noise is drawn again from the saved states when it is needed.
_MAX_BYTES = 64 << 20
#: Between two calls that draw from one generator, in several threads.
_lock = threading.Lock()


class SeededNoise:
    """The default generator of one device, with a look at what it will give.

    Draws are counted from the beginning of the call. Looking ahead uses a private generator in the same
    state; the default one moves by exactly the draws that are made. If other code draws in between, what
    was seen ahead is stale and is dropped: the result is still vanilla's.
    """

    def __init__(self) -> None:
        self._num_made = 0
        self._states: dict[int, torch.Tensor] = {}  # the generator's, before the draw of that number
        self._noise: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._private: torch.Generator | None = None

    def peek(self, like: torch.Tensor, position: int) -> torch.Tensor:
        """Noise of the `position`-th (0, 1, …) draw from now, shaped as `like` `[batch, vocab]`."""
        return self.at(like, self._num_made + position)

    def multinomial(self, probs: torch.Tensor) -> torch.Tensor:
        """What `torch.multinomial(probs, 1).squeeze(1)` returns, leaving the generator as it would.

        Args:
            probs: `[batch, vocab]`, float32.

        Returns:
            Token ids `[batch]`.
        """
        is_seen = self._num_made in self._noise
        # The sum is finite unless a probability is nan or inf; then vanilla's own error is wanted.
        if not is_seen or not bool(probs.sum().isfinite()):
            self._forget_ahead()
            return torch.multinomial(probs, num_samples=1).squeeze(1)
        noise = self.make(probs, self._num_made)
        self._forget_before(self._num_made)
        return (probs / noise).argmax(dim=-1)

    def at(self, like: torch.Tensor, number: int) -> torch.Tensor:
        """Noise of the draw of that number, made or not, shaped as `like` `[batch, vocab]`."""
        self._drop_stale(like)
        nearest = max(each for each in self._states if each <= number)
        for each in range(nearest, number):
            self._draw(like, each)
        noise = self._noise.get(number)
        return noise if noise is not None else self._draw(like, number)

    def make(self, like: torch.Tensor, number: int) -> torch.Tensor:
        """The same, and make the draw if nobody has: the generator moves on by it.

        Args:
            number: of a draw that was made, or of the next one.
        """
        if number < self._num_made:
            return self.at(like, number)
        with _lock:
            noise = self.at(like, number)
            self._num_made = number + 1
            _set_default_state(like.device, self._states[number + 1])
        return noise

    def _draw(self, like: torch.Tensor, number: int) -> torch.Tensor:
        """Draw the noise of a number whose state is known, and learn the state after it."""
        if self._private is None:
            self._private = torch.Generator(like.device)
        self._private.set_state(self._states[number])
        noise = torch.empty(like.shape, dtype=like.dtype, device=like.device).exponential_(1, generator=self._private)
        self._states.setdefault(number + 1, self._private.get_state())
        self._noise[number] = noise
        while len(self._noise) > max(2, _MAX_BYTES // (noise.nbytes + 1)):
            self._noise.popitem(last=False)
        return noise

    def _drop_stale(self, like: torch.Tensor) -> None:
        """Forget what was seen ahead if the generator is not where it was left, or was asked for other shapes."""
        now = _default_state(like.device)
        shown = self._noise.get(self._num_made)
        is_other = shown is not None and (shown.shape, shown.dtype, shown.device) != (
            like.shape,
            like.dtype,
            like.device,
        )
        if is_other or not torch.equal(self._states.get(self._num_made, now), now):
            self._forget_ahead()
        self._states.setdefault(self._num_made, now)

    def _forget_ahead(self) -> None:
        for kept in (self._states, self._noise):
            for number in [each for each in kept if each >= self._num_made]:
                del kept[number]

    def _forget_before(self, number: int) -> None:
        for kept in (self._states, self._noise):
            for old in [each for each in kept if each < number]:
                del kept[old]


class RowNoise:
    """One row's share of the noise that is drawn for a whole batch at once.

    Args:
        noise: the batch's.
        row: which row this is, of `num_rows`.
        runs_ahead: whether the row draws at its own pace, the generator moving on with the row that is furthest.
            Otherwise draws are made for the whole batch, and rows only peek.
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
        if not self._runs_ahead:
            return self._mine(self._noise.peek(batch, position))
        return self._mine(self._noise.at(batch, self._num_drawn + position))

    def multinomial(self, probs: torch.Tensor) -> torch.Tensor:
        """What this row of the batch's draw gives for `probs` `[1, vocab]`: a token id `[1]`."""
        if not bool(probs.sum().isfinite()):
            return torch.multinomial(probs, num_samples=1).squeeze(1)  # for vanilla's own error
        noise = self._mine(self._noise.make(probs.expand(self._num_rows, -1), self._num_drawn))
        self._num_drawn += 1
        return (probs / noise).argmax(dim=-1)

    def _mine(self, noise: torch.Tensor) -> torch.Tensor:
        return noise[self._row : self._row + 1]
