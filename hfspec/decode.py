"""What a patched model's `generate()` comes to: decide, then speculate or step aside with a reason.

`patch` brings a call here at the point where Hugging Face has prepared inputs, processors, criteria,
streamer and cache, and would run its own decoding loop.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hfspec.accept.processing import Processing
from hfspec.accept.record import Record
from hfspec.accept.rules import Greedy, Rejection, Rule, Seeded
from hfspec.accept.vectorised import Vectorised
from hfspec.accept.walk import Walk
from hfspec.budget.controller import Controller
from hfspec.cache.ledger import speculative_cache
from hfspec.call import Call
from hfspec.draft.agreed import among_processes
from hfspec.draft.base import CallView
from hfspec.draft.contexts import contexts_of
from hfspec.draft.guard import Guard
from hfspec.host import caches, forwards
from hfspec.host.prepared import Prepared
from hfspec.host.trial import Fingerprint, fingerprint
from hfspec.host.verdicts import plain_reason
from hfspec.loop import Loop
from hfspec.plan import Plan
from hfspec.sampling.noise import BatchNoise
from hfspec.sampling.processors import by_row
from hfspec.texts import Texts
from hfspec.verification.handback import complete
from hfspec.verification.proving import Proving
from hfspec.verification.ragged import RaggedTarget
from hfspec.verification.target import StateTarget, Target, UncachedTarget


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
    if reason is None:
        cache = _cache_of(call, prepared)
        plan, print_ = _plan(call, prepared, cache)
        reason = call.state.trial.problem(print_)
        if reason is None and call.note_paused() is None:
            return _speculate(call, prepared, cache, plan, print_)
    if reason is not None:
        call.note_plain(reason)
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


def _cache_of(call: Call, prepared: Prepared) -> Any:
    """The cache that the call will use: ours where the host has just made one, for nobody else."""
    cache = prepared.cache
    has_cache = prepared.uses_cache and not prepared.keeps_own_state
    if has_cache and not call.has_own_cache and caches.is_empty(cache) and not caches.keeps_elsewhere(cache):
        return speculative_cache(cache)
    return cache


def _plan(call: Call, prepared: Prepared, cache: Any) -> tuple[Plan, Fingerprint]:
    """How the call is to be decoded, and the model as it stands for it; nothing that was disproved is planned."""
    plan = Plan.of(prepared, cache, call.options)
    print_ = fingerprint(prepared, cache, plan.is_ragged)
    if plan.is_ragged and (why := call.state.trial.problem(print_)) is not None:
        plan = plan.prepared_by_host(f"at their own paces, {why}", prepared.num_rows)
        print_ = fingerprint(prepared, cache, plan.is_ragged)
    return plan, print_


def _speculate(call: Call, prepared: Prepared, cache: Any, plan: Plan, print_: Fingerprint) -> Any:
    """Decode by rounds; the result is what the host's `_sample` would have returned."""
    if plan.why_in_step is not None:
        call.metrics.lockstep_reasons[plan.why_in_step] += 1

    texts = Texts(prepared.input_ids)
    noise = BatchNoise(prepared.num_rows)
    by_rows = 0 if plan.is_in_step or prepared.num_rows == 1 else prepared.num_rows
    record = Record(prepared.generation_config, prepared.encoder_outputs, by_rows)
    target = RaggedTarget(prepared, cache) if plan.is_ragged else _target_in_step(prepared, cache)
    acceptor = _acceptor(plan, prepared, texts, noise, record)
    contexts = contexts_of(prepared, plan.selection, noise, call.encoder_inputs)
    source = Guard(
        among_processes(call.drafting.source, call.model), CallView(contexts, noise), on_failure=_failure_counter(call)
    )
    # Rows in step go on only where all of them accept: what a single row's confidence says is no guide there.
    controller = Controller(
        call.options.budget,
        call.state.experience_with(call.drafting.given, plan.is_in_step),
        reads_confidence=prepared.device.type == "cpu" and not plan.is_in_step,
        num_rows=prepared.num_rows,
    )
    proving = Proving(target, call.state.trial, print_, call.metrics, prepared.num_before)
    try:
        Loop(plan, texts, source, target, proving, acceptor, controller, call.metrics).write()
        if prepared.returns_states and isinstance(target, RaggedTarget):
            with forwards.decoding(call.model):
                call.metrics.catch_ups += complete(prepared, plan, target, proving, texts, record)
    except BaseException:
        if call.has_own_cache:
            target.recover(texts)
        raise
    finally:
        source.stop()
        if target.problem is not None:
            call.note_plain(target.problem, may_raise=False)
        if call.metrics.drafted_tokens and not source.has_failed:
            call.state.note_drafts(call.drafting.given)
        call.metrics.speculative_calls = int(call.metrics.rounds > 0)
    target.level_cache(texts.num_new)
    if prepared.streamer is not None:
        call.finish()  # who reads the text may ask for stats as soon as it ends
        prepared.streamer.end()
    sequences = texts.whole(plan.pad_id or 0)
    if prepared.returns_states or call.has_own_cache:
        with forwards.decoding(call.model):
            call.metrics.catch_ups += target.catch_up(sequences)
    return record.output(sequences, target.cache_for_user)


def _acceptor(plan: Plan, prepared: Prepared, texts: Texts, noise: BatchNoise, record: Record) -> Walk | Vectorised:
    """The walk, or what settles all states of a round at once and has the walk to fall back on."""
    rule = _rule(plan, noise)
    processors = [prepared.processors]
    if not plan.is_in_step and prepared.num_rows > 1:
        processors = by_row(prepared.processors, prepared.num_rows)
    walk = Walk(texts, rule, processors, prepared.criteria, record, plan.is_in_step, plan.pad_id, prepared.streamer)
    if not plan.is_vectorised:
        return walk
    processing = Processing(texts, processors, plan.is_in_step)
    return Vectorised(
        walk,
        texts,
        rule,
        processing,
        prepared.criteria,
        record,
        plan.is_in_step,
        plan.pad_id,
        prepared.streamer,
    )


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


def _rule(plan: Plan, noise: BatchNoise) -> Rule:
    if plan.selection == "greedy":
        return Greedy()
    return Seeded(noise) if plan.selection == "seeded" else Rejection()


def _failure_counter(call: Call) -> Callable[[str], None]:
    def count(reason: str) -> None:
        call.metrics.fallback_reasons[reason] += 1
        call.state.note_fault(call.drafting.given, reason)
        call.state.warn_once(reason, "%s. The call goes on without drafts; its output is not affected.")

    return count
