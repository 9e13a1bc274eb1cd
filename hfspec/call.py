"""One `generate()` call on a patched model, and what is kept for that model between its calls.

Knows who asked for what and why a call runs plain; knows nothing of how it is decoded.
"""

import copy
import logging
import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from transformers import PreTrainedModel

from hfspec.budget.experience import Experience
from hfspec.config import Options
from hfspec.draft.registry import Drafting
from hfspec.errors import UnsupportedCallError
from hfspec.host import architectures, forwards
from hfspec.host.trial import Trial
from hfspec.metrics import Metrics, Stats

logger = logging.getLogger("hfspec")

Kept = TypeVar("Kept")

#: A source that goes on failing is tried again after so many calls.
_LONGEST_PAUSE = 1024
#: Different reasons that are warned of, for one patched model.
_MAX_WARNINGS = 50


@dataclass
class _Faults:
    """A draft source's failures in a row, and for how many more calls it is left alone (0, then 1, 2, 4, 8, …)."""

    reason: str
    num_failures: int = 0
    calls_left: int = 0


class _ByObject(Generic[Kept]):
    """Something kept for each of some objects, which need not be hashable, as long as they live."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Any], Kept]] = {}

    def get(self, owner: object) -> Kept | None:
        """What is kept for it."""
        found = self._kept.get(id(owner))
        return found[1] if found is not None and found[0]() is owner else None

    def setdefault(self, owner: object, new: Kept) -> Kept:
        """What is kept for it: `new`, if there was nothing."""
        kept = self.get(owner)
        if kept is None:
            key = id(owner)
            kept = new
            self._kept[key] = weakref.ref(owner, lambda _: self._kept.pop(key, None)), kept
        return kept

    def forget(self, owner: object) -> None:
        """Keep nothing for it any more."""
        self._kept.pop(id(owner), None)


@dataclass
class PatchState:
    """What is kept for one patched model between calls: counts, measurements, proofs, and which warnings were given."""

    last: Metrics = field(default_factory=Metrics)
    total: Metrics = field(default_factory=Metrics)
    warned: set[str] = field(default_factory=set)
    trial: Trial = field(default_factory=Trial)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _experience: _ByObject[dict[bool, Experience]] = field(default_factory=_ByObject)
    _faults: _ByObject[_Faults] = field(default_factory=_ByObject)

    def warn_once(self, reason: str, message: str) -> None:
        """Log `message` about `reason`, unless it was said of this model before, or a great many others were."""
        if reason not in self.warned and len(self.warned) < _MAX_WARNINGS:
            self.warned.add(reason)
            hint = "(Said once; hfspec.stats(model).fallback_reason keeps the reason.)"
            logger.warning(f"hfspec: {message} {hint}", reason)

    def experience_with(self, given: object, is_lockstep: bool = False) -> Experience:
        """What is known about the pair with this draft model or source (which need not be hashable).

        Rows in lock-step go on only where all of them accept: that is another experience.
        """
        return self._experience.setdefault(given, {}).setdefault(is_lockstep, Experience())

    def note_fault(self, given: object, reason: str) -> None:
        """The source failed: from the second time on the next calls do without it, the more the oftener it has."""
        with self._lock:
            faults = self._faults.setdefault(given, _Faults(reason))
            faults.reason = reason
            faults.num_failures += 1
            faults.calls_left = min(int(2 ** (faults.num_failures - 2)), _LONGEST_PAUSE)

    def note_drafts(self, given: object) -> None:
        """The source drafted through a whole call: what was before is forgotten."""
        with self._lock:
            self._faults.forget(given)

    def pause(self, given: object) -> str | None:
        """Why this call does without a source that has failed, or `None`; counts the call."""
        with self._lock:
            faults = self._faults.get(given)
            if faults is None or faults.calls_left == 0:
                return None
            faults.calls_left -= 1
            left = faults.calls_left
            when = "the next call" if left == 0 else f"{left + 1} calls"
            return f"{faults.reason} in an earlier call; it is tried again in {when}"

    def stats(self) -> Stats:
        """The counts as they are now."""
        with self._lock:
            return Stats(last=self.last, total=copy.deepcopy(self.total), proof=self.trial.last)

    def finish(self, metrics: Metrics) -> None:
        """Take the counts of a call that is over."""
        with self._lock:
            self.last = metrics
            self.total.add(metrics)
            # A reason may hold sizes or addresses, other ones in every call.
            self.total.forget_rare_reasons()


@dataclass
class Call:
    """One `generate()` call on a patched model.

    Attributes:
        has_host_loop: whether the model's class decodes with the host's own `_sample`.
        has_own_cache: whether the user passed a cache, which must then be filled as given.
        was_decoded: whether the host came to one of the decoding loops that hfspec stands in for.
        encoder_inputs: what the encoder was given, by name: of an encoder-decoder model, or of images and sounds.
    """

    model: PreTrainedModel
    options: Options
    drafting: Drafting
    state: PatchState
    has_host_loop: bool = True
    has_own_cache: bool = False
    was_decoded: bool = False
    encoder_inputs: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=lambda: Metrics(calls=1))
    is_counted: bool = False

    def finish(self) -> None:
        """Count the call, once: before whoever reads its streamer is told that it is over, or else at its end."""
        if not self.is_counted:
            self.is_counted = True
            self.state.finish(self.metrics)

    @property
    def plain_reason(self) -> str | None:
        """Why the call runs plain whatever it asks for: by choice, or by what the model is; or `None`."""
        wanted = _wanted_plain(self.options)
        if wanted is not None:
            return wanted
        if not self.has_host_loop:
            return f"{type(self.model).__name__} has a decoding loop of its own"
        if architectures.num_processes(self.model) > 1 and self.options.budget.policy == "measured":
            return (
                "several processes share the model (tensor parallel), and what each would measure may differ; "
                "a fixed number as draft_budget is the same for all"
            )
        return None

    def note_paused(self) -> str | None:
        """Why this call does without its source for now, or `None`. Nobody is warned or stopped: it failed before."""
        reason = self.state.pause(self.drafting.given)
        if reason is not None:
            self.metrics.fallback_reasons[reason] += 1
        return reason

    def note_plain(self, reason: str, may_raise: bool = True) -> None:
        """This call runs plain: count the reason, say it once per model, or raise if told to."""
        wanted = _wanted_plain(self.options)
        self.metrics.fallback_reasons[wanted or reason] += 1
        if wanted is not None:
            return
        if may_raise and self.options.on_unsupported == "raise":
            forwards.forget_prepared_cache(self.model)
            raise UnsupportedCallError(
                f"hfspec cannot speed up this call: {reason}. Pass on_unsupported='warn' to run it plain, "
                "or speculate=False to say that this is wanted."
            )
        self.state.warn_once(reason, "this call runs as plain generate(): %s.")


def _wanted_plain(options: Options) -> str | None:
    if os.environ.get("HFSPEC_DISABLE", "0") not in ("", "0"):
        return "HFSPEC_DISABLE is set"
    if not options.speculate:
        return "speculate=False"
    if options.budget.max_tokens == 0:
        return "the draft budget is 0"
    return None
