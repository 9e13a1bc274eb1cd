"""How draft tokens are chosen from a source's logits: as the target would choose them, were the logits its own.

For any source that has logits. Knows no model and no cache.
"""

from collections.abc import Callable, Sequence

import torch

from hfspec.draft.base import Context, RowsPeek
from hfspec.drafts import Draft
from hfspec.sampling.processors import DraftProcessors


class DraftChoice:
    """The rows' drafts of one round in the making, one token of all rows at a time.

    Args:
        contexts: one a row.
        processors: the rows' own; where none of them looks at the text, the first serves all rows at once.
        noise: of a seeded call.

    Attributes:
        confidences: for each token so far how sure each row's choice was, on the host; only where asked for.
    """

    def __init__(self, contexts: Sequence[Context], processors: Sequence[DraftProcessors], noise: RowsPeek) -> None:
        self.confidences: list[list[float]] = []
        self._context = contexts[0]
        self._rows = [context.row for context in contexts]
        self._processors = processors
        self._noise = noise
        self._tokens: list[torch.Tensor] = []
        self._distributions: list[torch.Tensor] = []

    @property
    def num_tokens(self) -> int:
        """How many tokens are chosen in each row."""
        return len(self._tokens)

    @property
    def token_ids(self) -> torch.Tensor:
        """Them, `[rows, num_tokens]`."""
        return torch.cat(self._tokens, dim=1)

    def choose(
        self, logits: torch.Tensor, wants_confidence: bool, prefix: Callable[[int], torch.Tensor]
    ) -> torch.Tensor:
        """Choose each row's next token by the source's `logits` `[rows, vocab]`; return them, `[rows, 1]`.

        Args:
            prefix: gives a row's text and the tokens drafted so far, `[1, length]`; asked for only if needed.
        """
        scores, token_ids = self._processed(logits, prefix)
        if self._context.selection == "rejection":
            preference = scores.softmax(dim=-1)
            index = torch.multinomial(preference, num_samples=1)
            self._distributions.append(_spread(preference, token_ids, self._context.vocab_size))
        else:
            preference = self._preference(scores, token_ids)
            index = preference.argmax(dim=-1, keepdim=True)
        tokens = index if token_ids is None else token_ids.gather(1, index)
        self._tokens.append(tokens)
        if wants_confidence:
            self.confidences.append(_confidences(self._context, preference, index))
        return tokens

    def finished(self, lengths: Sequence[int]) -> Draft:
        """As the protocol wants it, with so many tokens of each row."""
        confidences = torch.tensor(self.confidences).T if self.confidences else None
        probs = torch.stack(self._distributions, dim=1) if self._distributions else None
        return Draft(self.token_ids, probs=probs, confidences=confidences).cut(lengths)

    def _processed(
        self, logits: torch.Tensor, prefix: Callable[[int], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores `[rows, n]` and the token ids they belong to, `[rows, n]` or `None` for all."""
        if self._processors[0].is_blind:
            return self._processors[0](logits[:1, :0], logits)
        scores, token_ids = zip(
            *(each(prefix(row), logits[row : row + 1]) for row, each in enumerate(self._processors)), strict=True
        )
        return torch.cat(scores), None if token_ids[0] is None else torch.cat(token_ids)

    def _preference(self, scores: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """What the target is likely to choose by, were its scores the draft's: `[rows, n]`, its noise included."""
        if self._context.selection == "greedy":
            return scores
        like = scores if token_ids is None else scores.new_empty(len(scores), self._context.vocab_size)
        noise = self._noise.peek(self._rows, self.num_tokens, like)
        return scores - (noise if token_ids is None else noise.gather(1, token_ids)).log()


def _confidences(context: Context, preference: torch.Tensor, index: torch.Tensor) -> list[float]:
    """How sure each row's choice of `index` `[rows, 1]` is. `preference` is written over.

    Drawn tokens: the distribution's greatest probability, read before any token is known by it. Picked tokens:
    1 where nothing else could have been picked, 0 where the second best was as likely.
    """
    if context.selection == "rejection":
        sure = preference.amax(dim=-1)
    else:
        best = preference.gather(1, index)[:, 0]
        second = preference.scatter_(1, index, -torch.inf).amax(dim=-1)
        sure = -torch.expm1(second - best)
    found: list[float] = sure.tolist()
    return found


def _spread(probs: torch.Tensor, token_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Distributions over some tokens as such over the whole vocabulary, `[rows, vocab]`."""
    if token_ids is None:
        return probs
    return probs.new_zeros(len(probs), vocab_size).scatter_(1, token_ids, probs)
