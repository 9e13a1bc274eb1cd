"""The noise behind `torch.multinomial`, drawn ahead of time without disturbing anybody.

`torch.multinomial(probs, 1)` is `argmax(probs / noise)` with `noise ~ Exp(1)` from the default
generator of the device. Whoever knows the generator's state knows the noise of the positions to
come: a draft source may look at it, and propose what the target is likely to pick (DESIGN §3B;
Daliri et al. 2024, arXiv 2408.07978).
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Draw:
    before: torch.Tensor
    noise: torch.Tensor
    after: torch.Tensor


class SeededNoise:
    """The default generator of one device, with a look at what it will give.

    Peeking draws from a private generator put into the same state, so the default one moves only
    when `multinomial` really draws. If other code draws in between, what was peeked is stale and is
    dropped: the result is still vanilla's.
    """

    def __init__(self) -> None:
        self._ahead: deque[_Draw] = deque()
        self._private: torch.Generator | None = None

    def peek(self, like: torch.Tensor, position: int) -> torch.Tensor:
        """Noise of the `position`-th (0, 1, …) draw from now, shaped as `like` `[batch, vocab]`."""
        if self._ahead and not self._is_current(self._ahead[0], like):
            self._ahead.clear()
        while len(self._ahead) <= position:
            before = self._ahead[-1].after if self._ahead else _default_state(like.device)
            if self._private is None:
                self._private = torch.Generator(like.device)
            self._private.set_state(before)
            noise = torch.empty_like(like).exponential_(1, generator=self._private)
            self._ahead.append(_Draw(before, noise, self._private.get_state()))
        return self._ahead[position].noise

    def multinomial(self, probs: torch.Tensor) -> torch.Tensor:
        """What `torch.multinomial(probs, 1).squeeze(1)` returns, leaving the generator as it would.

        Args:
            probs: `[batch, vocab]`, float32.

        Returns:
            Token ids `[batch]`.
        """
        draw = self._ahead.popleft() if self._ahead else None
        # The sum is finite unless a probability is nan or inf; then vanilla's own error is wanted.
        if draw is not None and self._is_current(draw, probs) and bool(probs.sum().isfinite()):
            _set_default_state(probs.device, draw.after)
            return (probs / draw.noise).argmax(dim=-1)
        self._ahead.clear()
        return torch.multinomial(probs, num_samples=1).squeeze(1)

    @staticmethod
    def _is_current(draw: _Draw, like: torch.Tensor) -> bool:
        same_kind = (
            draw.noise.shape == like.shape and draw.noise.dtype == like.dtype and draw.noise.device == like.device
        )
        return same_kind and torch.equal(draw.before, _default_state(like.device))
