"""The walk: vanilla's own loop body, replayed over verified logits, token by token. It is the reference.

Each committed token goes once through every logits processor, the choice, every stopping criterion
and the streamer, in vanilla's order and with vanilla's arguments. So grammars, stop strings, length
limits and the random stream behave as they do in vanilla. Knows nothing of models and caches.
"""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hfspec.accept.record import Record
from hfspec.accept.rules import Proposal, Rule
from hfspec.drafts import Draft
from hfspec.host import releases
from hfspec.rounds import Outcome, Outcomes, Verified
from hfspec.texts import Texts


class Walk:
    """Accepts by walking: all rows in step, as vanilla writes a batch, or each row by itself.

    Args:
        texts: what is written; its rows in step have one length.
        is_in_step: whether the rows are committed together.
        processors: the call's, or one list for each row of the batch.
        pad_id: what vanilla appends to finished rows; `None` if it goes on with them as with the others.
        streamer: told of each token; for rows in step only, or a single one.
    """

    def __init__(
        self,
        texts: Texts,
        rule: Rule,
        processors: Sequence[LogitsProcessorList],
        criteria: StoppingCriteriaList,
        record: Record,
        is_in_step: bool,
        pad_id: int | None = None,
        streamer: object = None,
    ) -> None:
        self._texts = texts
        self._rule = rule
        self._processors = processors
        self._criteria = criteria
        self._record = record
        self._is_in_step = is_in_step
        self._pad_id = pad_id
        self._streamer = streamer
        self._was_written = False

    def begin(self, verified: Verified) -> None:
        """Commit the first token of every row, chosen by the prompt's logits."""
        for row in self._groups():
            self._record.add_states(verified, 0)
            self._append(verified.logits[:, 0], row)

    def settle(self, draft: Draft, verified: Verified) -> Outcomes:
        """Commit tokens along the rows' drafts until the target chooses another, or the text ends.

        At least one token a row: after the last accepted draft token comes the recovered token (the target's own
        at the first rejection) or, if all were accepted, the bonus token.
        """
        known = _OnHost(draft)
        if self._is_in_step:
            return Outcomes(tuple(self._walk_in_step(known, verified)))
        outcomes = []  # no generator: a StopIteration of the user's own would end it
        for row in range(draft.num_rows):
            outcomes.append(self._walk_row(row, known, verified))
        return Outcomes(tuple(outcomes))

    def _groups(self) -> list[int | None]:
        """Which rows are written together: all (`None`), or each by itself."""
        return [None] if self._is_in_step else list(range(len(self._texts.rows)))

    def _walk_row(self, row: int, known: "_OnHost", verified: Verified) -> Outcome:
        here = [-1]  # several nodes, where siblings have one token
        committed: list[int] = []
        while True:
            self._record.add_states(verified, here[0] + 1)
            proposals = [known.proposal(row, here)] if self._rule.heeds_proposals else None
            chosen = self._append(verified.logits[:, here[0] + 1], row, proposals, known)[0]
            committed.append(chosen)
            has_ended = self._texts.has_ended[row]
            children = known.children(row, here)
            right = [] if self._was_written else [each for each in children if known.token_ids[row][each] == chosen]
            here = right or here
            if not right or has_ended:
                path = known.path_to(row, here[0])
                is_rejected = bool(children) and not right
                return Outcome(len(path) + is_rejected, path, tuple(committed), has_ended)

    def _walk_in_step(self, known: "_OnHost", verified: Verified) -> list[Outcome]:
        num_rows, num_nodes = known.draft.num_rows, known.draft.num_tokens
        committed: list[list[int]] = [[] for _ in range(num_rows)]
        is_judged = is_accepted = False
        for node in range(num_nodes + 1):
            is_judged = node < num_nodes
            proposals = None
            if self._rule.heeds_proposals:
                proposals = [known.proposal(row, [node - 1]) for row in range(num_rows)]
            self._record.add_states(verified, node)
            chosen = self._append(verified.logits[:, node], None, proposals, known)
            for ids, token_id in zip(committed, chosen, strict=True):
                ids.append(token_id)
            is_accepted = is_judged and chosen == [ids[node] for ids in known.token_ids] and not self._was_written
            if not is_accepted or all(self._texts.has_ended):
                break
        num_accepted = len(committed[0]) - (not is_accepted)
        num_judged = num_accepted + (is_judged and not is_accepted)
        return [
            Outcome(num_judged, tuple(range(num_accepted)), tuple(ids), has_ended)
            for ids, has_ended in zip(committed, self._texts.has_ended, strict=True)
        ]

    def _append(
        self,
        logits: torch.Tensor,
        row: int | None,
        proposals: Sequence[Proposal | None] | None = None,
        known: "_OnHost | None" = None,
    ) -> list[int]:
        """Commit one token of a row, or of all rows together, chosen from `logits` `[rows, vocab]`; return the ids.

        Args:
            known: the draft, to be read along if it was not yet.
        """
        texts, device = self._texts, self._texts.device
        texts.is_pending = True
        logits = logits if row is None else logits[row : row + 1]
        # A copy in float32, as vanilla's: processors may write into it.
        logits = logits.to(copy=True, dtype=torch.float32, device=device)
        text = _Lent(texts, row)
        scores = self._processors_of(row)(text.ids, logits)
        was_written = text.give_back()
        if row is not None and self._record.is_by_rows:
            self._record.add_scores_of(texts.rows[row], scores, logits)
        else:
            self._record.add_scores(scores, logits)
        given = None if proposals is None or None in proposals else [each for each in proposals if each is not None]
        tokens = self._rule.choose(scores, given, texts.rows if row is None else texts.rows[row : row + 1])
        ended = texts.has_ended if row is None else [texts.has_ended[row]]
        if self._pad_id is not None and any(ended):
            tokens = tokens.where(torch.tensor([not each for each in ended], device=device), self._pad_id)
        texts.append(tokens, row)
        texts.is_pending = False
        if not releases.STREAMS_AFTER_CRITERIA:
            self._stream(tokens)
        text = _Lent(texts, row)
        has_ended = self._criteria(text.ids, self._record.scores)
        self._was_written = text.give_back() or was_written
        if releases.STREAMS_AFTER_CRITERIA:
            self._stream(tokens)
        # What stands in the text counts, whoever wrote it. The device is waited for once.
        unread = [] if known is None else known.unread()
        read: list[int] = torch.cat([text.ids[:, -1], has_ended.to(tokens), *unread]).tolist()
        num_rows = len(tokens)
        if known is not None and unread:
            known.take(read[2 * num_rows :])
        self._end(row, read[num_rows : 2 * num_rows])
        return read[:num_rows]

    def _processors_of(self, row: int | None) -> LogitsProcessorList:
        return self._processors[0 if row is None else self._texts.rows[row]]

    def _end(self, row: int | None, now: Sequence[int]) -> None:
        rows = range(len(self._texts.rows)) if row is None else [row]
        for each, ends in zip(rows, now, strict=True):
            self._texts.has_ended[each] |= bool(ends)
        if row is not None and now[0]:
            self._rule.end(self._texts.rows[row])

    def _stream(self, tokens: torch.Tensor) -> None:
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())  # type: ignore[attr-defined]  # any object with put() and end()


