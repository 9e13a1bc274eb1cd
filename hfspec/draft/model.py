"""A small model as draft source: plain forwards, its own cache, never `generate()`.

Knows nothing of the target's cache or of how its drafts are judged.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hfspec.cache.ledger import speculative_cache
from hfspec.cache.rows import Rows
from hfspec.draft import inputs
from hfspec.draft.base import BatchSession, Context, DraftSession, DraftSource
from hfspec.draft.choice import RowDraft
from hfspec.errors import DraftError
from hfspec.host import architectures, caches, releases
from hfspec.host.stepping import stepping, stepping_layers
from hfspec.host.verdicts import counts_slots, ragged_problem
from hfspec.rounds import Draft, Outcome, RoundBudget
from hfspec.sampling.processors import DraftProcessors

#: Ids left unread by a fully accepted round: its last draft token and the bonus token.
_USUAL_UNREAD = 2
#: Logits are asked for at every token of a forward up to so many tokens; longer ones are read in two steps.
_MAX_LOGITS = 16


class ModelDraft(DraftSource):
    """Drafts with `model`, token by token; for several rows in shared forwards, where the model allows it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self.limits_logits = "logits_to_keep" in self._accepted
        self.takes_encoder_outputs = "encoder_outputs" in self._accepted
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self.takes_position_ids = "position_ids" in self._accepted
        self.takes_cache_position = "cache_position" in self._accepted
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self.max_positions = architectures.max_positions(model.config)

    @property
    def may_draw(self) -> bool:  # type: ignore[override]  # a fact that changes with the model's mode
        """Only dropout draws, BigBird, which makes itself new layers when a text is short, and some older encoders."""
        makes_layers = getattr(self.model.config, "attention_type", None) == "block_sparse"
        may_skip_layers = self.is_encoder_decoder and not releases.HAS_EVEN_FORWARDS
        return bool(self.model.training or makes_layers or may_skip_layers)

    def start(self, context: Context) -> DraftSession:
        """Begin a row with an empty cache."""
        return _OneRow(_ModelSession(self, [context]))

    def start_batch(self, contexts: Sequence[Context]) -> BatchSession:
        """Begin rows that share forwards, or each with a cache of its own where they cannot."""
        if len(contexts) > 1 and (
            self.sees(contexts[0]) or ragged_problem(self.model, self.empty_cache(contexts[0])) is not None
        ):
            return super().start_batch(contexts)
        return _ModelSession(self, contexts)

    def empty_cache(self, context: Context) -> Any:
        """A cache that rolls back, of the kind that the model needs."""
        if self.takes_encoder_outputs and not self.is_encoder_decoder and context.encoder_outputs is not None:
            return speculative_cache(EncoderDecoderCache(DynamicCache(), DynamicCache()))
        return speculative_cache(caches.empty_cache_for(self.model.config))

    def sees(self, context: Context) -> bool:
        """Whether this model is to be given the images and sounds of the call: it takes all that they come with."""
        names = inputs.media_names(context)
        is_in_the_text = context.encoder_outputs is None and not self.is_encoder_decoder
        return is_in_the_text and bool(names) and names <= self._accepted


