"""The walk: vanilla's own loop body, replayed over verified logits (DESIGN §3A).

Each committed token goes once through every logits processor, the choice, every stopping criterion
and the streamer, in vanilla's order and with vanilla's arguments. So grammars, stop strings, length
limits and the random stream behave as they do in vanilla. Knows nothing of models and caches.
"""

from collections.abc import Sequence

import torch

from hfspec.accept.record import Record
from hfspec.accept.rules import Proposal, Rule
from hfspec.host import releases
from hfspec.host.prepared import Prepared
from hfspec.rounds import Draft, Outcome, Verified


class Transcript:
    """The text of one row, or of several that are written in step, as vanilla writes a batch.

    Args:
        prepared: the call, or a row of it: its ids, processors, criteria and streamer are used.

    Attributes:
        input_ids: `[rows, length]`, prompt and committed tokens.
        num_new: how many of them were committed.
        unfinished: for each row, whether no stopping criterion has ended it.
        last_draft_id: the id behind which nothing can be verified in the same forward, if there is one.
        pad_id: what vanilla appends to finished rows; `None` if it goes on with them as with the others.
    """

    def __init__(
        self,
        prepared: Prepared,
        rule: Rule,
        record: Record,
    ) -> None:
        self.input_ids = prepared.input_ids
        self.num_new = 0
        self.unfinished = [True] * prepared.num_rows
        self.record = record
        self.rule = rule
        self.pad_id = prepared.pad_id
        self.last_draft_id = prepared.last_draft_id
        self._processors = prepared.processors
        self._criteria = prepared.criteria
        self._streamer = prepared.streamer

    @property
    def num_rows(self) -> int:
        """How many rows are written together."""
        return self.input_ids.shape[0]

    @property
    def length(self) -> int:
        """The length of the text, prompt included."""
        return self.input_ids.shape[1]

    @property
    def is_finished(self) -> bool:
        """Whether every row has ended."""
        return not any(self.unfinished)

    def is_padded(self, row: int) -> bool:
        """Whether a row has ended, so that all it still gets is padding."""
        return self.pad_id is not None and not self.unfinished[row]

    def append(self, logits: torch.Tensor, proposals: Sequence[Proposal] | None = None) -> list[int]:
        """Commit one token a row, chosen from the target's `logits` `[rows, vocab]` of any dtype; return the ids."""
        # A copy in float32, as vanilla's: processors may write into it.
        logits = logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = self._processors(self.input_ids, logits)
        self.record.add_scores(scores, logits)
        tokens = self.rule.choose(scores, proposals)
        if self.pad_id is not None and not all(self.unfinished):
            tokens = tokens.where(torch.tensor(self.unfinished, device=tokens.device), self.pad_id)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=-1)
        self.num_new += 1
        if not releases.STREAMS_AFTER_CRITERIA:
            self._stream(tokens)
        ended = self._criteria(self.input_ids, self.record.scores)
        if releases.STREAMS_AFTER_CRITERIA:
            self._stream(tokens)
        ids: list[int]
        ids, has_ended = torch.stack([tokens, ended.to(tokens)]).tolist()  # the device is waited for once
        self.unfinished = [was and not now for was, now in zip(self.unfinished, has_ended, strict=True)]
        if self.is_finished:
            self.rule.end()
        return ids

    def _stream(self, tokens: torch.Tensor) -> None:
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())


def walk(transcript: Transcript, drafts: Sequence[Draft], verified: Verified) -> Outcome:
    """Commit tokens along the rows' drafts until the target chooses another in some row, or the text ends.

    Commits at least one token a row: after the last accepted draft token comes the recovered token (the
    target's own at the first rejection) or, if all were accepted, the bonus token.

    Args:
        drafts: one a row of the transcript, of one length.
    """
    draft_ids: list[list[int]] = [draft.token_ids[0].tolist() for draft in drafts]
    num_drafted = len(draft_ids[0])
    for index in range(num_drafted):
        proposals = [
            Proposal(ids[index], None if draft.probs is None else draft.probs[index])
            for ids, draft in zip(draft_ids, drafts, strict=True)
        ]
        transcript.record.add_states(verified, index)
        chosen = transcript.append(verified.logits_at(index), proposals)
        if chosen != [ids[index] for ids in draft_ids]:
            return Outcome(index + 1, num_accepted=index, num_committed=index + 1)
        if transcript.is_finished:
            return Outcome(index + 1, num_accepted=index + 1, num_committed=index + 1)
    transcript.record.add_states(verified, num_drafted)
    transcript.append(verified.logits_at(num_drafted))
    return Outcome(num_drafted, num_accepted=num_drafted, num_committed=num_drafted + 1)
