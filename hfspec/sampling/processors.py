"""Which of Hugging Face's logits processors a draft source may apply too, and how cheaply.

A processor that keeps state, calls user code or runs a model must see exactly vanilla's calls, so the
draft goes without it: that costs acceptance, never correctness. Exact types only, as a subclass may keep state.
"""

import copy
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

#: They look at scores only, not at which token a score belongs to.
_TOKEN_BLIND = (
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
#: Of these, the ones that sort the whole vocabulary.
_SORTING = ("TopHLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper")
#: They look at tokens and at the prefix, and keep nothing between calls.
_TOKEN_AWARE = (
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
)
#: The same, for speech: rows behind an encoder keep in step anyway.
_SPEECH = ("WhisperTimeStampLogitsProcessor",)
#: Where one of them may hold a number for each row (how much padding the repetition penalty is to leave out).
_HELD_BY_ROW = "prompt_ignore_length"


def _types(names: tuple[str, ...]) -> frozenset[type]:
    return frozenset(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


_BLIND_TYPES, _AWARE_TYPES = _types(_TOKEN_BLIND), _types(_TOKEN_AWARE)
_SPEECH_TYPES, _SORTING_TYPES = _types(_SPEECH), _types(_SORTING)


def stateless(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of a call's processors that may be called any number of times, on any prefix."""
    return LogitsProcessorList(
        [each for each in processors if type(each) in _BLIND_TYPES | _AWARE_TYPES | _SPEECH_TYPES]
    )


def is_token_blind(processor: Any) -> bool:
    """Whether it looks at scores only, so that it may be called for any number of positions at once."""
    return type(processor) in _BLIND_TYPES


def sorts(processor: Any) -> bool:
    """Whether it sorts all scores, which takes a CPU long."""
    return type(processor) in _SORTING_TYPES


def are_row_independent(processors: LogitsProcessorList) -> bool:
    """Whether all of them may be called for one row by itself, at that row's own length."""
    return all(type(each) in _BLIND_TYPES | _AWARE_TYPES for each in processors)


def for_row(processors: LogitsProcessorList, row: int, num_rows: int) -> LogitsProcessorList:
    """The same processors for one row by itself: what they hold of every row is cut down to that row's.

    Only what `are_row_independent` knows is changed; the others are handed on as they are.
    """
    return LogitsProcessorList([_of_row(each, row, num_rows) for each in processors])


def by_row(processors: LogitsProcessorList, num_rows: int) -> list[LogitsProcessorList]:
    """The same for each of the rows."""
    return [for_row(processors, row, num_rows) for row in range(num_rows)]


def _of_row(processor: Any, row: int, num_rows: int) -> Any:
    held = getattr(processor, _HELD_BY_ROW, None)
    if type(processor) not in _AWARE_TYPES or not isinstance(held, torch.Tensor) or held.shape[0] != num_rows:
        return processor
    mine = copy.copy(processor)
    setattr(mine, _HELD_BY_ROW, held[row : row + 1])
    return mine


class DraftProcessors:
    """A call's stateless processors, applied to a draft's logits.

    From the first top-k on, where only token-blind ones follow, they work on the k best scores alone:
    the same distribution, without sorting the whole vocabulary.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        kept = list(stateless(processors))
        cut = next((i for i, each in enumerate(kept) if type(each) is logits_process.TopKLogitsWarper), len(kept))
        if not all(type(each) in _BLIND_TYPES for each in kept[cut:]):
            cut = len(kept)
        self._full = LogitsProcessorList(kept[:cut])
        self._short = LogitsProcessorList(kept[cut + 1 :])
        #: Whether none of them looks at the text.
        self.is_blind = all(map(is_token_blind, kept))
        self._top_k: int | None = kept[cut].top_k if cut < len(kept) else None

    def __call__(self, prefix: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Process one position.

        Args:
            prefix: `[batch, length]` token ids.
            logits: `[batch, vocab]`, float32; may be written over.

        Returns:
            Scores `[batch, n]` and the token ids `[batch, n]` they belong to, or `None` for ids 0 … n - 1.
        """
        scores = self._full(prefix, logits)
        if self._top_k is None:
            return scores, None
        scores, token_ids = scores.topk(min(self._top_k, scores.shape[-1]), dim=-1)
        return self._short(prefix, scores), token_ids
