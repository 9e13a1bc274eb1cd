"""The same verdicts as the walk's for all states of a round at once: the device is waited for once.

For built-in processors and criteria, which keep nothing and look at each row by itself. Streamers are served afterwards
from what the host has read.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import StoppingCriteriaList

from hfspec.accept.ends import Ends
from hfspec.accept.processing import Processing
from hfspec.accept.record import Record
from hfspec.accept.rules import Greedy, Rule
from hfspec.accept.walk import Walk
from hfspec.drafts import Draft, Tree
from hfspec.rounds import Outcome, Outcomes, Verified
from hfspec.texts import Texts

#: Scores that are worked on at once, of all rows together: more would take much memory for moments.
_MAX_SCORES = 1 << 26


@dataclass(frozen=True)
class _Path:
    """How far each row has come, on the device.

    Attributes:
        leaf: `[rows, 1]`, the last accepted state.
        depth: `[rows, 1]`, accepted tokens.
        on_path: `[rows, states]`, the states up to there.
        is_closed: `[rows, 1]`, whether the leaf itself has ended the text, so that nothing is chosen behind it; `None`
            if nothing ends a text but its length.
        ends: `[rows, states]`, the leaf, and the like of it where siblings have one token.
    """

    leaf: torch.Tensor
    depth: torch.Tensor
    on_path: torch.Tensor
    is_closed: torch.Tensor | None
    ends: torch.Tensor

    @property
    def num_committed(self) -> torch.Tensor:
        """Tokens a row, `[rows]`."""
        committed = self.depth + 1
        return (committed if self.is_closed is None else committed - self.is_closed.long())[:, 0]


class Vectorised:
    """Accepts in one go; what it cannot settle (a state without a distribution, say) it leaves to the walk.

    Args:
        walk: over the same texts, with the same rule, processors, criteria, record and streamer.
    """

    def __init__(
        self,
        walk: Walk,
        texts: Texts,
        rule: Rule,
        processing: Processing,
        criteria: StoppingCriteriaList,
        record: Record,
        is_in_step: bool,
        pad_id: int | None = None,
        streamer: Any = None,
    ) -> None:
        self._walk = walk
        self._texts = texts
        self._rule = rule
        self._processing = processing
        self._ends = Ends(texts, criteria)
        self._record = record
        self._is_in_step = is_in_step
        self._pad_id = pad_id
        self._streamer = streamer
        # Of rows in step, which have ended, `[rows, 1]`; on the device, where it is needed.
        self._over: torch.Tensor | None = None
        self._error: BaseException | None = None

    def begin(self, verified: Verified) -> None:
        """Commit the first token of every row, chosen by the prompt's logits."""
        self._walk.begin(verified)

    def settle(self, draft: Draft, verified: Verified) -> Outcomes:
        """See `Walk.settle`."""
        if not self._ends.can_tell():
            return self._by_walking(draft, verified)
        chosen, is_bad, scores = self._choose(draft, verified)
        ends = self._ends.of(chosen, draft)
        has_ended = None
        if self._is_in_step:
            chosen, ends = self._padded(chosen, ends)
            path, has_ended = _together(chosen, ends, draft)
        else:
            path = _each(chosen, ends, draft)
            if ends is not None and path.is_closed is not None:
                has_ended = path.is_closed | ends.gather(1, path.leaf)
        tokens = chosen if draft.tree is None else _in_order(chosen, path, draft.tree)
        read = _on_host(  # the round's one wait
            leaf=path.leaf,
            is_closed=path.is_closed,
            has_ended=has_ended,
            is_bad=None if is_bad is None else (is_bad & path.on_path).any(dim=1, keepdim=True),
            has_children=None if draft.tree is None else _has_children(path, draft.tree, draft),
            on_path=None if draft.tree is None else path.on_path,
            tokens=tokens,
        )
        if any(row.get("is_bad", [0])[0] for row in read):
            return self._by_walking(draft, verified)
        verdicts = [self._outcome(row, each, draft.lengths[row]) for row, each in enumerate(read)]
        outcomes = Outcomes(tuple(verdicts), path.num_committed)
        settled = self._agreed(outcomes)
        if settled is None:  # another thread has drawn meanwhile
            return self.settle(draft, verified)
        if self._is_in_step and ends is not None and settled is not outcomes:
            settled = self._with_ends(settled, ends)
        self._over = has_ended if settled is outcomes else None
        self._write(settled, tokens, verified, scores)
        if self._error is not None:
            raise self._error
        return settled

    def _by_walking(self, draft: Draft, verified: Verified) -> Outcomes:
        self._over = None
        return self._walk.settle(draft, verified)

    def _choose(self, draft: Draft, verified: Verified) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Choices and faults (if any can be) `[rows, states]`, and scores and raw logits where the user wants them."""
        logits, device, rows = verified.logits, self._texts.device, self._texts.rows
        if type(self._rule) is Greedy and self._processing.is_empty and not self._record.wants_scores:
            return logits.argmax(dim=-1).to(device), None, None  # the same in any dtype
        # A copy in float32, as vanilla's: processors may write into it.
        logits = logits.to(copy=True, dtype=torch.float32, device=device)
        scores = self._processing(logits, draft)
        if scores.numel() <= _MAX_SCORES or len(rows) == 1 or type(self._rule) is Greedy:
            chosen, is_bad = self._rule.choose_all(scores, draft, rows)
        else:  # row by row
            parts = [
                self._rule.choose_all(scores[row : row + 1], draft.of_row(row), rows[row : row + 1])
                for row in range(len(rows))
            ]
            chosen = torch.cat([part[0] for part in parts])
            is_bad = torch.cat([part[1] for part in parts if part[1] is not None])
        return chosen, is_bad, (scores, logits) if self._record.wants_scores else None

    def _padded(self, chosen: torch.Tensor, ends: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows in step get, padding behind their ends included, and in which states they are over by then."""
        if self._over is None:
            self._over = torch.tensor(self._texts.has_ended, device=chosen.device)[:, None]
        ends = torch.zeros_like(chosen, dtype=torch.bool) if ends is None else ends
        over = torch.cat([self._over, ends], dim=1).long().cummax(dim=1).values.bool()
        if self._pad_id is not None:
            chosen = chosen.masked_fill(over[:, :-1], self._pad_id)
        return chosen, over[:, 1:]

    def _outcome(self, row: int, read: dict[str, list[int]], num_nodes: int) -> Outcome:
        """One row's verdict, of what was read of it."""
        is_closed = bool(read.get("is_closed", [0])[0])
        if "on_path" in read:
            path = tuple(state - 1 for state, is_on in enumerate(read["on_path"]) if is_on and state)
            has_children = bool(read["has_children"][0])
        else:
            path, has_children = tuple(range(read["leaf"][0])), read["leaf"][0] < num_nodes
        tokens = tuple(read["tokens"][: len(path) + (not is_closed)])
        has_ended = bool(read.get("has_ended", [0])[0]) or self._ends.is_full(self._texts.lengths[row] + len(tokens))
        return Outcome(len(path) + (has_children and not is_closed), path, tokens, has_ended)

    def _agreed(self, outcomes: Outcomes) -> Outcomes | None:
        """Make the draws and tell the streamer; what is left of the outcomes where either stops, `None` if nothing."""
        rows, self._error = self._texts.rows, None
        if self._streamer is None:
            return outcomes if self._rule.commit(rows, outcomes.num_committed) else None
        for index, tokens in enumerate(zip(*(outcome.token_ids for outcome in outcomes.rows), strict=True)):
            if not self._rule.commit(rows, [1] * len(rows)):
                return outcomes.cut(index) if index else None
            try:
                self._streamer.put(torch.tensor(tokens))  # on the CPU, as vanilla's
            except BaseException as error:  # the text ends here; the caller gets it
                self._error = error
                return outcomes.cut(index + 1)
        return outcomes

    def _with_ends(self, outcomes: Outcomes, over: torch.Tensor) -> Outcomes:
        """Of outcomes that were cut, those with the ends of rows in step; a token that raised an error ends none."""
        num_tokens = outcomes.num_committed[0] - (self._error is not None)
        if not num_tokens:
            return outcomes
        ended = over[:, num_tokens - 1].tolist()
        return Outcomes(tuple(replace(each, has_ended=has) for each, has in zip(outcomes.rows, ended, strict=True)))

    def _write(self, outcomes: Outcomes, tokens: torch.Tensor, verified: Verified, scores: Any) -> None:
        rows = list(self._texts.rows)
        for row, outcome in zip(rows, outcomes.rows, strict=True):
            if outcome.has_ended and not self._is_in_step:
                self._rule.end(row)
        if scores is not None and self._record.is_by_rows:
            for index, (row, outcome) in enumerate(zip(rows, outcomes.rows, strict=True)):
                self._record.add_scores_of(row, *(each[index, outcome.states] for each in scores))
        elif self._record.wants_any:
            for state in outcomes.rows[0].states:
                self._record.add_states(verified, state)
                if scores is not None:
                    self._record.add_scores(*(each[:, state].clone() for each in scores))
        self._texts.grow(tokens, outcomes)


