"""What the library raises on purpose. Each message says what clashed and the way out.

Errors of one part alone (`WeightsError`, those of the commands) stand beside it; all are `HfspecError`s.
"""


class HfspecError(Exception):
    """Base class of every error hfspec raises on purpose."""


class ConfigError(HfspecError, ValueError):
    """An option has a value that cannot work."""


class UnknownOptionError(HfspecError, TypeError):
    """A keyword that hfspec does not know."""


class PatchError(HfspecError, TypeError):
    """The object handed to `patch`, `unpatch` or `stats` is not one they can work on."""


class DraftError(HfspecError):
    """A draft source cannot be used, or returned something that is not a draft."""


class IncompatibleDraftError(DraftError):
    """Draft and target do not share one vocabulary, so the draft's token ids mean other text."""


class UnsupportedCallError(HfspecError, NotImplementedError):
    """A call that cannot be sped up, under `on_unsupported="raise"`."""
