"""A tree source that knows what vanilla will write: random trees in which a path of forced length is right."""

import random
from collections.abc import Sequence

import torch

from hfspec import Context, Draft, DraftSession, DraftSource, Outcome, RoundBudget
from tests.models import VOCAB


class ScriptedTrees(DraftSource):
    """Proposes random trees: nodes, shapes and wrong tokens by `seed`, a right path by script.

    Args:
        text: vanilla's whole output `[rows, length]`, prompt included.
        accepts: length of the right path in each round, over and over; each row begins at another point of them. What
            is longer than the tree makes the tree a chain of right tokens.
        sizes: nodes in each round, in the same way; any size that the budget allows, if not said.
        has_duplicates: whether siblings may have the same token, those on the right path included.
    """

    def __init__(
        self,
        text: torch.Tensor,
        accepts: Sequence[int],
        sizes: Sequence[int] = (),
        has_duplicates: bool = False,
        seed: int = 0,
        vocab: int = VOCAB,
    ) -> None:
        self.text = text.tolist()
        self.accepts = tuple(accepts)
        self.sizes = tuple(sizes)
        self.has_duplicates = has_duplicates
        self.vocab = vocab
        self.random = random.Random(seed)
        self.drafts: list[Draft] = []
        self.allowed: list[bool] = []
        #: For each verdict how long the right path was, and the verdict.
        self.verdicts: list[tuple[int, Outcome]] = []

    def start(self, context: Context) -> DraftSession:
        return _Session(self, context)

    @property
    def accepted(self) -> set[int]:
        """How many nodes were accepted, in all rounds."""
        return {outcome.num_accepted for _, outcome in self.verdicts}

    @property
    def has_branched(self) -> bool:
        """Whether an accepted path was ever not the tree's first nodes."""
        return any(not outcome.is_straight for _, outcome in self.verdicts)

    def assert_forced(self) -> None:
        """Every tree was accepted as far as its right path goes, unless the text has ended before."""
        for num_right, outcome in self.verdicts:
            if not outcome.has_ended:
                assert outcome.num_accepted == num_right
                assert outcome.num_committed == num_right + 1


class _Session(DraftSession):
    def __init__(self, source: ScriptedTrees, context: Context) -> None:
        self._source = source
        self._context = context
        self._num_drafts = context.row
        self._num_right = 0

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        source, turn = self._source, self._num_drafts
        self._num_drafts += 1
        size = source.sizes[turn % len(source.sizes)] if source.sizes else source.random.randint(1, 32)
        size = min(size, budget.num_tokens)
        right = source.text[self._context.row][input_ids.shape[1] :]
        self._num_right = min(source.accepts[turn % len(source.accepts)], size, len(right))
        tokens, parents = self._tree(size, self._num_right, right)
        draft = Draft(torch.tensor([tokens]), parents=torch.tensor([parents]))
        source.drafts.append(draft)
        source.allowed.append(budget.allows_trees)
        return draft

    def observe(self, outcome: Outcome) -> None:
        self._source.verdicts.append((self._num_right, outcome))

    def _tree(self, size: int, num_right: int, right: Sequence[int]) -> tuple[list[int], list[int]]:
        dice, has_duplicates = self._source.random, self._source.has_duplicates
        on_path = dict(zip(sorted(dice.sample(range(size), num_right)), range(num_right), strict=True))
        tokens: list[int] = []
        parents: list[int] = []
        right_nodes = [[-1], *([] for _ in range(num_right))]  # by depth
        for node in range(size):
            if node in on_path:
                depth, parent = on_path[node], dice.choice(right_nodes[on_path[node]])
                token = right[depth]
            else:
                parent = dice.randrange(-1, node)
                depth = next((depth for depth, nodes in enumerate(right_nodes) if parent in nodes), -1)
                siblings = {tokens[each] for each in range(node) if parents[each] == parent}
                wrong = right[depth] if 0 <= depth < len(right) else -1
                if has_duplicates and 0 <= depth < num_right and dice.random() < 0.5:
                    token = wrong  # right after all, once more
                elif has_duplicates and siblings - {wrong} and dice.random() < 0.5:
                    token = dice.choice(sorted(siblings - {wrong}))
                else:
                    taken = {wrong} if has_duplicates else siblings | {wrong}
                    token = dice.choice([each for each in range(3, self._source.vocab) if each not in taken])
            if 0 <= depth < num_right and token == right[depth]:
                right_nodes[depth + 1].append(node)
            tokens.append(token)
            parents.append(parent)
        return tokens, parents