class _Lent:
    """The text of a row, or of all, in the hands of a processor or criterion, which may write into it as in vanilla."""

    def __init__(self, texts: Texts, row: int | None) -> None:
        self._texts = texts
        self._is_copy = row is None and len(texts.rows) > 1
        self.ids = texts.together() if row is None else texts.of(row)
        self._before = self.ids.clone() if self.ids.is_inference() else self.ids._version

    def give_back(self) -> bool:
        """Whether it was written into, which then stands in the text."""
        if isinstance(self._before, torch.Tensor):
            was_written = not torch.equal(self._before, self.ids)
        else:
            was_written = self.ids._version != self._before
        if was_written and self._is_copy:
            self._texts.put_back(self.ids)
        return was_written


class _OnHost:
    """A draft's ids and shape on the host: read in one copy with the first token committed, if nobody asks before."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._token_ids: list[list[int]] | None = None
        self._parents: list[list[int]] = [list(range(-1, draft.num_tokens - 1))] * draft.num_rows

    def unread(self) -> list[torch.Tensor]:
        """What is to be read, one behind the other, for `take`."""
        if self._token_ids is not None:
            return []
        parts = (self.draft.token_ids, self.draft.parents)
        return [part.flatten() for part in parts if part is not None]

    def take(self, numbers: list[int]) -> None:
        """Take what was read."""
        width = self.draft.num_tokens
        rows = [numbers[start : start + width] for start in range(0, len(numbers), width)] if width else []
        self._token_ids = rows[: self.draft.num_rows]
        self._parents = rows[self.draft.num_rows :] or self._parents

    @property
    def token_ids(self) -> list[list[int]]:
        """Of each row the nodes' ids."""
        if self._token_ids is None:
            self.take(torch.cat(self.unread()).tolist())
        return self._token_ids or []

    def children(self, row: int, here: Sequence[int]) -> list[int]:
        """A row's nodes that follow any of these."""
        if not self.draft.lengths[row]:
            return []
        token_ids = self.token_ids[row]
        nodes = range(self.draft.lengths[row])
        return [each for each in nodes if self._parents[row][each] in here and token_ids[each] >= 0]

    def proposal(self, row: int, here: Sequence[int]) -> Proposal | None:
        """What is proposed behind these nodes, if anything is."""
        children = self.children(row, here)
        if not children:
            return None
        probs = None if self.draft.probs is None else self.draft.probs[row, children]
        return Proposal([self.token_ids[row][each] for each in children], probs)

    def path_to(self, row: int, node: int) -> tuple[int, ...]:
        """A row's nodes from the root's child to this one."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self._parents[row][node]
        return tuple(reversed(path))
