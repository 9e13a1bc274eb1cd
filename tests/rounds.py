"""Rounds made by hand, for what learns from them or counts them."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from hfspec import Draft, Outcome, Texts
from hfspec.draft.shape import joined
from hfspec.rounds import Outcomes, Round


def outcome(num_judged: int, num_accepted: int, num_committed: int) -> Outcome:
    """The verdict on a chain, by its counts."""
    return Outcome(num_judged, tuple(range(num_accepted)), (7,) * num_committed)


def finished(
    drafts: Sequence[Draft],
    outcomes: Sequence[Outcome],
    draft_seconds: float,
    verify_seconds: float,
    seconds: float | None = None,
    is_in_step: bool = False,
    caught_up: int = 0,
) -> Round:
    """A round of rows, a draft `[1, n]` and an outcome each, that had one committed token to read."""
    draft = joined(drafts)
    return Round(
        draft,
        Outcomes(tuple(outcomes)),
        1 + draft.num_tokens,
        draft_seconds,
        verify_seconds,
        draft_seconds + verify_seconds if seconds is None else seconds,
        is_in_step,
        range(len(drafts)),
        caught_up,
    )


def uneven(texts: Sequence[torch.Tensor]) -> Texts:
    """Texts of rows `[1, length]` of any lengths, in the middle of a call."""
    longest = max(text.shape[1] for text in texts)
    made = Texts(torch.cat([pad(text, (0, longest - text.shape[1])) for text in texts]))
    made.num_prompt, made.lengths = 0, [text.shape[1] for text in texts]
    made._ends = torch.tensor(made.lengths) if len(set(made.lengths)) > 1 else None
    return made
