"""What a patched model's `generate()` comes to: decide, then speculate or step aside with a reason.

`patch` brings a call here at the point where Hugging Face has prepared inputs, processors, criteria,
streamer and cache, and would run its own decoding loop.
"""

import copy
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationConfig

from hfspec import compat, loop
from hfspec.accept.record import Record
from hfspec.accept.rules import Greedy, Rejection, Rule, Seeded
from hfspec.accept.walk import Transcript
from hfspec.budget.controller import Controller
from hfspec.budget.experience import Experience
from hfspec.cache.ledger import speculative_cache
from hfspec.config import Options
from hfspec.contexts import contexts_of
from hfspec.draft.guard import Guard
from hfspec.drafting import Drafting
from hfspec.errors import UnsupportedCallError
from hfspec.metrics import Metrics, Stats
from hfspec.prepared import Prepared
from hfspec.reasons import lockstep_reason, plain_reason
from hfspec.sampling.noise import RowNoise, SeededNoise
from hfspec.target.forward import RaggedTarget, StateTarget, Target, UncachedTarget

logger = logging.getLogger("hfspec")

#: Different reasons that are warned of, for one patched model.
_MAX_WARNINGS = 50


@dataclass
class PatchState:
    """What is kept for one patched model between calls: counts, measurements, and which warnings were given."""

    last: Metrics = field(default_factory=Metrics)
    total: Metrics = field(default_factory=Metrics)
    warned: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _experience: dict[tuple[int, bool], tuple["weakref.ref[Any]", Experience]] = field(default_factory=dict)

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
        key = (id(given), is_lockstep)
        found = self._experience.get(key)
        if found is None or found[0]() is not given:
            found = self._experience[key] = (
                weakref.ref(given, lambda _: self._experience.pop(key, None)),
                Experience(),
            )
        return found[1]

    def stats(self) -> Stats:
        """The counts as they are now."""
        with self._lock:
            return Stats(last=self.last, total=copy.deepcopy(self.total))

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

    @property
    def plain_reason(self) -> str | None:
        """Why the call runs plain whatever it asks for: by choice, or by what the model is; or `None`."""
        wanted = _wanted_plain(self.options)
        if wanted is not None:
            return wanted
        if not self.has_host_loop:
            return f"{type(self.model).__name__} has a decoding loop of its own"
        if compat.num_processes(self.model) > 1 and self.options.budget.policy == "measured":
            return (
                "several processes share the model (tensor parallel), and what each would measure may differ; "
                "a fixed number as draft_budget is the same for all"
            )
        return None

    def note_plain(self, reason: str, may_raise: bool = True) -> None:
        """This call runs plain: count the reason, say it once per model, or raise if told to."""
        wanted = _wanted_plain(self.options)
        self.metrics.fallback_reasons[wanted or reason] += 1
        if wanted is not None:
            return
        if may_raise and self.options.on_unsupported == "raise":
            compat.forget_prepared_cache(self.model)
            raise UnsupportedCallError(
                f"hfspec cannot speed up this call: {reason}. Pass on_unsupported='warn' to run it plain, "
                "or speculate=False to say that this is wanted."
            )
        self.state.warn_once(reason, "this call runs as plain generate(): %s.")


