"""The walk: vanilla's own loop body, replayed over verified logits (DESIGN §3A).

Each committed token goes once through every logits processor, the choice, every stopping criterion
and the streamer, in vanilla's order and with vanilla's arguments. So grammars, stop strings, length
limits and the random stream behave as they do in vanilla. Knows nothing of models and caches.
"""

from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hfspec import compat
from hfspec.accept.record import Record
from hfspec.accept.rules import Proposal, Rule
from hfspec.rounds import Draft, Outcome, Verified


class Transcript:
    """The text being written.

    Attributes:
        input_ids: `[1, length]`, prompt and committed tokens.
        num_new: how many of them were committed.
        is_finished: whether a stopping criterion has ended the call.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        rule: Rule,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: Any,
        record: Record,
    ) -> None:
        self.input_ids = input_ids
        self.num_new = 0
        self.is_finished = False
        self.record = record
        self._rule = rule
        self._processors = processors
        self._criteria = criteria
        self._streamer = streamer

    def append(self, logits: torch.Tensor, proposal: Proposal | None = None) -> int:
        """Commit one token, chosen from the target's `logits` `[1, vocab]` of any dtype; return its id."""
        # A copy in float32, as vanilla's: processors may write into it.
        logits = logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = self._processors(self.input_ids, logits)
        self.record.add_scores(scores, logits)
        tokens = self._rule.choose(scores, proposal)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=-1)
        self.num_new += 1
        if not compat.STREAMS_AFTER_CRITERIA:
            self._stream(tokens)
        self.is_finished = bool(self._criteria(self.input_ids, self.record.scores).all())
        if compat.STREAMS_AFTER_CRITERIA:
            self._stream(tokens)
        return int(tokens)

    def _stream(self, tokens: torch.Tensor) -> None:
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())


def walk(transcript: Transcript, draft: Draft, verified: Verified) -> Outcome:
    """Commit tokens along the draft until the target chooses another, or the text ends.

    Commits at least one token: after the last accepted draft token comes the recovered token (the
    target's own at the first rejection) or, if all were accepted, the bonus token.
    """
    draft_ids: list[int] = draft.token_ids[0].tolist()
    for index, draft_id in enumerate(draft_ids):
        law = None if draft.probs is None else draft.probs[index]
        transcript.record.add_states(verified, index)
        chosen = transcript.append(verified.logits[:, index], Proposal(draft_id, law))
        if chosen != draft_id:
            return Outcome(index + 1, num_accepted=index, num_committed=index + 1)
        if transcript.is_finished:
            return Outcome(index + 1, num_accepted=index + 1, num_committed=index + 1)
    transcript.record.add_states(verified, len(draft_ids))
    transcript.append(verified.logits[:, len(draft_ids)])
    return Outcome(len(draft_ids), num_accepted=len(draft_ids), num_committed=len(draft_ids) + 1)
