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
from hfspec.draft.base import CallView, Context, DraftSession, DraftSource, Session
from hfspec.draft.choice import DraftChoice
from hfspec.draft.one_row import OneRow
from hfspec.drafts import Draft
from hfspec.errors import DraftError
from hfspec.host import architectures, caches, releases
from hfspec.host.stepping import stepping, stepping_layers
from hfspec.host.verdicts import counts_slots, ragged_problem
from hfspec.rounds import Outcomes, RoundBudget
from hfspec.sampling.processors import DraftProcessors
from hfspec.texts import Texts

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
        self.takes_token_types = "token_type_ids" in self._accepted
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
        """Begin a row by itself, with an empty cache, outside a batch."""
        return OneRow(self.start_batch, context)

    def start_batch(self, call: CallView) -> Session:
        """Begin rows that share forwards, or each with a cache of its own where they cannot."""
        if len(call.contexts) > 1 and (
            any(map(self.sees, call.contexts))
            or ragged_problem(self.model, self.empty_cache(call.contexts[0])) is not None
        ):
            return super().start_batch(call)
        return ModelSession(self, call)

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


class ModelSession(Session):
    """The draft's cache in one call. A row's position is the number of its ids that are in it."""

    def __init__(self, source: ModelDraft, call: CallView) -> None:
        if source.model.training and releases.CHECKPOINTING_DROPS_CACHE and _checkpoints(source.model):
            raise DraftError("a draft in training mode with gradient checkpointing keeps no cache: draft.eval()")
        contexts = list(call.contexts)
        self._source = source
        self._contexts = contexts
        self._noise = call.noise
        device = architectures.input_device(source.model)
        # Weights that are brought in for each forward, from disk or memory, have no device of their own.
        self._device = contexts[0].device if device.type == "meta" else device
        self._processors = [DraftProcessors(context.processors) for context in contexts]
        self._cache = source.empty_cache(contexts[0])
        is_counting = counts_slots(source.model, self._cache) if len(contexts) > 1 else False
        self._stepping_layers = stepping_layers(source.model)
        self._constant_inputs: dict[str, Any] = {
            "use_cache": True,
            "return_dict": True,
            releases.CACHE_KEY: self._cache,
        }
        if source.takes_encoder_outputs:
            self._constant_inputs |= inputs.of_encoder(source.model, contexts[0], self._device)
        sees = source.sees(contexts[0])
        self._media = inputs.Media(source.model, contexts[0], self._device) if sees else None
        self._takes_types = source.takes_token_types and all(each.token_types is not None for each in contexts)
        masks = [inputs.given_mask(each) if sees else each.prompt_mask for each in contexts]
        self._visible = [inputs.Visible(mask) for mask in masks]
        hidden, start = [each.num_hidden for each in self._visible], [0] * len(contexts)
        self._rows = Rows(self._cache, start, self._device, counts_slots=is_counting, num_hidden=hidden)
        self._num_drafted = 0
        self._num_committed = [0] * len(contexts)

    def propose(self, texts: Texts, budget: RoundBudget) -> Draft:
        """Draft for every row."""
        num_ids = [length - visible.num_hidden for length, visible in zip(texts.lengths, self._visible, strict=True)]
        lengths = self._within_context(num_ids, budget.num_tokens, texts.has_ended)
        num_unread = [ids - read for ids, read in zip(num_ids, self._rows.positions, strict=True)]
        self.caught_up = max(0, max(num_unread) - _USUAL_UNREAD)
        self._check_ids(texts, num_unread)
        self._num_committed, self._num_drafted = num_ids, 0

        choice = DraftChoice(self._contexts, self._processors, self._noise)
        logits = self._read_texts(texts, num_unread)
        self._rows.checkpoint()  # so far all is committed text
        while True:
            drafted = choice.token_ids if choice.num_tokens else None
            tokens = choice.choose(logits, budget.reads_confidence, lambda row: self._prefix(texts, row, drafted))  # noqa: B023
            if budget.reads_confidence and not budget.allows_another(*choice.confidences[-1]):
                break
            if choice.num_tokens >= max(lengths):
                break
            logits = self._read(tokens, [1] * len(lengths))
        self._num_drafted = choice.num_tokens
        return choice.finished(lengths)

    def read(self, texts: Texts, outcomes: Outcomes) -> None:
        """Learn what was committed."""
        # What was accepted stays read; the token chosen after it is the next to read.
        kept = [ids + new - 1 for ids, new in zip(self._num_committed, outcomes.num_committed, strict=True)]
        excess = [max(0, read - each) for read, each in zip(self._rows.positions, kept, strict=True)]
        on_device = None
        if len(set(excess)) > 1:
            on_device = (self._num_drafted - outcomes.num_committed_on(self._device)).clamp_(min=0)
        self._rows.forget(excess, on_device)
        self._num_drafted = 0

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self._contexts = [self._contexts[row] for row in rows]
        self._processors = [self._processors[row] for row in rows]
        self._visible = [self._visible[row] for row in rows]
        self._num_committed = [self._num_committed[row] for row in rows]
        self._rows.select(rows)

    def stop(self) -> None:
        """Nothing to release but what goes with the session."""

    def _prefix(self, texts: Texts, row: int, drafted: torch.Tensor | None) -> torch.Tensor:
        """A row's ids that are visible, and the tokens drafted so far, `[1, length]`."""
        text = self._visible[row].of(texts.of(row))
        return text if drafted is None else torch.cat([text, drafted[row : row + 1]], dim=-1)

    def _read_texts(self, texts: Texts, num_unread: Sequence[int]) -> torch.Tensor:
        """Read what is unread of each row's text; return the logits after its last id, `[rows, vocab]` float32."""
        if self._rows.num_slots and max(num_unread) <= texts.num_committed:
            counts = None
            if min(num_unread) < max(num_unread):
                counts = self._rows.missing(texts.ends(self._device))
            return self._read(texts.last(num_unread, counts), num_unread, counts)
        width, is_first = max(num_unread), self._rows.num_slots == 0
        unread = [
            visible.of(texts.of(row))[:, -count:]
            for row, (visible, count) in enumerate(zip(self._visible, num_unread, strict=True))
        ]
        if not is_first and width > _MAX_LOGITS and min(num_unread) < width:
            # The logits of so many tokens would take much memory: leave each row's last for a forward of its own.
            if min(num_unread) == 1:
                raise DraftError("rows that have fallen far apart cannot be read together")
            before = [each[:, :-1] for each in unread]
            self._read(_filled(before, width - 1, False), [each - 1 for each in num_unread], wants_logits=False)
            return self._read(torch.cat([each[:, -1:] for each in unread]), [1] * len(unread))
        if is_first and self._media is not None and self._media.grows:
            num_prompt = self._contexts[0].prompt_length - self._visible[0].num_hidden
            self._read(unread[0][:, :num_prompt], [num_prompt], wants_logits=False)
            return self._read(unread[0][:, num_prompt:], [width - num_prompt])
        most = self._contexts[0].max_read
        if most is not None and min(num_unread) == width and self._media is None:
            while width > most:
                self._read(_filled([each[:, :most] for each in unread], most, True), [most] * len(unread))
                unread, width = [each[:, most:] for each in unread], width - most
            num_unread = [width] * len(unread)
        # A prompt stands at the right end; what follows it, at the left, so that no gap parts it from the prompt.
        return self._read(_filled(unread, width, is_first), num_unread)

    def _read(
        self,
        token_ids: torch.Tensor,
        lengths: Sequence[int],
        counts: torch.Tensor | None = None,
        wants_logits: bool = True,
    ) -> torch.Tensor:
        """Read the first `lengths[i]` of each row's ids `[rows, width]` (of a first forward, the last).

        Ids and logits are where the target's are; only the forward runs on the draft's device.
        """
        width, is_first = max(lengths), self._rows.num_slots == 0
        ends_together = is_first or min(lengths) == width
        mask, position_ids = self._rows.open(lengths, to_the_right=is_first, counts=counts)
        kwargs = dict(self._constant_inputs)
        kwargs["decoder_input_ids" if self._source.is_encoder_decoder else "input_ids"] = token_ids.to(self._device)
        if mask is not None:
            kwargs["attention_mask"] = mask
        if self._media is not None:  # what comes behind an image has positions that only the model knows
            num_before = self._rows.num_slots - width
            media = self._media.first(width) if is_first else self._media.behind(num_before, width)
            kwargs |= media
            if self._source.takes_cache_position:
                kwargs["cache_position"] = position_ids[0]
        elif self._source.takes_position_ids:
            limit = self._source.max_positions
            is_beyond = limit is not None and max(self._rows.positions) > limit  # of a row that gets no draft any more
            kwargs["position_ids"] = position_ids.clamp(max=limit - 1) if limit and is_beyond else position_ids
        if self._takes_types:
            kwargs["token_type_ids"] = self._token_types(width, lengths if is_first else [0] * len(lengths))
        if self._source.limits_logits:
            kwargs["logits_to_keep"] = 1 if ends_together or not wants_logits else width
        with stepping([] if is_first else self._stepping_layers):
            outputs = self._source.model(**kwargs)
        if self._media is not None and is_first:
            self._media.were_read(media, outputs, width)
        logits: torch.Tensor = outputs.logits
        if not ends_together:
            last = torch.tensor(lengths, device=self._device) if counts is None else counts.to(self._device)
            self._rows.close(lengths, lengths, last, last)
            if wants_logits:
                at = (last - 1)[:, None, None].expand(-1, 1, logits.shape[2])
                return self._fitted(logits[:, -width:].gather(1, at)[:, 0])
        return self._fitted(logits[:, -1])

    def _token_types(self, width: int, num_first: Sequence[int]) -> torch.Tensor:
        """Of each row's next `width` ids, `[rows, width]`."""
        types = [
            inputs.token_types(context.token_types, visible, width, number)
            for context, visible, number in zip(self._contexts, self._visible, num_first, strict=True)
            if context.token_types is not None
        ]
        return torch.cat(types).to(self._device)

    def _fitted(self, logits: torch.Tensor) -> torch.Tensor:
        """As wide as the target's, in float32, where the target's are."""
        vocab_size = self._contexts[0].vocab_size
        missing = vocab_size - logits.shape[-1]
        logits = logits[:, :vocab_size].to(device=self._contexts[0].device, dtype=torch.float32)
        return functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits

    def _within_context(self, num_ids: Sequence[int], num_tokens: int, has_ended: Sequence[bool]) -> list[int]:
        """The most tokens of each row that the draft model has positions for; the last one drafted is never read.

        A row that has ended gets none.
        """
        limit = self._source.max_positions
        room = [num_tokens if limit is None else min(num_tokens, limit + 1 - number) for number in num_ids]
        if max(room) < 1:
            raise DraftError(f"the draft model's context of {limit} tokens is full")
        return [0 if ended else max(0, each) for each, ended in zip(room, has_ended, strict=True)]

    def _check_ids(self, texts: Texts, num_unread: Sequence[int]) -> None:
        vocab_size = self._source.vocab_size
        if vocab_size < self._contexts[0].vocab_size:
            visible = enumerate(zip(self._visible, num_unread, strict=True))
            news = [each.of(texts.of(row))[0, -count:] for row, (each, count) in visible]
            if bool((torch.cat(news) >= vocab_size).any()):
                raise DraftError(
                    f"the text holds a token id that the draft model (vocabulary of {vocab_size}) does not have"
                )


def _checkpoints(model: PreTrainedModel) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _filled(token_ids: Sequence[torch.Tensor], width: int, at_the_end: bool) -> torch.Tensor:
    """Rows of ids `[1, n]` made as wide as the widest, with ids that a mask hides before or behind them."""
    if len(token_ids) == 1:
        return token_ids[0]
    missing = [width - each.shape[1] for each in token_ids]
    return torch.cat(
        [
            functional.pad(each, (gap, 0) if at_the_end else (0, gap))
            for each, gap in zip(token_ids, missing, strict=True)
        ]
    )
