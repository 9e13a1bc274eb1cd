"""How a draft token is chosen from a source's logits: as the target would choose it, were the logits its own.

For any source that has logits. Knows no model and no cache.
"""

import torch

from hfspec.draft.base import Context
from hfspec.rounds import Draft
from hfspec.sampling.processors import DraftProcessors


class RowDraft:
    """One row's draft in the making.

    Attributes:
        confidences: for each token so far, how sure its choice was; only where that was asked for.
    """

    def __init__(self, context: Context, processors: DraftProcessors) -> None:
        self.confidences: list[float] = []
        self._context = context
        self._processors = processors
        self._tokens: list[torch.Tensor] = []
        self._distributions: list[torch.Tensor] = []

    @property
    def num_tokens(self) -> int:
        """How many tokens are chosen."""
        return len(self._tokens)

    def choose(self, prefix: torch.Tensor, logits: torch.Tensor, wants_confidence: bool) -> torch.Tensor:
        """Choose the token after `prefix` `[1, length]` by the source's `logits` `[1, vocab]`; return it, `[1, 1]`."""
        context = self._context
        scores, token_ids = self._processors(prefix, logits)
        if context.selection == "rejection":
            preference = scores.softmax(dim=-1)
            index = torch.multinomial(preference, num_samples=1)
            self._distributions.append(_spread(preference, token_ids, context.vocab_size))
        else:
            preference = _preference(context, scores, token_ids, position=self.num_tokens)
            index = preference.max(dim=-1, keepdim=True).indices
        token = index if token_ids is None else token_ids.gather(1, index)
        self._tokens.append(token)
        if wants_confidence:
            self.confidences.append(_confidence(context, preference, index))
        return token

    def finished(self, caught_up: int) -> Draft:
        """As the protocol wants it."""
        return Draft(
            token_ids=torch.cat(self._tokens, dim=-1),
            probs=torch.cat(self._distributions) if self._distributions else None,
            confidences=tuple(self.confidences),
            caught_up=caught_up,
        )


def _preference(context: Context, scores: torch.Tensor, token_ids: torch.Tensor | None, position: int) -> torch.Tensor:
    """What the target is likely to choose by, were its scores the draft's: `[1, n]`, its noise included."""
    if context.selection == "greedy":
        return scores
    like = torch.empty(1, context.vocab_size, device=context.device)
    noise = context.noise.peek(like, position)
    return scores - (noise if token_ids is None else noise.gather(1, token_ids)).log()


def _confidence(context: Context, preference: torch.Tensor, index: torch.Tensor) -> float:
    """How sure the choice of `index` `[1, 1]` is. `preference` is written over.

    Drawn tokens: the distribution's greatest probability, read before any token is known by it. Picked tokens:
    1 where nothing else could have been picked, 0 where the second best was as likely.
    """
    if context.selection == "rejection":
        return float(preference.amax())
    best = preference.gather(1, index)
    second = preference.scatter_(1, index, -torch.inf).amax()
    return float(-torch.expm1(second - best))


def _spread(probs: torch.Tensor, token_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """A distribution over some tokens as one over the whole vocabulary, `[1, vocab]`."""
    if token_ids is None:
        return probs
    return probs.new_zeros(1, vocab_size).scatter_(1, token_ids, probs)
