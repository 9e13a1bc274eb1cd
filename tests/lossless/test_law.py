"""Rejection keeps the law: whatever the draft proposes, what is chosen follows the target's distribution.

Exact on a tiny vocabulary (every coin and every draw enumerated), and by frequency over many draws. Each
statement has a control: a rule that is wrong in the reported way fails the same bound.
"""

from typing import Any

import pytest
import torch

import hfspec
from hfspec import Context, Draft, DraftSession, DraftSource, RoundBudget
from hfspec.accept import rules
from hfspec.accept.rules import Proposal, Rejection
from hfspec.draft.model import ModelDraft
from tests.laws import total_variation
from tests.models import VOCAB, ForcingProcessor, build, noisy, plain_text, prompt, rows, shared

#: Target and draft laws over four tokens, with zeros in either.
LAWS = {
    "alike": ([0.4, 0.3, 0.2, 0.1], [0.3, 0.4, 0.1, 0.2]),
    "far apart": ([0.7, 0.1, 0.1, 0.1], [0.05, 0.05, 0.1, 0.8]),
    "equal": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "zeros in the target": ([0.5, 0.0, 0.5, 0.0], [0.1, 0.4, 0.1, 0.4]),
    "zeros in the draft": ([0.25, 0.25, 0.25, 0.25], [0.0, 0.6, 0.0, 0.4]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
    "one-hot target": ([0.0, 1.0, 0.0, 0.0], [0.2, 0.2, 0.3, 0.3]),
}
#: Coins in the middle of each of so many equal parts of 0 … 1: their mean is the integral but for 1/(2n).
NUM_COINS = 2000


class Enumerated:
    """Stands in for torch's random functions in `rules`: the coin is given, and draws are noted, not made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coin = 0.0
        self.drawn_from: torch.Tensor | None = None
        monkeypatch.setattr(rules.torch, "rand", lambda *size, **kwargs: torch.tensor(self.coin))
        monkeypatch.setattr(rules.torch, "multinomial", self._multinomial)

    def _multinomial(self, weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        self.drawn_from = weights[0] / weights.sum()
        return torch.zeros(1, 1, dtype=torch.long)

    def law_of(self, rule: Rejection, target: torch.Tensor, proposal: Proposal | None) -> torch.Tensor:
        """The exact law of what `rule` chooses, over all coins and draws."""
        law = torch.zeros_like(target)
        coins = (torch.arange(NUM_COINS) + 0.5) / NUM_COINS
        for self.coin in coins.tolist() if proposal is not None else [0.5]:
            self.drawn_from = None
            chosen = rule.choose(target.log()[None], proposal and [proposal], [0])
            law += torch.eye(len(target))[int(chosen)] if self.drawn_from is None else self.drawn_from
        return law / law.sum()


def proposal(token: int, law: torch.Tensor | None = None) -> Proposal:
    """One token at a position, drawn from `law` `[vocab]`, or chosen."""
    return Proposal([token], None if law is None else law[None])


@pytest.fixture
def enumerated(monkeypatch):
    return Enumerated(monkeypatch)


class SoftmaxOfAChosenToken(Rejection):
    """Wrong: scores a chosen token with the draft's own softmax, as if it had been drawn from it."""

    def choose(self, scores, proposals, rows):
        law = torch.tensor([[0.3, 0.4, 0.1, 0.2]])
        return super().choose(scores, [Proposal(each.token_ids, law) for each in proposals], rows)


@pytest.mark.parametrize("name", LAWS)
def test_a_drawn_draft_leaves_the_targets_law(enumerated, name):
    """Cases 5, 6: over all draft tokens, coins and draws, the chosen token has exactly the target's law."""
    target, draft = map(torch.tensor, LAWS[name])
    law = sum(
        draft[token] * enumerated.law_of(Rejection(), target, proposal(token, draft))
        for token in range(4)
        if draft[token] > 0
    )
    assert total_variation(law, target) < 1 / NUM_COINS


@pytest.mark.parametrize("name", LAWS)
def test_a_law_may_be_as_coarse_as_half_precision(enumerated, name):
    """A law that sums to 1 but for rounding was drawn from as if it did: nothing of its rounding gets into the text."""
    target, draft = map(torch.tensor, LAWS[name])
    rounded = draft * 1.0009  # as far from 1 as a source's law may be
    laws = [
        [enumerated.law_of(Rejection(), target, proposal(token, law)) for token in range(4) if draft[token] > 0]
        for law in (draft, rounded)
    ]
    assert all(total_variation(*pair) < 1e-5 for pair in zip(*laws, strict=True))


@pytest.mark.parametrize("token", range(4))
@pytest.mark.parametrize("name", LAWS)
def test_a_chosen_draft_leaves_the_targets_law(enumerated, name, token):
    """A token that was chosen, not drawn, counts as a law with all its weight on it."""
    target = torch.tensor(LAWS[name][0])
    law = enumerated.law_of(Rejection(), target, proposal(token))
    assert total_variation(law, target) < 1 / NUM_COINS


def test_the_wrong_law_is_seen_to_be_wrong(enumerated):
    """The control: a chosen token scored with the draft's softmax leaves another law."""
    target = torch.tensor(LAWS["alike"][0])
    law = enumerated.law_of(SoftmaxOfAChosenToken(), target, proposal(1))
    assert total_variation(law, target) > 0.1


def test_no_proposal_is_a_plain_draw(enumerated):
    """After the last draft token the target's own law is drawn from."""
    target = torch.tensor(LAWS["alike"][0])
    assert total_variation(enumerated.law_of(Rejection(), target, None), target) < 1e-6


@pytest.mark.parametrize("draft", [None, torch.tensor([0.0, 0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])])
def test_a_coin_of_zero_accepts_no_impossible_token(enumerated, draft):
    """The comparison is strict, so a token the target never gives is not accepted even by a coin of 0."""
    enumerated.coin = 0.0
    for token in (0, 1):
        enumerated.drawn_from = None
        Rejection().choose(torch.tensor([[-torch.inf, -torch.inf, 0.0, 0.0]]), [proposal(token, draft)], [0])
        assert enumerated.drawn_from is not None, "it was accepted"
        assert enumerated.drawn_from[token] == 0


def test_equal_laws_have_no_residual_and_no_nan(enumerated):
    """Where the residual sums to 0 the target's law is drawn from, and nothing is nan."""
    target = torch.tensor([0.25, 0.25, 0.25, 0.25])
    enumerated.coin = 1.0
    Rejection().choose(target.log()[None], [proposal(2, target)], [0])
    assert enumerated.drawn_from is not None
    assert torch.allclose(enumerated.drawn_from, target)


# Whole calls, by frequency. The first token is forced: it comes before any draft.

NUM_CALLS = 400
FIRST = 48


def call(ids: torch.Tensor) -> dict[str, Any]:
    forced = ForcingProcessor(ids.shape[1], [FIRST])
    return {"max_new_tokens": 3, "do_sample": True, "temperature": 4.0, "top_k": 5, "logits_processor": [forced]}


def second_token_law(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Vanilla's law of the token after the forced one, worked out from the logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.cat([ids, rows(FIRST)], dim=-1)).logits[0, -1].float() / 4.0
    best = logits.topk(5)
    return torch.zeros_like(logits).scatter(0, best.indices, best.values.softmax(-1))


def distance_over_calls(draft: Any) -> tuple[float, float]:
    """Total variation between the second token's frequencies and its law; the acceptance rate."""
    model, ids = shared(), prompt(5)
    counts = torch.zeros(VOCAB)
    with hfspec.patched(model, draft, draft_budget=2, acceptance="rejection"):
        for seed in range(NUM_CALLS):
            torch.manual_seed(seed)
            counts[model.generate(ids, **call(ids))[0, 6]] += 1
        rate = hfspec.stats(model).total.acceptance_rate
    law = second_token_law(model, ids)
    assert not bool((counts[law == 0] > 0).any()), "a token outside the target's support"
    return total_variation(counts / counts.sum(), law), rate


@pytest.mark.parametrize("in_step", [False, True], ids=["own pace", "in step"])
def test_rows_of_a_batch_have_the_targets_law_too(in_step):
    """Rows that go on each at its own pace, and rows that go on together, are drawn as rows by themselves are."""
    model, ids, num_rows = shared(), prompt(1), 2 if in_step else 8
    batch = {"forced_bos_token_id": FIRST, "return_dict_in_generate": in_step, "logits_processor": []}
    batch |= {"output_hidden_states": in_step}
    counts = torch.zeros(VOCAB)
    with hfspec.patched(model, noisy(scale=0.05 if in_step else 0.1), draft_budget=2, acceptance="rejection"):
        for seed in range(NUM_CALLS // num_rows):
            torch.manual_seed(seed)
            out = model.generate(ids.expand(num_rows, -1), **(call(ids) | batch))
            tokens = out.sequences if in_step else out
            assert (tokens[:, 1] == FIRST).all()
            counts += torch.bincount(tokens[:, 2], minlength=VOCAB)
        total = hfspec.stats(model).total
    assert 0.2 < total.acceptance_rate < 0.95, "the test needs acceptances and rejections"
    assert bool(total.lockstep_reasons) == in_step
    law = second_token_law(model, ids)
    assert not bool((counts[law == 0] > 0).any()), "a token outside the target's support"
    assert total_variation(counts / counts.sum(), law) < 0.06


class Lying(DraftSource):
    """Wrong: hands over the law before the temperature, having drawn from the one after it."""

    def __init__(self, model: Any) -> None:
        self._inner = ModelDraft(model)

    def start(self, context: Context) -> DraftSession:
        session = self._inner.start(context)
        honest = session.propose

        def propose(input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
            draft = honest(input_ids, budget)
            sharp = draft.probs**4
            return Draft(draft.token_ids, probs=sharp / sharp.sum(-1, keepdim=True))

        session.propose = propose
        return session


def test_whole_calls_converge_on_the_targets_law():
    """Cases 5, 6: texts under rejection have vanilla's law, and a draft that lies about its own law is found out."""
    bound = 0.06
    honest, rate = distance_over_calls(noisy(scale=0.1))
    assert 0.2 < rate < 0.95, "the test needs acceptances and rejections"
    assert honest < bound
    lying, _ = distance_over_calls(Lying(noisy(scale=0.1)))
    assert lying > 2 * bound


def test_rejection_depends_on_the_seed_alone():
    """Under rejection the same seed and the same draft give the same text."""
    texts = []
    with hfspec.patched(shared(), noisy(), acceptance="rejection", draft_budget=3):
        for _ in range(2):
            torch.manual_seed(5)
            texts.append(shared().generate(prompt(), do_sample=True, max_new_tokens=20))
    assert torch.equal(*texts)


def test_identical_laws_are_always_accepted():
    """A draft with the target's own weights and law is accepted with every coin."""
    with hfspec.patched(shared(), build(), acceptance="rejection", draft_budget=3):
        shared().generate(prompt(), do_sample=True, max_new_tokens=60, top_k=20)
        assert hfspec.stats(shared()).acceptance_rate == 1.0


def test_rejection_of_a_greedy_call_is_greedy():
    """Without sampling there is nothing to reject by: the tokens are vanilla's."""
    with hfspec.patched(shared(), noisy(), acceptance="rejection", draft_budget=3):
        fast = shared().generate(prompt(), max_new_tokens=20)
    assert torch.equal(fast, plain_text(shared(), prompt(), max_new_tokens=20))
