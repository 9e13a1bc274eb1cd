"""THE round: draft → verify → accept → commit, one target forward each.

What a call may do differently is decided before, in `decode`, and stands in its `Plan`.
"""

import time

import torch

from hfspec.accept.vectorised import Vectorised
from hfspec.accept.walk import Walk
from hfspec.budget.controller import Controller
from hfspec.budget.timing import measured
from hfspec.draft.guard import Guard
from hfspec.drafts import Draft
from hfspec.host import forwards
from hfspec.metrics import Metrics
from hfspec.plan import Plan
from hfspec.rounds import Round, RoundBudget
from hfspec.texts import Texts
from hfspec.verification.proving import Proving
from hfspec.verification.ragged import RaggedTarget
from hfspec.verification.target import Target


def generate(
    target: Target,
    source: Guard,
    acceptor: Walk | Vectorised,
    texts: Texts,
    controller: Controller,
    metrics: Metrics,
    plan: Plan,
    proving: Proving,
) -> None:
    """Write the texts to their ends.

    Args:
        proving: makes the target's forwards over drafts.
    """
    started = time.perf_counter()
    try:
        _prefill(target, acceptor, texts, metrics, proving)
        with forwards.decoding(target.model):
            while _goes_on(texts, target, source):
                _round(target, source, acceptor, texts, controller, metrics, plan, proving)
    finally:
        num_new = [length - texts.num_prompt for length in texts.all_lengths()]
        metrics.new_tokens += sum(num_new)
        metrics.steps += max(0, max(num_new) - 1)
        metrics.total_seconds += time.perf_counter() - started


def _prefill(target: Target, acceptor: Walk | Vectorised, texts: Texts, metrics: Metrics, proving: Proving) -> None:
    """Read the prompt and commit the first token: before any drafting, as soon as in vanilla."""
    started = time.perf_counter()
    with measured(texts.device) as prefill:
        verified = proving.prefill(texts.together())
    with forwards.decoding(target.model):
        acceptor.begin(verified)
    metrics.prefills += 1
    metrics.prefill_seconds += prefill.seconds
    metrics.ttft_seconds += time.perf_counter() - started


def _round(
    target: Target,
    source: Guard,
    acceptor: Walk | Vectorised,
    texts: Texts,
    controller: Controller,
    metrics: Metrics,
    plan: Plan,
    proving: Proving,
) -> None:
    """Draft, verify, accept, commit."""
    started = time.perf_counter()
    at_work = [row for row, has_ended in enumerate(texts.has_ended) if not has_ended or plan.pad_id is None]

    why_chains = plan.why_chains or proving.why_chains
    budget = _budget(target, texts, controller, plan, why_chains is None)
    with measured(texts.device) as draft_time:
        draft = source.propose(texts, budget)
    draft = _verifiable(draft, texts, plan, why_chains, metrics)
    with measured(texts.device) as verify_time:
        verified = proving.verify(texts, draft)
    draft = draft.cut([verified.num_drafted] * draft.num_rows)
    outcomes = acceptor.settle(draft, verified)
    target.keep(outcomes)
    source.read(texts, outcomes)

    round_ = Round(
        draft,
        outcomes,
        verified.num_read,
        draft_time.seconds,
        verify_time.seconds - proving.seconds,
        time.perf_counter() - started - proving.seconds,
        plan.is_in_step,
        at_work,
        source.caught_up,
        max(draft.lengths[row] for row in at_work),
    )
    metrics.count_round(round_, target.problem or budget.why_plain)
    controller.observe(round_)


def _budget(target: Target, texts: Texts, controller: Controller, plan: Plan, allows_trees: bool) -> RoundBudget:
    """What the round may draft: nothing where nothing can be verified."""
    if target.problem is not None:
        return RoundBudget(0, why_plain=target.problem)
    if plan.is_in_step and not plan.pad_is_readable and any(texts.has_ended):
        return RoundBudget(0, why_plain="a row that has ended is fed a padding id that the model does not have")
    budget = controller.next_round(texts.lengths, plan.max_length, target.num_unread)
    budget.allows_trees = allows_trees
    return budget


def _goes_on(texts: Texts, target: Target, source: Guard) -> bool:
    """Whether some row goes on; rows that have ended by themselves leave target and draft."""
    rows = [row for row, has_ended in enumerate(texts.has_ended) if not has_ended]
    if isinstance(target, RaggedTarget) and 0 < len(rows) < len(texts.rows):
        target.select(rows)
        source.select(rows)
        texts.select(rows)
    return bool(rows)


def _verifiable(draft: Draft, texts: Texts, plan: Plan, why_chains: str | None, metrics: Metrics) -> Draft:
    """No draft beyond a text's last token; chains where trees cannot be verified; rows in step alike."""
    if not draft.num_tokens:
        return draft
    limits = [draft.num_tokens] * draft.num_rows
    if plan.max_length is not None:
        limits = [max(0, plan.max_length - length - 1) for length in texts.lengths]
    if draft.parents is not None and why_chains is not None:
        chains = draft.first_paths()
        if chains.lengths != draft.lengths:
            metrics.chain_reasons[why_chains] = 1  # once a call
        draft = chains
    if plan.last_draft_id is not None or plan.unverifiable_ids:
        limits = [min(pair) for pair in zip(limits, _cuts(plan, draft, texts), strict=True)]
    if plan.is_in_step:
        return _in_step(draft, limits, texts, plan)
    return draft.no_deeper(limits)


def _in_step(draft: Draft, limits: list[int], texts: Texts, plan: Plan) -> Draft:
    """Drafts of one length; rows that have ended get the padding that is due."""
    pad_id = plan.pad_id
    padded = [row for row, has_ended in enumerate(texts.has_ended) if has_ended and pad_id is not None]
    others = [row for row in range(draft.num_rows) if row not in padded]
    most = min(min(draft.lengths[row], limits[row]) for row in others)
    token_ids = draft.token_ids[:, :most].clone()
    if pad_id is not None:
        for row in padded:
            token_ids[row] = pad_id
    probs = None if draft.probs is None else draft.probs[:, :most]
    confidences = draft.confidences[:, :most] if isinstance(draft.confidences, torch.Tensor) else None
    return Draft(token_ids, probs=probs, confidences=confidences)


def _cuts(plan: Plan, draft: Draft, texts: Texts) -> list[int]:
    """How many tokens of each row's draft can be verified in one forward, by what they are."""
    cuts = []
    for row in torch.cat([texts.last([1] * draft.num_rows), draft.token_ids], dim=1).tolist():
        last = row.index(plan.last_draft_id) if plan.last_draft_id in row else draft.num_tokens
        bad = next((node for node, token_id in enumerate(row[1:]) if token_id in plan.unverifiable_ids), last)
        cuts.append(min(last, bad))
    return cuts
