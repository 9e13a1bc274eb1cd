"""A call's built-in logits processors, applied to every state of a round at once. Knows no rule and no model."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList

from hfspec.drafts import Draft
from hfspec.sampling.processors import is_token_blind
from hfspec.texts import Texts


class Processing:
    """Processes the logits of all states, where no processor keeps anything between calls.

    Args:
        processors: the call's, or one list for each row of the batch, alike in kind.
        is_in_step: whether rows have one length and one list of processors.
    """

    def __init__(self, texts: Texts, processors: Sequence[LogitsProcessorList], is_in_step: bool) -> None:
        self._texts = texts
        self._processors = processors
        self._is_in_step = is_in_step
        self._are_blind = [is_token_blind(each) for each in processors[0]]

    @property
    def is_empty(self) -> bool:
        """Whether scores are the logits."""
        return not self._are_blind

    def __call__(self, logits: torch.Tensor, draft: Draft) -> torch.Tensor:
        """Scores `[rows, states, vocab]` for `logits` of that shape, float32, which may be written over.

        Processors that look at scores only see all states in one call; those that look at the text see the rows'
        states one by one, each behind the text and the draft tokens on its path.
        """
        num_rows, num_states, vocab_size = logits.shape
        scores = logits
        for index, is_blind in enumerate(self._are_blind):
            if is_blind:
                flat = scores.reshape(num_rows * num_states, vocab_size)
                scores = self._processors[0][index](draft.token_ids[:1], flat).view(logits.shape)
            elif self._is_in_step:
                prefix = torch.cat([self._texts.together(), draft.token_ids], dim=-1)
                length = self._texts.lengths[0]
                states = [
                    self._processors[0][index](prefix[:, : length + state], scores[:, state])
                    for state in range(num_states)
                ]
                scores = torch.stack(states, dim=1)
            else:
                scores = torch.stack([self._of_row(index, row, scores[row], draft) for row in range(num_rows)])
        return scores

    def _of_row(self, index: int, row: int, scores: torch.Tensor, draft: Draft) -> torch.Tensor:
        """One row's scores `[states, vocab]`; states that the row does not have stay as they are."""
        processor = self._processors[self._texts.rows[row]][index]
        text, token_ids = self._texts.of(row), draft.token_ids[row : row + 1].clamp(min=0)
        paths = _paths(draft, row)
        processed = []
        for state in range(len(scores)):
            if state <= draft.lengths[row]:
                path = token_ids[:, :state] if paths is None else token_ids[:, paths[state]]
                prefix = torch.cat([text, path], dim=-1) if state else text
                processed.append(processor(prefix, scores[state : state + 1])[0])
            else:
                processed.append(scores[state])
        return torch.stack(processed)


def _paths(draft: Draft, row: int) -> list[list[int]] | None:
    """The nodes on the way to each state of a row; `None` for a chain."""
    if draft.parents is None:
        return None
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(draft.parents[row].tolist()):
        paths.append([*paths[parent + 1], node])
    return paths
