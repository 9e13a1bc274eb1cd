"""What a person sees while methods are measured: a bar, and nothing from transformers but errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging as host_logging

from hfspec.bench.measure import Report
from hfspec.bench.prompts import Prompt


@contextmanager
def progress(num_runs: int) -> Iterator[Report]:
    """A bar on standard error, moved on by each call of what it yields."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _quiet_host(), Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("warming up", total=num_runs)
        num_begun = 0

        def note(prompt: Prompt, method: str) -> None:
            nonlocal num_begun
            bar.update(task, description=f"{prompt.id}: {method}", completed=num_begun)
            num_begun += 1

        yield note
        bar.update(task, description="measured", completed=num_begun, total=num_begun)


@contextmanager
def _quiet_host() -> Iterator[None]:
    """Hear only errors from transformers for a while: its assisted generation warns of its own arguments."""
    before = host_logging.get_verbosity()
    host: Any = host_logging
    host.set_verbosity_error()
    try:
        yield
    finally:
        host.set_verbosity(before)
