"""What can be wrong with a benchmark before it starts."""

from hfspec.errors import HfspecError


class BenchError(HfspecError):
    """The benchmark was asked for something that cannot be measured."""
