"""What is asked of a device: its default generator's state, and its memory."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of a device's default generator; it lies in the host's memory."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module: Any = torch.get_device_module(device)
    state: torch.Tensor = module.get_rng_state(*_which(device))
    return state


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Bring a device's default generator to a state."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """What says which device is meant; there is but one MPS device, and its functions take none."""
    return () if device.type == "mps" else (device,)


class Generators:
    """Where the default generators of the CPU and of a device stand."""

    def __init__(self, device: torch.device) -> None:
        self._states = {each: generator_state(each) for each in {torch.device("cpu"), device}}
        self._was_alone = threading.active_count() == 1

    @property
    def have_moved(self) -> bool:
        """Whether somebody has drawn since, in whatever thread."""
        return any(not torch.equal(state, generator_state(each)) for each, state in self._states.items())

    @property
    def are_ours(self) -> bool:
        """Whether no other thread can have moved them."""
        return self._was_alone and threading.active_count() == 1

    def put_back(self) -> None:
        """Undo what was drawn since: what other threads drew, too."""
        for each, state in self._states.items():
            if not torch.equal(state, generator_state(each)):
                set_generator_state(each, state)


@contextmanager
def unmoved(device: torch.device) -> Iterator[None]:
    """Put the default generators of the CPU and of `device` back to where they were, if the body moves them.

    Only for a body that may draw: what other threads draw meanwhile is undone with it.
    """
    generators = Generators(device)
    try:
        yield
    finally:
        generators.put_back()


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says nothing of its types
    """Sees whether what is run within it, in this thread, draws random numbers."""

    has_drawn: bool = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; attention that drops nothing is said to draw, and does not."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags:
            names = [argument.name for argument in function._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            self.has_drawn |= "dropout_p" not in names or bool(given.get("dropout_p"))
        return function(*args, **kwargs)


def spare_bytes(device: torch.device) -> int:
    """Memory that nobody uses: of a device what is free, of the host half of all it has."""
    if device.type != "cpu":
        info = getattr(torch.get_device_module(device), "mem_get_info", None)
        return 0 if info is None else int(info(device)[0])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # not every system counts so
        return 0
