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
        token_ids: list[list[int]] = draft.token_ids.tolist()
        parents: list[list[int]] | None = None if draft.parents is None else draft.parents.tolist()
        if self._is_in_step:
            return Outcomes(tuple(self._walk_in_step(token_ids, draft, verified)))
        outcomes = []  # no generator: a StopIteration of the user's own would end it
        for row in range(draft.num_rows):
            shape = None if parents is None else parents[row]
            outcomes.append(self._walk_row(row, token_ids[row], shape, draft, verified))
        return Outcomes(tuple(outcomes))

    def _groups(self) -> list[int | None]:
        """Which rows are written together: all (`None`), or each by itself."""
        return [None] if self._is_in_step else list(range(len(self._texts.rows)))

    def _walk_row(
        self, row: int, token_ids: list[int], parents: list[int] | None, draft: Draft, verified: Verified
    ) -> Outcome:
        num_nodes = draft.lengths[row]
        parents = list(range(-1, num_nodes - 1)) if parents is None else parents
        here = [-1]  # several nodes, where siblings have one token
        committed: list[int] = []
        while True:
            children = [each for each in range(num_nodes) if parents[each] in here and token_ids[each] >= 0]
            self._record.add_states(verified, here[0] + 1)
            proposals = [_proposal(draft, row, token_ids, children)]
            chosen = self._append(verified.logits[:, here[0] + 1], row, proposals)[0]
            committed.append(chosen)
            has_ended = self._texts.has_ended[row]
            right = [] if self._was_written else [each for each in children if token_ids[each] == chosen]
            here = right or here
            if not right or has_ended:
                path = _path_to(here[0], parents)
                is_rejected = bool(children) and not right
                return Outcome(len(path) + is_rejected, path, tuple(committed), has_ended)

    def _walk_in_step(self, token_ids: list[list[int]], draft: Draft, verified: Verified) -> list[Outcome]:
        num_rows, num_nodes = len(token_ids), draft.num_tokens
        committed: list[list[int]] = [[] for _ in range(num_rows)]
        is_judged = is_accepted = False
        for node in range(num_nodes + 1):
            is_judged = node < num_nodes
            children = [node] if is_judged else []
            proposals = [_proposal(draft, row, token_ids[row], children) for row in range(num_rows)]
            self._record.add_states(verified, node)
            chosen = self._append(verified.logits[:, node], None, proposals)
            for ids, token_id in zip(committed, chosen, strict=True):
                ids.append(token_id)
            is_accepted = is_judged and chosen == [ids[node] for ids in token_ids] and not self._was_written
            if not is_accepted or all(self._texts.has_ended):
                break
        num_accepted = len(committed[0]) - (not is_accepted)
        num_judged = num_accepted + (is_judged and not is_accepted)
        return [
            Outcome(num_judged, tuple(range(num_accepted)), tuple(ids), has_ended)
            for ids, has_ended in zip(committed, self._texts.has_ended, strict=True)
        ]

    def _append(
        self, logits: torch.Tensor, row: int | None, proposals: Sequence[Proposal | None] | None = None
    ) -> list[int]:
        """Commit one token of a row, or of all rows together, chosen from `logits` `[rows, vocab]`; return the ids."""
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
        ids, now = torch.stack([text.ids[:, -1], has_ended.to(tokens)]).tolist()
        self._end(row, now)
        found: list[int] = ids
        return found

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


def _path_to(node: int, parents: list[int]) -> tuple[int, ...]:
    """The nodes from the root's child to this one."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))


def _proposal(draft: Draft, row: int, token_ids: list[int], children: list[int]) -> Proposal | None:
    if not children:
        return None
    probs = None if draft.probs is None else draft.probs[row, children]
    return Proposal([token_ids[each] for each in children], probs)
