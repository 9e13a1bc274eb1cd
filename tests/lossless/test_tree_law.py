"""Rejection over trees keeps the law: two tokens behind any tree of drawn children follow the target's distribution.

Exact on tiny vocabularies: every draft is enumerated with its probability, and every coin and draw integrated out
through the rule's own calls of `torch.rand` and `torch.multinomial`; then by frequency, through `generate()`. Each
statement has a control that must fail.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import hfspec
from hfspec import Context, Draft, DraftSession, DraftSource, RoundBudget
from hfspec.accept import rules
from hfspec.accept.rules import Proposal, Rejection
from hfspec.accept.vectorised import Vectorised
from tests.laws import total_variation
from tests.models import build, prompt

#: float32 sums of a few terms, over thousands of drafts.
EXACT = 2e-5
#: A coin that rejects whatever can be rejected: the greatest below 1.
HIGH = 1 - 2.0**-24


def law_of(vocab: int, seed: int, sharpness: float = 1.5) -> torch.Tensor:
    """A random law over a few tokens."""
    return (sharpness * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))).softmax(dim=-1)


#: Laws of the first token and, given it, of the second: of the target, and of the draft.
def laws_of(vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return law_of(vocab, seed), torch.stack([law_of(vocab, seed + 1 + token) for token in range(vocab)])


def drawn(law: torch.Tensor, count: int) -> Iterator[tuple[tuple[int, ...], torch.Tensor, float]]:
    """All ways to draw some tokens without replacement: the tokens, what each was drawn from, and how likely."""
    for tokens in itertools.permutations(range(len(law)), count):
        left, rows, likely = law.double(), [], 1.0
        for token in tokens:
            rows.append(left)
            likely *= float(left[token])
            left = left.clone()
            left[token] = 0
            left = left / left.sum() if left.sum() > 0 else left
        if likely > 0:
            yield tokens, torch.stack(rows).float(), likely


class Chance:
    """Stands in for torch's random functions in `rules`: coins are given, and draws are noted, not made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coins = torch.zeros(0)
        self.num_coins = 0
        self.weights: torch.Tensor | None = None
        monkeypatch.setattr(rules.torch, "rand", self._rand)
        monkeypatch.setattr(rules.torch, "multinomial", self._multinomial)

    def _rand(self, *size: Any, **_: Any) -> torch.Tensor:
        if size == ((),):
            self.num_coins += 1
            return self.coins[self.num_coins - 1]
        assert size == tuple(self.coins.shape)
        return self.coins

    def _multinomial(self, weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        self.weights = weights / weights.sum(dim=-1, keepdim=True)
        return torch.full((len(weights), 1), -2)  # "drawn", to be told from any token


@pytest.fixture
def chance(monkeypatch):
    return Chance(monkeypatch)


def integrated(
    outcome: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], num_cases: int, num_coins: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All the ways that the coins can fall: coins, which case they are of, and the probability of such coins.

    Knows of the rule only that it looks at coins in order, and that each has one point where what happens changes;
    the point is found by halving.

    Args:
        outcome: what happens in cases `[n]` with coins `[n, num_coins]`, as numbers `[n, …]`.
    """
    case = torch.arange(num_cases)
    coins = torch.full((num_cases, num_coins), HIGH)
    weights = torch.ones(num_cases, dtype=torch.float64)
    for coin in range(num_coins):
        high, low = coins.clone(), coins.clone()
        low[:, coin] = 0.0
        at_low = outcome(case, low)
        matters = (at_low != outcome(case, high)).flatten(1).any(dim=1)
        if not bool(matters.any()):
            continue
        split, below, above = case[matters], low[matters], high[matters]
        is_low = at_low[matters]
        for _ in range(26):
            middle = above.clone()
            middle[:, coin] = (below[:, coin] + above[:, coin]) / 2
            same = (outcome(split, middle) == is_low).flatten(1).all(dim=1)
            below[:, coin] = torch.where(same, middle[:, coin], below[:, coin])
            above[:, coin] = torch.where(same, above[:, coin], middle[:, coin])
        share = above[:, coin].double()
        accepted = coins[matters].clone()
        accepted[:, coin] = 0.0
        case = torch.cat([case[~matters], split, split])
        coins = torch.cat([coins[~matters], accepted, high[matters]])
        weights = torch.cat([weights[~matters], weights[matters] * share, weights[matters] * (1 - share)])
    return case, coins, weights


# One position at a time


def law_of_choices(chance: Chance, target: torch.Tensor, draft: torch.Tensor, num_children: int, lies: bool) -> Any:
    """The exact law of what `choose` chooses, over all drafts of so many children."""
    law = torch.zeros(len(target), dtype=torch.float64)
    for tokens, probs, likely in drawn(draft, num_children):
        proposal = Proposal(tokens, draft.expand(num_children, -1) if lies else probs)

        def outcome(case: torch.Tensor, coins: torch.Tensor, proposal: Proposal = proposal) -> torch.Tensor:
            found = []
            for chance.coins in coins:
                chance.num_coins, chance.weights = 0, None
                chosen = int(Rejection().choose(target.log()[None], [proposal], [0]))
                found.append(torch.eye(len(target))[chosen] if chance.weights is None else chance.weights[0])
            return torch.stack(found)

        case, coins, weights = integrated(outcome, 1, num_children)
        law += likely * (weights[:, None] * outcome(case, coins)).sum(dim=0)
    return law


@pytest.mark.parametrize("num_children", [1, 2, 3])
@pytest.mark.parametrize(("vocab", "seed"), [(3, 0), (4, 10), (5, 20)])
def test_the_walks_choice_among_children_has_the_targets_law(chance, vocab, seed, num_children):
    """Drawn without replacement, judged one after the other: what is chosen is as if nothing had been proposed."""
    target, draft = law_of(vocab, seed), law_of(vocab, seed + 100)
    assert total_variation(law_of_choices(chance, target, draft, num_children, False), target) < EXACT


def test_laws_that_forget_what_was_drawn_are_seen(chance):
    """The control: children scored as if each had been drawn from the whole law leave another law."""
    target, draft = law_of(4, 10), law_of(4, 110)
    assert total_variation(law_of_choices(chance, target, draft, 3, True), target) > 0.01


# A tree of depth two


#: Parents of trees: children of the root first; in turns; a chain beside a leaf.
SHAPES = {
    "2 children of 2": (-1, -1, 0, 0, 1, 1),
    "depth first": (-1, 0, 0, -1, 3, 3),
    "3 children, one with 2": (-1, -1, -1, 1, 1),
    "a chain and a leaf": (-1, 0, -1),
}


def drafts_of(shape: Sequence[int], laws: Any) -> Iterator[tuple[list[int], torch.Tensor, float]]:
    """All drafts of a shape: tokens, what each was drawn from, and how likely the whole is."""
    first, second = laws
    tops = [node for node, parent in enumerate(shape) if parent < 0]
    for tokens, probs, likely in drawn(first, len(tops)):
        families = [[node for node, parent in enumerate(shape) if parent == top] for top in tops]
        ways = [list(drawn(second[token], len(f))) for token, f in zip(tokens, families, strict=True) if f]
        for below in itertools.product(*ways):
            ids, rows, chance = [-1] * len(shape), [torch.empty(0)] * len(shape), likely
            groups = [(tops, tokens, probs)]
            groups += [(f, *way[:2]) for f, way in zip([f for f in families if f], below, strict=True)]
            for nodes, some, theirs in groups:
                for node, token, row in zip(nodes, some, theirs, strict=True):
                    ids[node], rows[node] = token, row
            for way in below:
                chance *= way[2]
            yield ids, torch.stack(rows), chance


def law_of_two(
    chance: Chance, shape: Sequence[int], target: Any, draft: Any, kind: str, rule: Rejection | None = None
) -> torch.Tensor:
    """The exact joint law of two tokens behind trees judged by `choose_all`; a second that is not there is plain."""
    rule = rule or Rejection()
    ids, probs, likely = (list(each) for each in zip(*drafts_of(shape, draft), strict=True))
    tokens, laws = torch.tensor(ids), torch.stack(probs)
    first, second = target
    vocab, num_drafts, num_nodes = len(first), *tokens.shape
    parents = torch.tensor([shape] * num_drafts)
    is_top = torch.tensor(shape) < 0
    behind = [first.expand(num_drafts, -1)]
    # Behind a node of depth 1 the target's law of a second token; behind one of depth 2 any.
    behind += [second[tokens[:, node]] if is_top[node] else first.expand(num_drafts, -1) for node in range(num_nodes)]
    scores = torch.stack(behind, dim=1).log()
    if kind == "chosen":
        laws = None
    elif kind == "whole laws":
        laws = torch.where(
            is_top[None, :, None], draft[0], torch.stack([draft[1][tokens[:, max(0, p)]] for p in shape], 1)
        )

    def settled(case: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
        chance.coins = coins
        given = None if laws is None else laws[case]
        chosen, is_bad = rule.choose_all(
            scores[case], Draft(tokens[case], parents[case], given), list(range(len(case)))
        )
        assert not bool(is_bad.any())
        joint = torch.zeros(len(case), vocab, vocab)
        for way in range(len(case)):
            joint[way] = joint_of(chosen[way].tolist(), tokens[case[way]].tolist(), chance.weights[way])
        return joint

    def joint_of(chosen: list[int], ids: list[int], weights: torch.Tensor) -> torch.Tensor:
        joint = torch.zeros(vocab, vocab)
        if chosen[0] == -2:  # drawn at the root
            return weights[:, None] * second
        top = next(node for node in range(num_nodes) if shape[node] < 0 and ids[node] == chosen[0])
        at = chosen[top + 1]
        joint[chosen[0]] = weights if at == -2 else torch.eye(vocab)[at]
        return joint

    case, coins, weights = integrated(settled, num_drafts, num_nodes)
    weights = weights * torch.tensor(likely, dtype=torch.float64)[case]
    return (weights[:, None, None] * settled(case, coins)).sum(dim=0)


@pytest.mark.parametrize("kind", ["drawn", "chosen"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("vocab", "seed"), [(3, 0), pytest.param(4, 40, marks=pytest.mark.slow)])
def test_two_tokens_behind_a_tree_have_the_targets_law(chance, vocab, seed, shape, kind):
    """Over all drafts, coins and draws, the joint law of two tokens is exactly the target's."""
    target, draft = laws_of(vocab, seed), laws_of(vocab, seed + 500)
    joint = target[0][:, None] * target[1]
    assert total_variation(law_of_two(chance, SHAPES[shape], target, draft, kind), joint) < EXACT


def test_five_tokens(chance):
    """The same over a vocabulary of five, three children at the root."""
    target, draft = laws_of(5, 60), laws_of(5, 600)
    joint = target[0][:, None] * target[1]
    assert total_variation(law_of_two(chance, (-1, -1, -1), target, draft, "drawn"), joint) < EXACT


def test_wrong_laws_behind_a_tree_are_seen(chance):
    """The control: children drawn without replacement, handed over with the whole law, bias the text."""
    target, draft = laws_of(4, 40), laws_of(4, 540)
    joint = target[0][:, None] * target[1]
    law = law_of_two(chance, SHAPES["2 children of 2"], target, draft, "whole laws")
    assert total_variation(law, joint) > 0.01


class ForgetsRejections(Rejection):
    """Wrong: each child is judged by the whole of the target's law, as if none had been rejected before."""

    def choose_all(self, scores: torch.Tensor, draft: Draft, rows: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rules, "_remaining", lambda left, drawn_from: left)
            return super().choose_all(scores, draft, rows)


def test_a_rule_that_forgets_rejections_is_seen(chance):
    """The control of the rule."""
    target, draft = laws_of(3, 0), laws_of(3, 500)
    joint = target[0][:, None] * target[1]
    law = law_of_two(chance, SHAPES["2 children of 2"], target, draft, "drawn", ForgetsRejections())
    assert total_variation(law, joint) > 0.01


# By frequency, through generate()


class DrawnTrees(DraftSource):
    """Two tokens drawn without replacement, and two behind each, from laws that are not the target's.

    Args:
        is_honest: whether each is handed over with what it was drawn from, or with the whole law.
    """

    def __init__(self, is_honest: bool, vocab: int) -> None:
        self.is_honest = is_honest
        self.laws = laws_of(vocab, 700)

    def start(self, context: Context) -> DraftSession:
        return _DrawnSession(self)


class _DrawnSession(DraftSession):
    def __init__(self, source: DrawnTrees) -> None:
        self._source = source

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        if budget.num_tokens < 6:  # the text is about to end
            return Draft.empty(1, input_ids.device)
        first, second = self._source.laws
        tokens, rows = self._two(first)
        for token in tuple(tokens):
            behind, theirs = self._two(second[token])
            tokens += behind
            rows += theirs
        parents = [-1, -1, 0, 0, 1, 1]
        return Draft(torch.tensor([tokens]), torch.tensor([parents]), torch.stack(rows)[None])

    def _two(self, law: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
        one = int(torch.multinomial(law, 1))
        left = law.clone()
        left[one] = 0
        left = left / left.sum()
        return [one, int(torch.multinomial(left, 1))], [law, left if self._source.is_honest else law]


#: Tokens a text, and texts in all, many of them in a call.
NUM_NEW, NUM_TEXTS, TEXTS_A_CALL = 8, 6000, 100
#: Temperature at which all texts are likely enough to be counted.
HEAT = 3.0


def distance(is_honest: bool, is_walked: bool) -> float:
    """Chi-squared of the second and third token of many texts, by how many cells it has."""
    model = build("llama", vocab_size=4, dtype=torch.float32, pad_token_id=None, bos_token_id=None)
    ids = prompt(5, vocab=4)
    texts = torch.tensor(list(itertools.product(range(4), repeat=3)))
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(64, -1), texts], dim=1)).logits[:, 4:7]
    likely = (logits / HEAT).softmax(dim=-1).gather(2, texts[..., None])[..., 0].prod(dim=1)
    counts = torch.zeros(64)
    call: dict[str, Any] = {"max_new_tokens": NUM_NEW, "do_sample": True, "top_k": 0, "temperature": HEAT}
    call |= {"num_return_sequences": TEXTS_A_CALL, "attention_mask": torch.ones_like(ids)}
    source = DrawnTrees(is_honest, 4)
    with pytest.MonkeyPatch.context() as patch, hfspec.patched(model, source, draft_budget=6, acceptance="rejection"):
        if is_walked:
            patch.setattr(Vectorised, "settle", Vectorised._by_walking)
        for _ in range(NUM_TEXTS // TEXTS_A_CALL):
            texts = model.generate(ids, **call)[:, 5:8]
            counts += torch.bincount(texts @ torch.tensor([16, 4, 1]), minlength=64)
        assert hfspec.stats(model).total.accepted_tokens > 0
        assert not hfspec.stats(model).total.chain_reasons
    expected = likely * counts.sum()
    is_counted = expected > 5
    return float(((counts - expected) ** 2 / expected)[is_counted].sum()) / int(is_counted.sum())


@pytest.mark.slow
@pytest.mark.parametrize("is_walked", [False, True], ids=["vectorised", "walk"])
def test_texts_are_as_frequent_as_vanillas(is_walked):
    """Chi-squared a cell is about 1 for vanilla's law, and far above for trees that hand over wrong laws."""
    assert distance(True, is_walked) < 1.8
    assert distance(False, is_walked) > 3
