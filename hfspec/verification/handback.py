"""What is returned of rows that ended before others, where more than the tokens is.

Vanilla feeds such a row its padding until all rows have ended, and returns what comes of that. Here the row has left,
and reads its padding at the end: in rounds whose drafts are known to be right.
"""

import torch

from hfspec.accept.processing import Processing
from hfspec.accept.record import Record
from hfspec.drafts import Draft
from hfspec.host.prepared import Prepared
from hfspec.plan import Plan
from hfspec.rounds import Outcome, Outcomes
from hfspec.sampling.processors import by_row
from hfspec.texts import Texts
from hfspec.verification.fitting import fitted
from hfspec.verification.proving import Proving
from hfspec.verification.ragged import RaggedTarget

#: Logits that are made at once, of all rows.
_MAX_LOGITS = 1 << 26


def complete(
    prepared: Prepared, plan: Plan, target: RaggedTarget, proving: Proving, texts: Texts, record: Record
) -> int:
    """Let all rows read on to the end of the longest text.

    Args:
        texts: of all rows, which have ended.
        record: gets the scores and logits behind their ends.

    Returns:
        The forwards that it took, without those of proofs.
    """
    longest, pad_id, num_forwards = max(texts.all_lengths()), plan.pad_id, 0
    behind = texts.behind()
    if behind is None or pad_id is None:
        return 0
    processors = by_row(prepared.processors, prepared.num_rows)
    processing = Processing(behind, processors, is_in_step=False)
    target.go_on_with(behind.rows)
    while rows := [row for row, length in enumerate(behind.lengths) if length < longest]:
        if len(rows) < len(behind.rows):
            target.select(rows)
            behind.select(rows)
        draft = Draft.empty(len(rows), behind.device)
        if target.problem is None:
            width = min(proving.widest, max(1, _MAX_LOGITS // (len(rows) * prepared.vocab_size)))
            draft = fitted(_padding(behind, longest, pad_id, width), behind, plan)
        verified = proving.verify(behind, draft)
        num_forwards += 1
        draft = draft.cut([verified.num_drafted] * draft.num_rows)  # nothing, where a proof has failed
        if record.wants_scores:
            logits = verified.logits.to(copy=True, dtype=torch.float32, device=behind.device)
            scores = processing(logits, draft)
            for index, row in enumerate(behind.rows):
                num_states = 1 + draft.lengths[index]
                record.add_scores_of(row, scores[index, :num_states].clone(), logits[index, :num_states].clone())
        outcomes = _all_right(draft, pad_id)
        target.keep(outcomes)
        tokens = torch.full((len(rows), 1 + draft.num_tokens), pad_id, device=behind.device)
        behind.grow(tokens, outcomes)
    return num_forwards


def _padding(texts: Texts, longest: int, pad_id: int, width: int) -> Draft:
    """What each row is still to read behind its last token, as far as one forward goes; the very last is never read."""
    lengths = [min(longest - length, width) - 1 for length in texts.lengths]
    return Draft(torch.full((len(lengths), max(lengths)), pad_id, device=texts.device)).cut(lengths)


def _all_right(draft: Draft, pad_id: int) -> Outcomes:
    """The verdict that every token is the one to come."""
    return Outcomes(tuple(Outcome(each, tuple(range(each)), (pad_id,) * (each + 1)) for each in draft.lengths))
