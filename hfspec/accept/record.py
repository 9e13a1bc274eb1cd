"""What `return_dict_in_generate` asks for, gathered token by token as vanilla gathers it."""

from typing import Any

import torch
from transformers.generation import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hfspec import compat
from hfspec.rounds import Verified


class Record:
    """Scores, logits, hidden states and attentions of the committed tokens.

    Attributes:
        scores: one processed `[1, vocab]` a token, or `None` if not asked for; stopping criteria see it.
    """

    def __init__(self, generation_config: GenerationConfig) -> None:
        def wanted(flag: bool | None) -> tuple[Any, ...] | None:
            return () if generation_config.return_dict_in_generate and flag else None

        self._returns_dict = bool(generation_config.return_dict_in_generate)
        self.scores = wanted(generation_config.output_scores)
        self._logits = wanted(generation_config.output_logits)
        self._attentions = wanted(generation_config.output_attentions)
        self._hidden_states = wanted(generation_config.output_hidden_states)

    def add_scores(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Take one token's processed scores and raw logits, `[1, vocab]` each."""
        if self.scores is not None:
            self.scores += (scores,)
        if self._logits is not None:
            self._logits += (logits,)

    def add_states(self, verified: Verified, index: int) -> None:
        """Take the states of the `index`-th token of a target forward."""
        if self._attentions is not None:
            self._attentions += (verified.attentions_at(index),)
        if self._hidden_states is not None:
            self._hidden_states += (verified.hidden_states_at(index),)

    def output(self, input_ids: torch.Tensor, cache: Any) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What vanilla's `_sample` would return."""
        if not self._returns_dict:
            return input_ids
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=self.scores,
            logits=self._logits,
            attentions=self._attentions,
            hidden_states=self._hidden_states,
            **{compat.CACHE_KEY: cache},
        )