def _on_host(**parts: torch.Tensor | None) -> list[dict[str, list[int]]]:
    """Tensors `[rows, n]` in one copy: of each row, by name, its numbers; what is `None` is left out."""
    known = {name: part for name, part in parts.items() if part is not None}
    ends, end = {}, 0
    for name, part in known.items():
        ends[name] = (end, end + part.shape[1])
        end += part.shape[1]
    whole = torch.cat([part.long() for part in known.values()], dim=1).tolist()
    return [{name: row[first:last] for name, (first, last) in ends.items()} for row in whole]


def _each(chosen: torch.Tensor, ends: torch.Tensor | None, draft: Draft) -> _Path:
    """How far each row goes: along nodes that were chosen, until the text ends; `chosen`, `ends` `[rows, states]`."""
    tree = draft.tree
    if tree is None:
        closed = None if ends is None else pad(ends, (1, -1))  # by the token that leads to a state
        return _chain(chosen[:, :-1] == draft.token_ids, closed)
    before = tree.parents[:, 1:]
    passes = (chosen.gather(1, before) == draft.token_ids) & (draft.token_ids >= 0)
    closed = None
    if ends is not None:
        closed = pad(ends.gather(1, before), (1, 0))
        passes = passes & ~closed.gather(1, before)
    passes = pad(passes, (1, 0), value=True) & (chosen >= 0)  # a rule that goes one way chooses nowhere else
    alive = ~(tree.ancestors & ~passes[:, None]).any(dim=-1)
    leaf = (tree.depths * alive).argmax(dim=1, keepdim=True)
    on_path = tree.ancestors.gather(1, leaf[..., None].expand(-1, -1, alive.shape[1]))[:, 0]
    depth = tree.depths.gather(1, leaf)
    is_closed = None if closed is None else closed.gather(1, leaf)
    return _Path(leaf, depth, on_path, is_closed, alive & (tree.depths == depth))


