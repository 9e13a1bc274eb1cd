"""A small causal model as draft source: plain forwards, its own `SpeculativeCache`, never `generate()`.

Knows nothing of the target's cache or of how its drafts are judged.
"""

import inspect
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from hfspec import compat
from hfspec.cache.ledger import SpeculativeCache
from hfspec.draft.base import Context, DraftSession, DraftSource
from hfspec.errors import DraftError
from hfspec.rounds import Draft, Outcome, RoundBudget
from hfspec.sampling.processors import DraftProcessors

#: Ids left unread by a fully accepted round: its last draft token and the bonus token.
_USUAL_UNREAD = 2


class ModelDraft(DraftSource):
    """Drafts with `model`, token by token."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
        self.forward_kwargs: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if "logits_to_keep" in accepted:
            self.forward_kwargs["logits_to_keep"] = 1
        self.takes_position_ids = "position_ids" in accepted or takes_any
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)

    @property
    def may_draw(self) -> bool:  # type: ignore[override]  # a fact that changes with the model's mode
        """Only dropout draws."""
        return bool(self.model.training)

    def start(self, context: Context) -> DraftSession:
        """Begin a call with an empty cache."""
        return _ModelSession(self, context)


class _ModelSession(DraftSession):
    """One call's draft cache. `num_read` ids of the text are in it."""

    def __init__(self, source: ModelDraft, context: Context) -> None:
        self._source = source
        self._context = context
        self._device = source.model.get_input_embeddings().weight.device
        self._processors = DraftProcessors(context.processors)
        self._cache = SpeculativeCache()
        self._num_read = 0
        self._num_ids = 0

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        prefix = self._without_padding(input_ids)
        self._num_ids = prefix.shape[1]
        unread = prefix[:, self._num_read :]
        caught_up = max(0, unread.shape[1] - _USUAL_UNREAD)
        num_tokens = self._within_context(budget.num_tokens)
        self._check_ids(unread)

        tokens: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        confidences: list[float] = []
        while len(tokens) < num_tokens:
            scores, token_ids = self._processors(prefix, self._forward(unread))
            if self._context.selection == "rejection":
                preference = scores.softmax(dim=-1)
                index = torch.multinomial(preference, num_samples=1)
                laws.append(self._spread(preference, token_ids))
            else:
                preference = self._preference(scores, token_ids, position=len(tokens))
                index = preference.max(dim=-1, keepdim=True).indices
            token = index if token_ids is None else token_ids.gather(1, index)
            tokens.append(token)
            if budget.reads_confidence:
                confidences.append(self._confidence(preference, index))
                if not budget.allows_another(confidences[-1]):
                    break
            unread = token
            prefix = torch.cat([prefix, token], dim=-1)
        return Draft(
            token_ids=torch.cat(tokens, dim=-1),
            probs=torch.cat(laws) if laws else None,
            confidences=tuple(confidences),
            caught_up=caught_up,
        )

    def observe(self, outcome: Outcome) -> None:
        # What was accepted stays read; the token chosen after it is the next to read.
        self._num_read = min(self._num_read, self._num_ids + outcome.num_accepted)
        self._cache.rollback(self._num_read)

    def _forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Read `token_ids` `[1, n]`; return the logits after the last of them, `[1, vocab]` float32.

        Ids and logits are where the target's are; only the forward runs on the draft's device.
        """
        kwargs = dict(self._source.forward_kwargs)
        kwargs[compat.CACHE_KEY] = self._cache
        end = self._num_read + token_ids.shape[1]
        if self._source.takes_position_ids:
            kwargs["position_ids"] = torch.arange(self._num_read, end, device=self._device).unsqueeze(0)
        logits: torch.Tensor = self._source.model(input_ids=token_ids.to(self._device), **kwargs).logits[:, -1]
        self._num_read = end
        missing = self._context.vocab_size - logits.shape[-1]
        logits = logits[:, : self._context.vocab_size].to(device=self._context.device, dtype=torch.float32)
        return functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits

    def _preference(self, scores: torch.Tensor, token_ids: torch.Tensor | None, position: int) -> torch.Tensor:
        """What the target is likely to choose by, were its scores the draft's: `[1, n]`, its noise included."""
        if self._context.selection == "greedy":
            return scores
        like = torch.empty(1, self._context.vocab_size, device=self._context.device)
        noise = self._context.noise.peek(like, position)
        return scores - (noise if token_ids is None else noise.gather(1, token_ids)).log()

    def _confidence(self, preference: torch.Tensor, index: torch.Tensor) -> float:
        """How sure the choice of `index` `[1, 1]` is. `preference` is written over.

        Drawn tokens: the law's greatest probability, read before any token is known by it. Picked tokens:
        1 where nothing else could have been picked, 0 where the second best was as likely.
        """
        if self._context.selection == "rejection":
            return float(preference.amax())
        best = preference.gather(1, index)
        second = preference.scatter_(1, index, -torch.inf).amax()
        return float(-torch.expm1(second - best))

    def _spread(self, probs: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """A law over some tokens as one over the whole vocabulary, `[1, vocab]`."""
        if token_ids is None:
            return probs
        return probs.new_zeros(1, self._context.vocab_size).scatter_(1, token_ids, probs)

    def _without_padding(self, input_ids: torch.Tensor) -> torch.Tensor:
        mask = self._context.prompt_mask
        if mask is None:
            return input_ids
        num_prompt = mask.shape[1]
        return torch.cat([input_ids[:, :num_prompt][mask.bool()].unsqueeze(0), input_ids[:, num_prompt:]], dim=-1)

    def _within_context(self, num_tokens: int) -> int:
        """The most tokens that the draft model has positions for; the last one drafted is never read."""
        limit = self._source.max_positions
        if limit is None:
            return num_tokens
        room = limit - self._num_ids + 1
        if room < 1:
            raise DraftError(f"the draft model's context of {limit} tokens is full")
        return min(num_tokens, room)

    def _check_ids(self, token_ids: torch.Tensor) -> None:
        vocab_size = self._source.vocab_size
        if vocab_size < self._context.vocab_size and int(token_ids.max()) >= vocab_size:
            raise DraftError(
                f"the text holds a token id that the draft model (vocabulary of {vocab_size}) does not have"
            )