def sample(
    call: Call,
    vanilla: Callable[..., Any],
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Stand in for the host's `_sample`, with its arguments and its result.

    Args:
        vanilla: the host's `_sample`, bound to the model.
        input_ids: `[batch, prompt_length]`.
    """
    prepared = Prepared(
        call.model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        model_kwargs,
        streamer,
        synced_gpus,
    )
    reason = call.plain_reason or plain_reason(prepared, call.options.budget.max_tokens) or call.drafting.problem
    if reason is None:
        call.was_decoded = True
        return _speculate(call, prepared)
    return run_plain(
        call,
        reason,
        vanilla,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        streamer=streamer,
        **model_kwargs,
    )


def _speculate(call: Call, prepared: Prepared) -> Any:
    """Decode by rounds; the result is what the host's `_sample` would have returned."""
    cache = prepared.cache
    has_cache = prepared.uses_cache and not prepared.keeps_own_state
    if has_cache and not call.has_own_cache and compat.is_empty(cache) and not compat.keeps_elsewhere(cache):
        cache = speculative_cache(cache)  # the host has just made that one, for nobody else
    why = lockstep_reason(prepared, cache) if prepared.num_rows > 1 else None
    is_lockstep = why is not None
    has_one_transcript = is_lockstep or prepared.num_rows == 1
    if why is not None:
        call.metrics.lockstep_reasons[why] += 1

    noise = SeededNoise()
    record = Record(prepared.generation_config, prepared.encoder_outputs)
    noises = RowNoise.of_batch(noise, prepared.num_rows, runs_ahead=not has_one_transcript)
    if has_one_transcript:
        target = _target_in_step(prepared, cache)
        transcripts = [Transcript(prepared, _rule(call.options, prepared, noise), record)]
    else:
        target = RaggedTarget(prepared, cache)
        transcripts = [
            Transcript(prepared.for_row(row), _rule(call.options, prepared, draws), record)
            for row, draws in enumerate(noises)
        ]
    contexts = contexts_of(prepared, transcripts[0].rule.name, noises, call.encoder_inputs)
    source = Guard(call.drafting.source, contexts, on_failure=_failure_counter(call))
    # Rows in step go on only where all of them accept: what a single row's confidence says is no guide there.
    controller = Controller(
        call.options.budget,
        call.state.experience_with(call.drafting.given, is_lockstep),
        reads_confidence=prepared.device.type == "cpu" and not is_lockstep,
        num_rows=prepared.num_rows,
    )
    try:
        loop.generate(target, source, transcripts, controller, call.metrics, prepared.max_length)
    finally:
        source.stop()
        target.level_cache(transcripts[0].num_new)
        call.metrics.speculative_calls = int(call.metrics.rounds > 0)
    if prepared.streamer is not None:
        prepared.streamer.end()
    sequences = _joined(transcripts)
    if prepared.returns_states or call.has_own_cache:
        with compat.decoding(call.model):
            call.metrics.catch_ups += target.catch_up(sequences)
    return record.output(sequences, target.cache_for_user)


def _target_in_step(prepared: Prepared, cache: Any) -> Target:
    if not prepared.uses_cache:
        return UncachedTarget(prepared)
    return StateTarget(prepared) if prepared.keeps_own_state else Target(prepared, cache)


def run_plain(
    call: Call, reason: str, vanilla: Callable[..., Any], input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run one of the host's own decoding loops, having said why, and count its tokens.

    Raises:
        UnsupportedCallError: the user wants an error instead.
    """
    call.was_decoded = True
    call.note_plain(reason)
    started = time.perf_counter()
    try:
        result = vanilla(input_ids, *args, **kwargs)
    finally:
        seconds = time.perf_counter() - started
        call.metrics.plain_seconds += seconds
        call.metrics.total_seconds += seconds
    sequences = getattr(result, "sequences", result)
    if isinstance(sequences, torch.Tensor):
        num_new = sequences.shape[1] - input_ids.shape[1]
        call.metrics.new_tokens += sequences.shape[0] * num_new
        call.metrics.host_steps += num_new
    return result


def _wanted_plain(options: Options) -> str | None:
    if os.environ.get("HFSPEC_DISABLE", "0") not in ("", "0"):
        return "HFSPEC_DISABLE is set"
    if not options.speculate:
        return "speculate=False"
    if options.budget.max_tokens == 0:
        return "the draft budget is 0"
    return None


def _rule(options: Options, prepared: Prepared, noise: SeededNoise | RowNoise) -> Rule:
    if not prepared.generation_config.do_sample:
        return Greedy()
    return Seeded(noise) if options.acceptance == "seeded" else Rejection()


def _joined(transcripts: list[Transcript]) -> torch.Tensor:
    """The rows' texts `[batch, length]`, those that ended early filled up as vanilla fills them."""
    longest = max(each.length for each in transcripts)
    return torch.cat([pad(each.input_ids, (0, longest - each.length), value=each.pad_id or 0) for each in transcripts])


def _failure_counter(call: Call) -> Callable[[str], None]:
    def count(reason: str) -> None:
        call.metrics.fallback_reasons[reason] += 1
        call.state.warn_once(reason, "%s. The call goes on without drafts; its output is not affected.")

    return count
