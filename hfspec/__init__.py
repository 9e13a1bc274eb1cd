"""hfspec: any Hugging Face `generate()` made faster by speculative decoding, with the same tokens.

    hfspec.patch(model, draft=small_model)
    model.generate(**inputs, max_new_tokens=256)
    print(hfspec.stats(model))

To know the code, read `patch`, `decode`, `loop`, `draft/model` and `accept/walk`, in this order.
"""

from hfspec.compare import Verdict, verify
from hfspec.config import DraftBudget
from hfspec.draft.base import CallView, Context, DraftSession, DraftSource, Session
from hfspec.drafts import Draft
from hfspec.errors import (
    ConfigError,
    DraftError,
    HfspecError,
    IncompatibleDraftError,
    PatchError,
    UnknownOptionError,
    UnsupportedCallError,
)
from hfspec.metrics import Metrics, Stats
from hfspec.patch import is_patched, patch, patched, stats, unpatch
from hfspec.rounds import Outcome, Outcomes, RoundBudget
from hfspec.texts import Texts

__version__ = "0.1.0"

__all__ = [
    "CallView",
    "ConfigError",
    "Context",
    "Draft",
    "DraftBudget",
    "DraftError",
    "DraftSession",
    "DraftSource",
    "HfspecError",
    "IncompatibleDraftError",
    "Metrics",
    "Outcome",
    "Outcomes",
    "PatchError",
    "RoundBudget",
    "Session",
    "Stats",
    "Texts",
    "UnknownOptionError",
    "UnsupportedCallError",
    "Verdict",
    "is_patched",
    "patch",
    "patched",
    "stats",
    "unpatch",
    "verify",
]