def _together(chosen: torch.Tensor, over: torch.Tensor, draft: Draft) -> tuple[_Path, torch.Tensor]:
    """How far rows in step go: as far as all of them, until all are over; and which are over then, `[rows, 1]`."""
    num_rows = len(chosen)
    right = (chosen[:, :-1] == draft.token_ids).all(dim=0, keepdim=True).expand(num_rows, -1)
    closed = pad(over.all(dim=0, keepdim=True).expand(num_rows, -1), (1, -1))
    path = _chain(right, closed)
    return path, over.gather(1, path.num_committed[:, None] - 1)


def _chain(right: torch.Tensor, closed: torch.Tensor | None) -> _Path:
    """The path along a chain; `right` `[rows, nodes]`, `closed` `[rows, states]`."""
    passes = right if closed is None else right & ~closed[:, :-1]
    leaf = passes.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    states = torch.arange(right.shape[1] + 1, device=leaf.device)
    return _Path(leaf, leaf, states <= leaf, None if closed is None else closed.gather(1, leaf), states == leaf)


def _in_order(chosen: torch.Tensor, path: _Path, tree: Tree) -> torch.Tensor:
    """The choices along a tree's path, one behind the other, `[rows, states]`; behind them anything."""
    num_states = chosen.shape[1]
    where = torch.where(path.on_path, tree.depths, num_states)
    ordered = chosen.new_zeros(len(chosen), num_states + 1).scatter_(1, where, chosen)
    return ordered[:, :num_states]


def _has_children(path: _Path, tree: Tree, draft: Draft) -> torch.Tensor:
    """Whether something was proposed behind a path's end, `[rows, 1]`."""
    follows = path.ends.gather(1, tree.parents[:, 1:])
    return (follows & (draft.token_ids >= 0)).any(dim=1, keepdim=True)
