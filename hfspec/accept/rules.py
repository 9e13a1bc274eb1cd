"""How the target chooses tokens, given its processed scores and what the draft proposed.

A rule has two ways that agree: `choose` sees one position, for the walk; `choose_all` sees every state of a round at
once and waits for nothing. Both go on where the chosen token is a proposed one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hfspec.drafts import Draft


@dataclass(frozen=True)
class Proposal:
    """What a draft proposes at one position of one row: tokens, children of one node.

    Attributes:
        token_ids: in the order they were drawn.
        probs: `[children, vocab]`, the distribution each is from; `None`: all weight on the token.
    """

    token_ids: Sequence[int]
    probs: torch.Tensor | None = None


class Draws(Protocol):
    """Whatever draws as `torch.multinomial` would."""

    def multinomial(self, probs: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Draw a token id for each of these rows of the batch; `probs` `[rows, vocab]`."""

    def ahead(self, rows: Sequence[int], count: int, like: torch.Tensor) -> torch.Tensor:
        """The noise of the next `count` draws of these rows, `[rows, count, vocab]`."""

    def advance(self, rows: Sequence[int], counts: Sequence[int]) -> bool:
        """Say that these rows have made so many draws of those seen ahead; whether they are still the ones to come."""

    def end(self, row: int) -> None:
        """A row draws no more."""


