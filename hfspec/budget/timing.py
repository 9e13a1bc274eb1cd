"""Seconds of work on a device, measured without making the host wait for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Span:
    """One measured stretch of work; `seconds` is known once the device has passed its end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[Any, Any] | None = None
        self._start = self._end = 0.0
        if device.type not in ("cpu", "meta"):
            self._events = _new_events(device)

    def begin(self) -> None:
        """Mark the start."""
        if self._events is None:
            self._start = time.perf_counter()
        else:
            self._events[0].record()

    def end(self) -> None:
        """Mark the end."""
        if self._events is None:
            self._end = time.perf_counter()
        else:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """Length of the stretch. On an accelerator this waits for its end, which the round has then long read past."""
        if self._events is None:
            return self._end - self._start
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def _new_events(device: torch.device) -> tuple[Any, Any] | None:
    """Two of the device's own timers, or `None` where it has none: then the host's clock must do."""
    new_event: Any = torch.Event
    try:
        return new_event(device, enable_timing=True), new_event(device, enable_timing=True)
    except (RuntimeError, NotImplementedError):
        return None


@contextmanager
def measured(device: torch.device) -> Iterator[Span]:
    """Measure the body of a `with` block, also when it raises."""
    span = Span(device)
    span.begin()
    try:
        yield span
    finally:
        span.end()
