"""The target's forwards: the prompt, and drafts behind the committed text, with the cache kept level.

Knows nothing of where drafts come from or how they are judged.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from hfspec.cache.ledger import vanilla_cache
from hfspec.cache.rollback import Rollback, StateRollback, keeps_state
from hfspec.drafts import Draft
from hfspec.errors import HfspecError
from hfspec.host import architectures, forwards, releases
from hfspec.host.modules import modules_where
from hfspec.host.prepared import Prepared
from hfspec.host.stepping import stepping, stepping_layers
from hfspec.rounds import Outcomes, Verified
from hfspec.texts import Texts


class TooFewLogitsError(HfspecError):
    """A forward over several tokens has not given logits for all that were asked for; caught by `proving`."""


class Target:
    """The patched model in one call, whose rows all go on at the same pace.

    Args:
        cache: the cache to fill, empty or holding earlier turns.
    """

    def __init__(self, prepared: Prepared, cache: Any) -> None:
        self.model = prepared.model
        self._generation_config = prepared.generation_config
        self._model_kwargs = prepared.model_kwargs | {releases.CACHE_KEY: cache}
        self._cache = cache
        # Counts new tokens: the prompt in the cache is its zero.
        self._rollback: Rollback | StateRollback = Rollback(cache, layers=modules_where(prepared.model, keeps_state))
        self._stepping_layers = stepping_layers(prepared.model)
        self._num_new = 0
        # What the last forward gave, where a model's inputs grow by more of it than the cache.
        self._grows_itself = forwards.grows_itself(prepared.model)
        self._outputs = ModelOutput()
        #: Forwards made after the prompt's.
        self.num_forwards = 0
        #: Why nothing can be verified in one forward, as a forward of this call has shown; `None` if it can.
        self.problem: str | None = None

    @property
    def num_unread(self) -> int:
        """Committed tokens a row that are not in the cache: one, or more where it had to go back to a checkpoint."""
        return self._num_new - self._rollback.num_read

    def prefill(self, input_ids: torch.Tensor) -> Verified:
        """Read the prompt `[rows, length]`; the logits choose the first token."""
        outputs, kwargs = forwards.prefill(self.model, input_ids, self._generation_config, self._model_kwargs)
        if self._grows_itself:
            self._outputs = outputs
        self._model_kwargs = forwards.advance(self.model, outputs, kwargs, num_new_tokens=1)
        self._num_new = 1
        if others := _other_caches(self._model_kwargs):
            self._rollback = Rollback(self._cache, layers=modules_where(self.model, keeps_state), others=others)
        # Only the last position is kept: the logits of a whole prompt can be very large.
        logits = outputs.logits[:, -1:].clone()
        outputs["logits"] = None
        return Verified(logits, outputs, num_read=input_ids.shape[1], is_prompt=True)

    def verify(self, texts: Texts, draft: Draft) -> Verified:
        """Read what is unread of the committed texts, of one length, and the drafts behind them, in one forward."""
        self.rewind()  # steps may have been made, to be compared with this
        num_drafted = draft.num_tokens
        input_ids, kwargs = self._with_drafts(texts, draft)
        self._rollback.checkpoint()
        num_read = self.num_unread + num_drafted
        model_inputs = forwards.prepare_last(self.model, input_ids, num_read, kwargs)
        return self._forward(model_inputs, num_drafted + 1, num_read)

    def step(self, texts: Texts, draft: Draft, index: int) -> Verified:
        """Read the last token of the texts (`index` 0) or the `index`-th of the drafts by itself, as vanilla would.

        The steps of a round come one after the other; they are drawn back by `rewind`, or kept as a `verify` is.
        """
        input_ids, kwargs = self._with_drafts(texts, draft.cut([index] * draft.num_rows))
        if index == 0:
            self._rollback.checkpoint()
            for number in range(self.num_unread - 1, 0, -1):
                cut = kwargs
                for _ in range(number):
                    cut = forwards.cut_last(self.model, cut)
                self._forward(forwards.prepare_last(self.model, input_ids[:, :-number], 1, cut), 1, 1)
        return self._forward(forwards.prepare_last(self.model, input_ids, 1, kwargs), 1, 1)

    def rewind(self) -> None:
        """Go back to where the round began, whatever has become of its forwards."""
        self.level_cache(self._num_new)

    def keep(self, outcomes: Outcomes) -> None:
        """Bring cache and inputs to the committed text: as many tokens of the last round in each row.

        The last committed token is not in the cache, as in vanilla.
        """
        num_committed = outcomes.num_committed[0]
        self.level_cache(self._num_new + num_committed)
        self._model_kwargs = self._grown(num_committed)

    def grows_alike(self, forwards_made: Sequence[Verified]) -> bool:
        """Whether the inputs grow by the same, whichever of these forwards comes before."""
        if not self._grows_itself:
            return True
        grown = [forwards.advance(self.model, each.outputs, self._model_kwargs, 1) for each in forwards_made]
        return all(forwards.are_alike(grown[0], each) for each in grown[1:])

    def level_cache(self, num_new: int) -> None:
        """Bring the cache to the text without its last token, of `num_new` in all; also after an error in mid-round."""
        self._num_new = num_new
        if num_new:
            self._rollback.to(num_new - 1)

    def recover(self, texts: Texts) -> None:
        """After an error outside the target: bring the caller's cache to what vanilla would have read of the texts."""
        num_read = texts.num_new - 1 + texts.is_pending
        if num_read < 0:
            return
        self._rollback.to(num_read)
        num_missing = num_read - self._rollback.num_read
        if num_missing > 0:
            ahead = num_read - self._num_new
            kwargs = forwards.cut_last(self.model, self._model_kwargs)
            if ahead >= 0:
                kwargs = self._grown(ahead)
            input_ids = texts.together()[:, : texts.num_prompt + num_read]
            with suppress(Exception):  # the caller gets the first error
                self._forward(forwards.prepare_last(self.model, input_ids, num_missing, kwargs), 1, num_missing)

    def catch_up(self, input_ids: torch.Tensor) -> bool:
        """Read what a cache that had to go back still lacks of the whole text, so that it is as vanilla's.

        Returns:
            Whether that took a forward.
        """
        num_missing = self.num_unread - 1
        if num_missing > 0:
            kwargs = forwards.cut_last(self.model, self._model_kwargs)
            self._forward(forwards.prepare_last(self.model, input_ids[:, :-1], num_missing, kwargs), 1, num_missing)
        return num_missing > 0

    def cache_for_user(self) -> Any:
        """The cache as vanilla hands it back."""
        return vanilla_cache(self._cache)

    def _with_drafts(self, texts: Texts, draft: Draft) -> tuple[torch.Tensor, dict[str, Any]]:
        """The texts with the drafts behind them `[rows, length]`, and the model kwargs grown to that length."""
        if not draft.num_tokens:
            return texts.together(), self._model_kwargs
        input_ids = torch.cat([texts.together(), draft.token_ids], dim=-1)
        return input_ids, self._grown(draft.num_tokens)

    def _grown(self, num_tokens: int) -> dict[str, Any]:
        """The model kwargs grown by so many tokens."""
        return forwards.advance(self.model, self._outputs, self._model_kwargs, num_tokens)

    def _forward(self, model_inputs: dict[str, Any], num_logits: int, num_read: int) -> Verified:
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = num_logits
        ids = model_inputs.get("input_ids", model_inputs.get("decoder_input_ids"))
        num_rows = 1 if ids is None else len(ids)
        self.num_forwards += 1
        with self._reading(num_read), stepping(self._stepping_layers), forwards.wide(num_rows, num_read):
            outputs = self.model(**model_inputs, return_dict=True)
        if self._grows_itself:
            self._outputs = outputs
        num_given = outputs.logits.shape[1]
        if num_given < num_logits:
            given = "the last token only" if num_given == 1 else f"{num_given} tokens"
            raise TooFewLogitsError(f"its forward over {num_logits} tokens gives logits for {given}")
        return Verified(outputs.logits[:, -num_logits:], outputs, num_read)

    def _reading(self, num_read: int) -> AbstractContextManager[None]:
        return self._rollback.reading(num_read)


