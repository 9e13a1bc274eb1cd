"""THE round: draft → verify → accept → commit, one target forward each.

Every name below is one of DESIGN's words. What a call may do differently is decided before, in `decode`.
"""

import time
from collections.abc import Iterator, Sequence

import torch

from hfspec.accept.walk import Transcript, walk
from hfspec.budget.controller import Controller
from hfspec.budget.timing import measured
from hfspec.draft.guard import Guard
from hfspec.host import forwards
from hfspec.metrics import Metrics
from hfspec.rounds import Draft, Outcome, Round, RoundBudget
from hfspec.verification.proving import Proving
from hfspec.verification.target import RaggedTarget, Target


def generate(
    target: Target,
    source: Guard,
    transcripts: Sequence[Transcript],
    controller: Controller,
    metrics: Metrics,
    max_length: int | None,
    proving: Proving,
) -> None:
    """Write the transcripts to their ends.

    Args:
        transcripts: one for all rows, or one for each row of a `RaggedTarget`.
        max_length: length that no draft may reach beyond, if there is one.
        proving: makes the target's forwards over drafts.
    """
    started = time.perf_counter()
    try:
        _prefill(target, transcripts, metrics, proving)
        with forwards.decoding(target.model):
            at_work = transcripts
            while at_work := _unfinished(at_work, target, source):
                _round(target, source, at_work, controller, metrics, max_length, proving)
    finally:
        metrics.new_tokens += sum(each.num_new * each.num_rows for each in transcripts)
        metrics.steps += max(0, max(each.num_new for each in transcripts) - 1)
        metrics.total_seconds += time.perf_counter() - started


def _prefill(target: Target, transcripts: Sequence[Transcript], metrics: Metrics, proving: Proving) -> None:
    """Read the prompt and commit the first token: before any drafting, as soon as in vanilla."""
    started = time.perf_counter()
    prompts = torch.cat([each.input_ids for each in transcripts])
    with measured(prompts.device) as prefill:
        verified = proving.prefill(prompts)
    with forwards.decoding(target.model):
        for transcript, rows in _with_rows(transcripts):
            transcript.record.add_states(verified, 0)
            transcript.append(verified.logits[rows, 0])
    metrics.prefills += 1
    metrics.prefill_seconds += prefill.seconds
    metrics.ttft_seconds += time.perf_counter() - started


def _round(
    target: Target,
    source: Guard,
    transcripts: Sequence[Transcript],
    controller: Controller,
    metrics: Metrics,
    max_length: int | None,
    proving: Proving,
) -> None:
    """Draft, verify, accept, commit."""
    texts = [each.input_ids[row : row + 1] for each in transcripts for row in range(each.num_rows)]
    device = texts[0].device
    started = time.perf_counter()

    budget = _budget(target, texts, controller, max_length)
    with measured(device) as draft_time:
        drafts = source.propose(texts, budget)
    drafts = _trimmed(drafts, transcripts, max_length)
    with measured(device) as verify_time:
        verified = proving.verify(texts, [draft.token_ids for draft in drafts])
    drafts = [draft.cut(verified.num_drafted) for draft in drafts]
    outcomes: list[Outcome] = []
    for transcript, rows in _with_rows(transcripts):
        outcome = walk(transcript, drafts[rows], verified.of_rows(rows))
        outcomes += [outcome] * transcript.num_rows
    target.keep([outcome.num_committed for outcome in outcomes])
    if budget.num_tokens:
        source.observe(outcomes)

    verify_seconds, all_seconds = verify_time.seconds, time.perf_counter() - started
    seconds = (draft_time.seconds, verify_seconds - proving.seconds, all_seconds - proving.seconds)
    round_ = Round(drafts, outcomes, len(transcripts) < len(texts), verified.num_read, *seconds)
    metrics.count_round(round_, target.problem or budget.why_plain)
    controller.observe(round_)


def _budget(
    target: Target, texts: Sequence[torch.Tensor], controller: Controller, max_length: int | None
) -> RoundBudget:
    """What the round may draft: nothing where nothing can be verified."""
    if target.problem is not None:
        return RoundBudget(0, why_plain=target.problem)
    return controller.next_round([text.shape[1] for text in texts], max_length, target.num_unread)


def _unfinished(transcripts: Sequence[Transcript], target: Target, source: Guard) -> Sequence[Transcript]:
    """Those that go on; rows that have ended by themselves leave target and draft."""
    rows = [row for row, each in enumerate(transcripts) if not each.is_finished]
    if isinstance(target, RaggedTarget) and 0 < len(rows) < len(transcripts):
        target.select(rows)
        source.select(rows)
    return [transcripts[row] for row in rows]


def _trimmed(drafts: list[Draft], transcripts: Sequence[Transcript], max_length: int | None) -> list[Draft]:
    """No draft beyond a text's last token; rows in step get drafts of one length, or the padding that is due."""
    trimmed: list[Draft] = []
    for transcript, rows in _with_rows(transcripts):
        lengths = [
            _verifiable(transcript.input_ids[row], draft, transcript.last_draft_id)
            for row, draft in enumerate(drafts[rows])
            if not transcript.is_padded(row)
        ]
        most = min(lengths, default=0)
        if max_length is not None:
            most = max(0, min(most, max_length - transcript.length - 1))
        for row, draft in enumerate(drafts[rows]):
            trimmed.append(_padding(draft, transcript.pad_id, most) if transcript.is_padded(row) else draft.cut(most))
    return trimmed


def _verifiable(text: torch.Tensor, draft: Draft, last_id: int | None) -> int:
    """How many tokens of a draft behind a `text` can be verified in one forward: those up to the first `last_id`."""
    if last_id is None:
        return draft.num_tokens
    ids: list[int] = [int(text[-1]), *draft.token_ids[0].tolist()]
    return ids.index(last_id) if last_id in ids else draft.num_tokens


def _padding(like: Draft, pad_id: int | None, num_tokens: int) -> Draft:
    """What surely comes after the end of a row."""
    ids = torch.full((1, num_tokens), pad_id or 0, dtype=torch.long, device=like.token_ids.device)
    return Draft(ids, is_padding=True)


def _with_rows(transcripts: Sequence[Transcript]) -> Iterator[tuple[Transcript, slice]]:
    """Each transcript with its rows, as they lie in the batch at work."""
    start = 0
    for transcript in transcripts:
        yield transcript, slice(start, start + transcript.num_rows)
        start += transcript.num_rows