class _ModelSession(BatchSession):
    """The draft's cache in one call. A row's position is the number of its ids that are in it."""

    def __init__(self, source: ModelDraft, contexts: Sequence[Context]) -> None:
        if source.model.training and releases.CHECKPOINTING_DROPS_CACHE and _checkpoints(source.model):
            raise DraftError("a draft in training mode with gradient checkpointing keeps no cache: draft.eval()")
        self._source = source
        self._contexts = list(contexts)
        device = architectures.input_device(source.model)
        # Weights that are brought in for each forward, from disk or memory, have no device of their own.
        self._device = contexts[0].device if device.type == "meta" else device
        self._processors = [DraftProcessors(context.processors) for context in contexts]
        self._cache = source.empty_cache(contexts[0])
        is_counting = counts_slots(source.model, self._cache) if len(contexts) > 1 else False
        self._rows = Rows(self._cache, [0] * len(contexts), self._device, counts_slots=is_counting)
        self._num_ids = [0] * len(contexts)
        self._stepping_layers = stepping_layers(source.model)
        self._constant_inputs: dict[str, Any] = {
            "use_cache": True,
            "return_dict": True,
            releases.CACHE_KEY: self._cache,
        }
        if source.takes_encoder_outputs:
            self._constant_inputs |= inputs.of_encoder(source.model, contexts[0], self._device)
        self._sees = source.sees(contexts[0])
        masks = [inputs.given_mask(each) if self._sees else each.prompt_mask for each in contexts]
        self._visible = [inputs.Visible(mask) for mask in masks]

    def propose(self, texts: Sequence[torch.Tensor], budget: RoundBudget) -> list[Draft]:
        prefixes = [visible.of(text) for visible, text in zip(self._visible, texts, strict=True)]
        self._num_ids = [prefix.shape[1] for prefix in prefixes]
        unread = [prefix[:, read:] for prefix, read in zip(prefixes, self._rows.positions, strict=True)]
        caught_up = max(0, max(each.shape[1] for each in unread) - _USUAL_UNREAD)
        num_tokens = self._within_context(budget.num_tokens)
        self._check_ids(unread)

        drafts = [RowDraft(*each) for each in zip(self._contexts, self._processors, strict=True)]
        while drafts[0].num_tokens < num_tokens:
            logits = self._read(unread)
            if not drafts[0].num_tokens:
                self._rows.checkpoint()  # so far all is committed text
            unread = [
                draft.choose(prefixes[row], logits[row : row + 1], budget.reads_confidence)
                for row, draft in enumerate(drafts)
            ]
            if budget.reads_confidence and not budget.allows_another(*(draft.confidences[-1] for draft in drafts)):
                break
            prefixes = [torch.cat([prefix, new], dim=-1) for prefix, new in zip(prefixes, unread, strict=True)]
        return [draft.finished(caught_up) for draft in drafts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        # What was accepted stays read; the token chosen after it is the next to read.
        accepted = [number + outcome.num_accepted for number, outcome in zip(self._num_ids, outcomes, strict=True)]
        self._rows.forget([max(0, read - each) for read, each in zip(self._rows.positions, accepted, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        self._contexts = [self._contexts[row] for row in rows]
        self._processors = [self._processors[row] for row in rows]
        self._visible = [self._visible[row] for row in rows]
        self._num_ids = [self._num_ids[row] for row in rows]
        self._rows.select(rows)

    def stop(self) -> None:
        """Nothing to release but what goes with the session."""

    def _read(self, unread: Sequence[torch.Tensor], wants_logits: bool = True) -> torch.Tensor:
        """Read some ids of each row, `[1, n]`; return the logits after each row's last, `[rows, vocab]` float32.

        Ids and logits are where the target's are; only the forward runs on the draft's device.
        """
        lengths = [each.shape[1] for each in unread]
        width = max(lengths)
        is_first = self._rows.num_slots == 0
        # A prompt stands at the right end; what follows it, at the left, so that no gap parts it from the prompt.
        ends_together = is_first or min(lengths) == width
        if wants_logits and width > _MAX_LOGITS and not ends_together:
            # The logits of so many tokens would take much memory: leave each row's last for a forward of its own.
            if min(lengths) == 1:
                raise DraftError("rows that have fallen far apart cannot be read together")
            self._read([each[:, :-1] for each in unread], wants_logits=False)
            return self._read([each[:, -1:] for each in unread])
        filled = [_filled(each, width, at_the_end=is_first) for each in unread]
        mask, position_ids = self._rows.open(lengths, to_the_right=is_first)
        kwargs = dict(self._constant_inputs)
        ids_key = "decoder_input_ids" if self._source.is_encoder_decoder else "input_ids"
        kwargs[ids_key] = torch.cat(filled).to(self._device)
        if mask is not None:
            kwargs["attention_mask"] = mask
        if self._sees:  # what comes behind an image has positions that only the model knows
            kwargs |= inputs.media(self._contexts[0], width, self._device) if is_first else {}
            if self._source.takes_cache_position:
                kwargs["cache_position"] = position_ids[0]
        elif self._source.takes_position_ids:
            kwargs["position_ids"] = position_ids
        if self._source.limits_logits:
            kwargs["logits_to_keep"] = 1 if ends_together or not wants_logits else width
        with stepping([] if is_first else self._stepping_layers):
            all_logits: torch.Tensor = self._source.model(**kwargs).logits
        if not ends_together:
            self._rows.close(lengths, lengths)
        if ends_together or not wants_logits:
            return self._fitted(all_logits[:, -1])
        last = [row[length - 1] for row, length in zip(all_logits[:, -width:], lengths, strict=True)]
        return self._fitted(torch.stack(last))

    def _fitted(self, logits: torch.Tensor) -> torch.Tensor:
        """As wide as the target's, in float32, where the target's are."""
        vocab_size = self._contexts[0].vocab_size
        missing = vocab_size - logits.shape[-1]
        logits = logits[:, :vocab_size].to(device=self._contexts[0].device, dtype=torch.float32)
        return functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits

    def _within_context(self, num_tokens: int) -> int:
        """The most tokens that the draft model has positions for; the last one drafted is never read."""
        limit = self._source.max_positions
        if limit is None:
            return num_tokens
        room = limit - max(self._num_ids) + 1
        if room < 1:
            raise DraftError(f"the draft model's context of {limit} tokens is full")
        return min(num_tokens, room)

    def _check_ids(self, unread: Sequence[torch.Tensor]) -> None:
        vocab_size = self._source.vocab_size
        if vocab_size < self._contexts[0].vocab_size and any(int(each.max()) >= vocab_size for each in unread):
            raise DraftError(
                f"the text holds a token id that the draft model (vocabulary of {vocab_size}) does not have"
            )


class _OneRow(DraftSession):
    """A batch of one as a row's session."""

    def __init__(self, batch: BatchSession) -> None:
        self._batch = batch

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        return self._batch.propose([input_ids], budget)[0]

    def observe(self, outcome: Outcome) -> None:
        self._batch.observe([outcome])

    def stop(self) -> None:
        self._batch.stop()


def _checkpoints(model: PreTrainedModel) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _filled(token_ids: torch.Tensor, width: int, at_the_end: bool) -> torch.Tensor:
    """Ids `[1, n]` made as wide as the longest row's, with ids that a mask hides before or behind them."""
    missing = width - token_ids.shape[1]
    return functional.pad(token_ids, (missing, 0) if at_the_end else (0, missing))
