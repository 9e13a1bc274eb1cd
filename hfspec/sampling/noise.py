"""The noise behind `torch.multinomial`, drawn ahead of time without disturbing anybody.

`torch.multinomial(probs, 1)` is `argmax(probs / noise)` with `noise ~ Exp(1)` from the default
generator of the device. Whoever knows the generator's state knows the noise of the positions to
come: a draft source may look at it, and propose what the target is likely to pick
(Daliri et al. 2024, arXiv 2408.07978).
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module: Any = torch.get_device_module(device)
    state: torch.Tensor = module.get_rng_state(*_which(device))
    return state


def _set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """What says which device is meant; there is but one MPS device, and its functions take none."""
    return () if device.type == "mps" else (device,)


@contextmanager
def unmoved(device: torch.device) -> Iterator[None]:
    """Put the default generators of the CPU and of `device` back to where they were, if the body moves them."""
    devices = {torch.device("cpu"), device}
    before = {each: generator_state(each) for each in devices}
    try:
        yield
    finally:
        for each, state in before.items():
            if not torch.equal(state, generator_state(each)):
                _set_generator_state(each, state)


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
        self.forget_before(self._num_made)
        return (probs / noise).argmax(dim=-1)

    def end(self) -> None:
        """Nothing more will be drawn; there is nothing to do."""

    def at(self, like: torch.Tensor, number: int) -> torch.Tensor:
        """Noise of the draw of that number, made or not, shaped as `like` `[batch, vocab]`."""
        self._drop_stale(like)
        nearest = number if number in self._states else max(each for each in self._states if each < number)
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
            _set_generator_state(like.device, self._states[number + 1])
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
        now = generator_state(like.device)
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

    def forget_before(self, number: int) -> None:
        """Noise of draws before that number is not wanted any more."""
        for kept in (self._states, self._noise):
            for old in [each for each in kept if each < number]:
                del kept[old]


class RowNoise:
    """One row's share of the noise that is drawn for a whole batch at once; made by `of_batch`.

    Args:
        noise: the batch's.
        row: which row this is.
        num_drawn: of every row, how many tokens it has drawn; `None` once it draws no more. The rows share it.
        runs_ahead: whether the row draws at its own pace, the generator moving on with the row that is furthest.
            Otherwise draws are made for the whole batch, and rows only peek.
    """

    def __init__(self, noise: SeededNoise, row: int, num_drawn: list[int | None], runs_ahead: bool) -> None:
        self._noise = noise
        self._row = row
        self._num_drawn_of = num_drawn
        self._runs_ahead = runs_ahead

    @classmethod
    def of_batch(cls, noise: SeededNoise, num_rows: int, runs_ahead: bool) -> list["RowNoise"]:
        """The shares of all rows."""
        num_drawn: list[int | None] = [0] * num_rows
        return [cls(noise, row, num_drawn, runs_ahead) for row in range(num_rows)]

    @property
    def _num_rows(self) -> int:
        return len(self._num_drawn_of)

    @property
    def _num_drawn(self) -> int:
        return self._num_drawn_of[self._row] or 0

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
        self._move_to(self._num_drawn + 1)
        return (probs / noise).argmax(dim=-1)

    def end(self) -> None:
        """The row draws no more, so that nothing is kept for it."""
        if self._runs_ahead:
            self._move_to(None)

    def _move_to(self, num_drawn: int | None) -> None:
        """Go on, and let go of the noise that every row has passed."""
        self._num_drawn_of[self._row] = num_drawn
        at_work = [each for each in self._num_drawn_of if each is not None]
        if at_work:
            self._noise.forget_before(min(at_work))

    def _mine(self, noise: torch.Tensor) -> torch.Tensor:
        return noise[self._row : self._row + 1]
