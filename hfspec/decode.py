"""What a patched model's `generate()` comes to: decide, then speculate or step aside with a reason.

`patch` brings a call here at the point where Hugging Face has prepared inputs, processors, criteria,
streamer and cache, and would run its own decoding loop.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hfspec import loop
from hfspec.accept.record import Record
from hfspec.accept.rules import Greedy, Rejection, Rule, Seeded
from hfspec.accept.walk import Transcript
from hfspec.budget.controller import Controller
from hfspec.cache.ledger import speculative_cache
from hfspec.call import Call
from hfspec.config import Options
from hfspec.draft.agreed import among_processes
from hfspec.draft.contexts import contexts_of
from hfspec.draft.guard import Guard
from hfspec.host import caches, forwards
from hfspec.host.prepared import Prepared
from hfspec.host.verdicts import lockstep_reason, plain_reason
from hfspec.sampling.noise import RowNoise, SeededNoise
from hfspec.verification.target import RaggedTarget, StateTarget, Target, UncachedTarget


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
    call.was_decoded = True
    if reason is not None:
        call.note_plain(reason)
    elif call.note_paused() is None:
        return _speculate(call, prepared)
    return _run(
        call,
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
    if has_cache and not call.has_own_cache and caches.is_empty(cache) and not caches.keeps_elsewhere(cache):
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
    drafting = among_processes(call.drafting.source, call.model)
    source = Guard(drafting, contexts, on_failure=_failure_counter(call))
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
        if call.metrics.drafted_tokens and not source.has_failed:
            call.state.note_drafts(call.drafting.given)
        target.level_cache(transcripts[0].num_new)
        call.metrics.speculative_calls = int(call.metrics.rounds > 0)
    if prepared.streamer is not None:
        call.finish()  # who reads the text may ask for stats as soon as it ends
        prepared.streamer.end()
    sequences = _joined(transcripts)
    if prepared.returns_states or call.has_own_cache:
        with forwards.decoding(call.model):
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
    return _run(call, vanilla, input_ids, *args, **kwargs)


def _run(call: Call, vanilla: Callable[..., Any], input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    started = time.perf_counter()

    def count(num_rows: int, num_new: int) -> None:
        if call.is_counted:
            return
        seconds = time.perf_counter() - started
        call.metrics.plain_seconds += seconds
        call.metrics.total_seconds += seconds
        call.metrics.new_tokens += num_rows * num_new
        call.metrics.host_steps += num_new

    num_rows, num_new = input_ids.shape[0], 0
    streamer = kwargs.get("streamer")
    if streamer is not None:

        def count_streamed(num_tokens: int) -> None:
            count(num_rows, num_tokens // num_rows)
            call.finish()

        kwargs["streamer"] = _CountedStreamer(streamer, count_streamed)
    try:
        result = vanilla(input_ids, *args, **kwargs)
        sequences = getattr(result, "sequences", result)
        if isinstance(sequences, torch.Tensor):
            num_rows, num_new = sequences.shape[0], sequences.shape[1] - input_ids.shape[1]
    finally:
        count(num_rows, num_new)
    return result


class _CountedStreamer(BaseStreamer):
    """The user's streamer, before whose end the call is counted."""

    def __init__(self, inner: Any, count: Callable[[int], None]) -> None:
        self._inner = inner
        self._count = count
        self._num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, value: Any) -> None:
        self._num_tokens += getattr(value, "numel", lambda: 0)()
        self._inner.put(value)

    def end(self) -> None:
        self._count(self._num_tokens)
        self._inner.end()


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
        call.state.note_fault(call.drafting.given, reason)
        call.state.warn_once(reason, "%s. The call goes on without drafts; its output is not affected.")

    return count
