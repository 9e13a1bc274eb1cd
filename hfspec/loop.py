"""THE round: draft → verify → accept → commit, one target forward each.

Every name below is one of DESIGN's words. What a call may do differently is decided before, in `decode`.
"""

import time

from hfspec import compat
from hfspec.accept.walk import Transcript, walk
from hfspec.budget.controller import Controller
from hfspec.budget.timing import measured
from hfspec.draft.base import DraftSession
from hfspec.metrics import Metrics
from hfspec.target.forward import Target


def generate(
    target: Target,
    drafter: DraftSession,
    transcript: Transcript,
    controller: Controller,
    metrics: Metrics,
    max_length: int | None,
) -> None:
    """Write `transcript` to its end.

    Args:
        drafter: must answer a budget of 0 tokens with an empty draft.
        max_length: length that no draft may reach beyond, if there is one.
    """
    started = time.perf_counter()
    try:
        _prefill(target, transcript, metrics)
        with compat.decoding(target.model):
            while not transcript.is_finished:
                num_remaining = None if max_length is None else max_length - transcript.input_ids.shape[1]
                _round(target, drafter, transcript, controller, metrics, num_remaining)
    finally:
        metrics.new_tokens += transcript.num_new
        metrics.total_seconds += time.perf_counter() - started


def _prefill(target: Target, transcript: Transcript, metrics: Metrics) -> None:
    """Read the prompt and commit the first token: before any drafting, as soon as in vanilla."""
    started = time.perf_counter()
    with measured(transcript.input_ids.device) as prefill:
        verified = target.prefill(transcript.input_ids)
    with compat.decoding(target.model):
        transcript.record.add_states(verified, 0)
        transcript.append(verified.logits[:, 0])
    metrics.prefills += 1
    metrics.prefill_seconds += prefill.seconds
    metrics.ttft_seconds += time.perf_counter() - started


def _round(
    target: Target,
    drafter: DraftSession,
    transcript: Transcript,
    controller: Controller,
    metrics: Metrics,
    num_remaining: int | None,
) -> None:
    """Draft, verify, accept, commit."""
    device = transcript.input_ids.device
    started = time.perf_counter()

    budget = controller.next_round(num_remaining)
    with measured(device) as drafting:
        draft = drafter.propose(transcript.input_ids, budget)
    with measured(device) as verifying:
        verified = target.verify(transcript.input_ids, draft.token_ids)
    outcome = walk(transcript, draft, verified)
    target.keep(transcript.num_new, outcome.num_committed)
    drafter.observe(outcome)

    metrics.count_round(draft, outcome, drafting.seconds, verifying.seconds)
    controller.observe(draft, outcome, drafting.seconds, verifying.seconds, time.perf_counter() - started)