class Rule(ABC):
    """Chooses the next token of each row."""

    #: What a draft source is told about it.
    name: Literal["greedy", "seeded", "rejection"]
    #: Whether what is proposed changes what it chooses; where not, `choose` need not be told.
    heeds_proposals = True

    @abstractmethod
    def choose(self, scores: torch.Tensor, proposals: Sequence[Proposal] | None, rows: Sequence[int]) -> torch.Tensor:
        """Choose from `scores` `[rows, vocab]` (float32, processed); return token ids `[rows]`.

        Args:
            proposals: one a row; `None` after the last draft token and in plain rounds.
            rows: which rows of the batch these are.
        """

    @abstractmethod
    def choose_all(
        self, scores: torch.Tensor, draft: Draft, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose in every state from `scores` `[rows, states, vocab]` (float32, processed).

        Args:
            rows: which rows of the batch these are.

        Returns:
            The choices `[rows, states]`, and whether vanilla would raise an error there, `[rows, states]` bool
            (`None`: nowhere).
        """

    def commit(self, rows: Sequence[int], counts: Sequence[int]) -> bool:
        """Say how many of `choose_all`'s choices are committed.

        Returns:
            Whether they still are the choices. Not if another thread has drawn what they were drawn with.
        """
        return True

    def end(self, row: int) -> None:  # noqa: B027 - most rules hold nothing
        """The text of a row is over."""


class Greedy(Rule):
    """The likeliest token, as vanilla without `do_sample`. The proposal changes nothing."""

    name = "greedy"
    heeds_proposals = False

    def choose(self, scores: torch.Tensor, proposals: Sequence[Proposal] | None, rows: Sequence[int]) -> torch.Tensor:
        """Choose the likeliest."""
        return scores.argmax(dim=-1)

    def choose_all(
        self, scores: torch.Tensor, draft: Draft, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose the likeliest everywhere."""
        return scores.argmax(dim=-1), None


class Seeded(Rule):
    """The token vanilla draws with the generator in this state. The proposal changes nothing.

    `torch.multinomial` picks `argmax(probs / noise)`; the noise of a row's `i`-th token is the generator's `i`-th draw.
    """

    name = "seeded"
    heeds_proposals = False

    def __init__(self, noise: Draws) -> None:
        self._noise = noise

    def choose(self, scores: torch.Tensor, proposals: Sequence[Proposal] | None, rows: Sequence[int]) -> torch.Tensor:
        """Draw as vanilla draws."""
        return self._noise.multinomial(scores.softmax(dim=-1), rows)

    def choose_all(
        self, scores: torch.Tensor, draft: Draft, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw in every state as vanilla would, were the text to come there."""
        probs = scores.softmax(dim=-1)
        # The sum is finite unless a probability is nan or inf.
        is_bad = ~probs.sum(dim=-1).isfinite()
        # Number of draws: one for each depth, the root's included.
        noise = self._noise.ahead(rows, draft.depth + 1, scores[:, 0])
        if draft.tree is not None:
            noise = noise.gather(1, draft.tree.depths[:, :, None].expand(-1, -1, noise.shape[2]))
        return (probs / noise).argmax(dim=-1), is_bad

    def commit(self, rows: Sequence[int], counts: Sequence[int]) -> bool:
        """Make the draws."""
        return self._noise.advance(rows, counts)

    def end(self, row: int) -> None:
        """Draw no more."""
        self._noise.end(row)


class Rejection(Rule):
    """Accept a proposed token with probability min(1, target ÷ draft), else draw a recovered token.

    The recovered token comes from the normalised positive part of target − draft, so that what is
    chosen follows the target's distribution whatever the draft (Leviathan et al. 2022, arXiv 2211.17192). Of several
    children each is judged by what those before it have left (recursive rejection without replacement: Miao et al.
    2023, arXiv 2305.09781).
    """

    name = "rejection"

    def choose(self, scores: torch.Tensor, proposals: Sequence[Proposal] | None, rows: Sequence[int]) -> torch.Tensor:
        """Accept one of each row's proposals, or draw a recovered or bonus token."""
        target_probs = scores.softmax(dim=-1)
        if proposals is None:
            return torch.multinomial(target_probs, num_samples=1).squeeze(1)
        return torch.cat([self._judge(probs[None], each) for probs, each in zip(target_probs, proposals, strict=True)])

    def choose_all(
        self, scores: torch.Tensor, draft: Draft, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Judge node by node along the way; what is chosen off the path means nothing."""
        target_probs = scores.softmax(dim=-1)
        num_rows, num_states, _ = scores.shape
        num_nodes, device = num_states - 1, scores.device
        is_bad = ~target_probs.sum(dim=-1).isfinite()
        chosen = torch.full((num_rows, num_states), -1, device=device)
        here = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        left = target_probs[:, 0]  # the target's distribution where the row stands, less what was rejected
        coins = torch.rand(num_rows, num_nodes, device=device, dtype=scores.dtype)
        for node in range(num_nodes):
            token = draft.token_ids[:, node : node + 1]
            follows = torch.full_like(here, node) if draft.tree is None else draft.tree.parents[:, node + 1, None]
            is_asked = (follows == here) & (token >= 0)
            drawn_from = _distribution(draft.probs, node, token, like=left)
            # Strict: a coin of exactly 0 must not accept a token that the target never gives.
            accepts = is_asked & (coins[:, node, None] * _at(drawn_from, token) < _at(left, token))
            chosen = chosen.scatter(1, here, torch.where(accepts, token, chosen.gather(1, here)))
            rest = _remaining(left, drawn_from)
            left = torch.where(accepts, target_probs[:, node + 1], torch.where(is_asked, rest, left))
            here = torch.where(accepts, node + 1, here)
        # Where nothing can be drawn, the error is the walk's to raise.
        safe = torch.where(left.sum(dim=-1, keepdim=True).isfinite() & (left.sum(dim=-1, keepdim=True) > 0), left, 1.0)
        return chosen.scatter(1, here, torch.multinomial(safe, num_samples=1)), is_bad

    @staticmethod
    def _judge(target_probs: torch.Tensor, proposal: Proposal) -> torch.Tensor:
        left = target_probs
        for child, token_id in enumerate(proposal.token_ids):
            token = torch.tensor([[token_id]], device=left.device)
            probs = None if proposal.probs is None else proposal.probs[None]
            drawn_from = _distribution(probs, child, token, like=left)
            coin = torch.rand((), device=left.device, dtype=left.dtype)
            if coin * drawn_from[0, token_id] < left[0, token_id]:
                return token[0]
            left = _remaining(left, drawn_from)
        return torch.multinomial(left, num_samples=1).squeeze(1)


def _distribution(probs: torch.Tensor | None, node: int, token: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What a node's `token` `[rows, 1]` was drawn from, `[rows, vocab]`."""
    if probs is not None:
        distribution = probs[:, node].to(like)
        return distribution / distribution.sum(dim=-1, keepdim=True)
    return torch.zeros_like(like).scatter_(1, token.clamp(min=0), 1.0)


def _remaining(left: torch.Tensor, drawn_from: torch.Tensor) -> torch.Tensor:
    """The target's distribution after a rejection, `[rows, vocab]`."""
    residual = (left - drawn_from).clamp_(min=0)
    total = residual.sum(dim=-1, keepdim=True)
    # All zero only if both distributions agree to the last bit, where rejection is rounding.
    return torch.where(total > 0, residual / total, left)


def _at(probs: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return probs.gather(1, token.clamp(min=0))