class StateTarget(Target):
    """The patched model in one call, where it makes a state of its own kind, which its forwards write into."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared, prepared.cache)
        self._grows_itself = False  # the state is seen to here
        self._key = architectures.state_key(self.model.config) or releases.CACHE_KEY

    def prefill(self, input_ids: torch.Tensor) -> Verified:
        """Read the prompt; the state comes with the outputs."""
        verified = super().prefill(input_ids)
        self._model_kwargs[self._key] = verified.outputs[self._key]
        self._rollback = StateRollback(self._model_kwargs, self._key)
        return verified

    def keep(self, outcomes: Outcomes) -> None:
        """Bring state and inputs to the committed text."""
        num_committed = outcomes.num_committed[0]
        self.level_cache(self._num_new + num_committed)
        state = self._model_kwargs[self._key]
        self._model_kwargs.update(self._grown(num_committed) | {self._key: state})

    def cache_for_user(self) -> Any:
        """The state, as vanilla hands it back."""
        return self._model_kwargs[self._key]

    def _forward(self, model_inputs: dict[str, Any], num_logits: int, num_read: int) -> Verified:
        verified = super()._forward(model_inputs, num_logits, num_read)
        self._model_kwargs[self._key] = verified.outputs[self._key]
        return verified


class UncachedTarget(Target):
    """The patched model in one call without a cache: every forward reads the whole text, as vanilla's do."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared, prepared.cache)
        self._stepping_layers = []  # nothing goes on from a state: vanilla's forwards are as wide

    @property
    def num_unread(self) -> int:
        """One, as nothing is put off: all is read again anyway."""
        return 1

    def verify(self, texts: Texts, draft: Draft) -> Verified:
        """Read the rows' texts and the drafts behind them in one forward."""
        width = draft.num_tokens + 1
        return self._forward(forwards.prepare_all(self.model, *self._with_drafts(texts, draft)), width, width)

    def step(self, texts: Texts, draft: Draft, index: int) -> Verified:
        """Read the texts, and so many of the drafts' tokens, for the logits of the last."""
        inputs = self._with_drafts(texts, draft.cut([index] * draft.num_rows))
        return self._forward(forwards.prepare_all(self.model, *inputs), 1, 1)

    def level_cache(self, num_new: int) -> None:
        """Nothing to level."""
        self._num_new = num_new

    def recover(self, texts: Texts) -> None:
        """Nothing to recover."""

    def cache_for_user(self) -> Any:
        """What vanilla hands back: nothing, or what was passed."""
        return self._cache


def _other_caches(model_kwargs: dict[str, Any]) -> list[Any]:
    """What else forwards write into besides the cache: the caches of an encoder that hears a stream, say."""
    return [
        value
        for name, value in model_kwargs.items()
        if name not in releases.CACHE_KEYS and (isinstance(value, Cache) or type(value).__name__.endswith("Cache"))
    ]
