"""Drafts made to fit what can be verified: no longer than the text may get, and alike where rows are in step."""

import torch

from hfspec.drafts import Draft
from hfspec.plan import Plan
from hfspec.texts import Texts


def fitted(draft: Draft, texts: Texts, plan: Plan) -> Draft:
    """What of a draft can be verified in one forward behind the texts."""
    if not draft.num_tokens:
        return draft
    limits = [draft.num_tokens] * draft.num_rows
    if plan.max_length is not None:  # the last token of a text is never drafted: it is the target's own
        limits = [max(0, plan.max_length - length - 1) for length in texts.lengths]
    if plan.last_draft_id is not None or plan.unverifiable_ids:
        limits = [min(pair) for pair in zip(limits, _cuts(draft, texts, plan), strict=True)]
    return _in_step(draft, limits, texts, plan.pad_id) if plan.is_in_step else draft.no_deeper(limits)


def _in_step(draft: Draft, limits: list[int], texts: Texts, pad_id: int | None) -> Draft:
    """Chains of one length; rows that have ended get the padding that is due."""
    padded = [row for row, has_ended in enumerate(texts.has_ended) if has_ended and pad_id is not None]
    most = min(min(draft.lengths[row], limits[row]) for row in range(draft.num_rows) if row not in padded)
    token_ids = draft.token_ids[:, :most].clone()
    if pad_id is not None:
        for row in padded:
            token_ids[row] = pad_id
    probs = None if draft.probs is None else draft.probs[:, :most]
    confidences = draft.confidences[:, :most] if isinstance(draft.confidences, torch.Tensor) else None
    return Draft(token_ids, probs=probs, confidences=confidences)


def _cuts(draft: Draft, texts: Texts, plan: Plan) -> list[int]:
    """How many tokens of each row's draft can be verified in one forward, by what they are."""
    cuts = []
    for row in torch.cat([texts.last([1] * draft.num_rows), draft.token_ids], dim=1).tolist():
        last = row.index(plan.last_draft_id) if plan.last_draft_id in row else draft.num_tokens
        bad = next((node for node, token_id in enumerate(row[1:]) if token_id in plan.unverifiable_ids), last)
        cuts.append(min(last, bad))
    return cuts
