"""How the target chooses one token, given its processed scores and what the draft proposed there.

A rule sees one position. `walk` goes on while the chosen token is the proposed one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


@dataclass(frozen=True)
class Proposal:
    """The draft's token at one position, and the distribution it is from, `[vocab]` (`None`: all on the token)."""

    token_id: int
    probs: torch.Tensor | None = None


class Draws(Protocol):
    """Whatever draws as `torch.multinomial` would."""

    def multinomial(self, probs: torch.Tensor) -> torch.Tensor:
        """Draw a token id for each row of `probs` `[rows, vocab]`."""

    def end(self) -> None:
        """The text is over: nothing more is drawn for it."""


class Rule(ABC):
    """Chooses the next token of each row."""

    #: What a draft source is told about it.
    name: Literal["greedy", "seeded", "rejection"]

    @abstractmethod
    def choose(self, scores: torch.Tensor, proposals: Sequence[Proposal] | None) -> torch.Tensor:
        """Choose from `scores` `[rows, vocab]` (float32, processed); return token ids `[rows]`.

        `proposals`, one a row, is `None` after the last draft token and in plain rounds.
        """

    def end(self) -> None:  # noqa: B027 - most rules hold nothing
        """The text is over."""


class Greedy(Rule):
    """The likeliest token, as vanilla without `do_sample`. The proposal changes nothing."""

    name = "greedy"

    def choose(self, scores: torch.Tensor, proposals: Sequence[Proposal] | None) -> torch.Tensor:
        """Choose the likeliest."""
        return scores.argmax(dim=-1)


class Seeded(Rule):
    """The token vanilla draws with the generator in this state. The proposal changes nothing (DESIGN §3B)."""

    name = "seeded"

    def __init__(self, noise: Draws) -> None:
        self._noise = noise

    def choose(self, scores: torch.Tensor, proposals: Sequence[Proposal] | None) -> torch.Tensor:
        """Draw as vanilla draws."""
        return self._noise.multinomial(scores.softmax(dim=-1))

    def end(self) -> None:
        """Draw no more."""
        self._noise.end()


class Rejection(Rule):
    """Accept the proposed token with probability min(1, target ÷ draft), else draw a recovered token.

    The recovered token comes from the normalised positive part of target − draft, so that what is
    chosen follows the target's distribution whatever the draft (Leviathan et al. 2022, arXiv 2211.17192).
    """

    name = "rejection"

    def choose(self, scores: torch.Tensor, proposals: Sequence[Proposal] | None) -> torch.Tensor:
        """Accept each row's proposal, or draw a recovered or bonus token."""
        target_probs = scores.softmax(dim=-1)
        if proposals is None:
            return torch.multinomial(target_probs, num_samples=1).squeeze(1)
        return torch.cat([self._judge(probs[None], each) for probs, each in zip(target_probs, proposals, strict=True)])

    def _judge(self, target_probs: torch.Tensor, proposal: Proposal) -> torch.Tensor:
        draft_probs = self._distribution_of(proposal, target_probs)
        coin = torch.rand((), device=target_probs.device, dtype=target_probs.dtype)
        # Strict: a coin of exactly 0 must not accept a token that the target never gives.
        if coin * draft_probs[0, proposal.token_id] < target_probs[0, proposal.token_id]:
            return torch.tensor([proposal.token_id], device=target_probs.device)
        residual = (target_probs - draft_probs).clamp_(min=0)
        # All zero only if both distributions agree to the last bit, where rejection is rounding.
        if not bool(residual.sum() > 0):
            residual = target_probs
        return torch.multinomial(residual, num_samples=1).squeeze(1)

    @staticmethod
    def _distribution_of(proposal: Proposal, like: torch.Tensor) -> torch.Tensor:
        if proposal.probs is not None:
            distribution = proposal.probs.to(like).unsqueeze(0)
            return distribution / distribution.sum()
        one_hot = torch.zeros_like(like)
        one_hot[0, proposal.token_id] = 1
        return one_hot
