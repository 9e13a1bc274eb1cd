"""What `return_dict_in_generate` asks for, gathered token by token as vanilla gathers it."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.utils import ModelOutput

from hfspec.host import releases
from hfspec.rounds import Verified

#: What a decoder-only model and the decoder of an encoder-decoder model call their states.
_STATES = {"attentions": "attentions", "hidden_states": "hidden_states"}
_DECODER_STATES = {
    "decoder_attentions": "attentions",
    "cross_attentions": "attentions",
    "decoder_hidden_states": "hidden_states",
}


class Record:
    """Scores, logits, hidden states and attentions of the committed tokens.

    Args:
        encoder_outputs: of an encoder-decoder model; `None` for others.
        by_rows: how many rows go on each at its own pace; 0 where all are committed together.

    Attributes:
        scores: one processed `[rows, vocab]` a token, or `None` if not asked for; stopping criteria see it.
    """

    def __init__(
        self, generation_config: GenerationConfig, encoder_outputs: ModelOutput | None = None, by_rows: int = 0
    ) -> None:
        self._returns_dict = bool(generation_config.return_dict_in_generate)
        self._encoder_outputs = encoder_outputs
        self._states: dict[str, tuple[Any, ...] | None] = {}
        for name, kind in (_STATES if encoder_outputs is None else _DECODER_STATES).items():
            self._states[name] = self._begun(getattr(generation_config, f"output_{kind}"))
        self.scores = self._begun(generation_config.output_scores)
        self._logits = self._begun(generation_config.output_logits)
        #: Whether tokens are added row by row, to be put together in the end.
        self.is_by_rows = by_rows > 0
        # Of each row, `[tokens, vocab]`, piece by piece.
        self._scores_of: list[list[torch.Tensor]] = [[] for _ in range(by_rows)]
        self._logits_of: list[list[torch.Tensor]] = [[] for _ in range(by_rows)]

    @property
    def wants_scores(self) -> bool:
        """Whether scores or raw logits are asked for."""
        return self.scores is not None or self._logits is not None

    @property
    def wants_any(self) -> bool:
        """Whether anything but the tokens is asked for."""
        return self.wants_scores or any(states is not None for states in self._states.values())

    def add_scores(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Take one token's processed scores and raw logits, `[rows, vocab]` each."""
        if self.scores is not None:
            self.scores += (scores,)
        if self._logits is not None:
            self._logits += (logits,)

    def add_scores_of(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Take those of one row's next tokens, `[tokens, vocab]` each."""
        if self.scores is not None:
            self._scores_of[row].append(scores)
        if self._logits is not None:
            self._logits_of[row].append(logits)

    def add_states(self, verified: Verified, index: int) -> None:
        """Take the states of the `index`-th token of a target forward."""
        for name, states in self._states.items():
            if states is not None:
                get = verified.attentions_at if "attentions" in name else verified.hidden_states_at
                self._states[name] = (*states, get(index, name))

    def output(self, input_ids: torch.Tensor, make_cache: Callable[[], Any]) -> Any:
        """What vanilla's `_sample` would return; the cache is asked for only if it is part of that."""
        if not self._returns_dict:
            return input_ids
        cache = make_cache()
        if self.is_by_rows:
            self._gather_rows()
        scores = {"sequences": input_ids, "scores": self.scores, "logits": self._logits}
        if self._encoder_outputs is None:
            return GenerateDecoderOnlyOutput(**scores, **self._states, **{releases.CACHE_KEY: cache})
        encoder_states = {
            f"encoder_{kind}": None if self._states[f"decoder_{kind}"] is None else self._encoder_outputs.get(kind)
            for kind in ("attentions", "hidden_states")
        }
        return GenerateEncoderDecoderOutput(**scores, **encoder_states, **self._states, **{releases.CACHE_KEY: cache})

    def _gather_rows(self) -> None:
        """Put together what rows at their own paces have brought: all have as many tokens by now."""
        if self.scores is not None:
            self.scores = _by_tokens(self._scores_of)
        if self._logits is not None:
            self._logits = _by_tokens(self._logits_of)

    def _begun(self, flag: bool | None) -> tuple[Any, ...] | None:
        return () if self._returns_dict and flag else None


def _by_tokens(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Of rows' pieces `[tokens, vocab]`, which are used up, one `[rows, vocab]` a token."""
    whole = []
    for pieces in rows:
        whole.append(torch.cat(pieces))
        pieces.clear()
    return tuple(torch.stack(token) for token in zip(*whole, strict=True))
