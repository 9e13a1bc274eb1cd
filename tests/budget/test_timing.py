"""Spans of time, on devices with timers of their own and without."""

import pytest
import torch

from hfspec.budget.timing import measured


class _Timer:
    """A device's timer; time goes on by a quarter of a second at each record."""

    now = 0

    def __init__(self, device, enable_timing):
        assert enable_timing

    def record(self):
        _Timer.now += 250
        self.at = _Timer.now

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.mark.parametrize("device", ["cuda:0", "xpu:0", "mps"])
def test_any_accelerator_is_measured_by_its_own_timers(device, monkeypatch):
    """Not CUDA alone."""
    monkeypatch.setattr(torch, "Event", _Timer)
    with measured(torch.device(device)) as span:
        pass
    assert span.seconds == 0.25


@pytest.mark.parametrize("device", ["cpu", "xpu:0"])
def test_without_timers_the_clock_measures(device, monkeypatch):
    """On the CPU, and where torch has no events for a device."""

    def no_events(device, enable_timing):
        raise NotImplementedError

    monkeypatch.setattr(torch, "Event", no_events)
    with measured(torch.device(device)) as span:
        pass
    assert 0 <= span.seconds < 1
    assert isinstance(span.seconds, float)
