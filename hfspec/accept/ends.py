"""Where built-in stopping criteria end a text, for every state of a round at once."""

import torch
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from hfspec.drafts import Draft
from hfspec.texts import Texts


class Ends:
    """Says which choices end a text. Lengths are the host's arithmetic, and not looked at here but by `is_full`."""

    def __init__(self, texts: Texts, criteria: StoppingCriteriaList) -> None:
        self._texts = texts
        self._eos = [each.eos_token_id for each in criteria if type(each) is EosTokenCriteria]
        self._stops = [each for each in criteria if type(each) is StopStringCriteria]
        self._max_length = min((each.max_length for each in criteria if type(each) is MaxLengthCriteria), default=None)

    def is_full(self, length: int) -> bool:
        """Whether a text of this length is over."""
        return self._max_length is not None and length >= self._max_length

    def can_tell(self) -> bool:
        """Whether all texts are long enough for `of`, which looks at a window of one width."""
        return min(self._texts.lengths) >= max((each.maximum_token_len for each in self._stops), default=0)

    def of(self, chosen: torch.Tensor, draft: Draft) -> torch.Tensor | None:
        """Whether the text ends with a state's choice; `chosen` and the result are `[rows, states]`.

        `None` if only its length can end it.
        """
        if not self._eos and not self._stops:
            return None
        ended = torch.zeros_like(chosen, dtype=torch.bool)
        for eos in self._eos:
            ended |= torch.isin(chosen, eos.to(chosen.device))
        for stop in self._stops:
            ended |= self._stopped(stop, chosen, draft)
        return ended

    def _stopped(self, stop: StopStringCriteria, chosen: torch.Tensor, draft: Draft) -> torch.Tensor:
        """The same for stop strings, which look back over as many tokens as the longest of them may take."""
        num_rows, num_states = chosen.shape
        width = stop.maximum_token_len
        tail = self._texts.last([width] * num_rows)
        token_ids = draft.token_ids.clamp(min=0)
        if draft.tree is None:
            line = torch.cat([tail, token_ids], dim=1)
            windows = torch.stack([line[:, state + 1 : state + width] for state in range(num_states)], dim=1)
        else:
            # Each state's path at the right end, behind nodes that are not on it.
            on_path = draft.tree.ancestors[:, :, 1:]
            paths = token_ids[:, None].expand(-1, num_states, -1)
            paths = paths.gather(2, on_path.to(torch.uint8).argsort(dim=-1, stable=True))
            from_the_end = torch.arange(width - 2, -1, -1, device=chosen.device)
            depths = draft.tree.depths[:, :, None]
            source = torch.where(
                from_the_end < depths, width + paths.shape[2] - 1 - from_the_end, width - 1 - from_the_end + depths
            )
            windows = torch.cat([tail[:, None].expand(-1, num_states, -1), paths], dim=2).gather(2, source)
        candidates = torch.cat([windows, chosen[:, :, None]], dim=2)
        stopped: torch.Tensor = stop(candidates.reshape(num_rows * num_states, -1), None)
        return stopped.view(num_rows, num_states)
