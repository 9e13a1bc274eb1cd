"""Random calls: whatever they ask for, patched `generate()` returns what unpatched returns."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import hfspec
from tests.models import (
    PAD,
    SUPPORTED,
    CountingProcessor,
    Scripted,
    both,
    char_tokenizer,
    noisy,
    plain_text,
    prompt,
    shared,
)

tokens = st.integers(3, 96)
budgets = st.one_of(
    st.sampled_from(["auto", "ratio"]),
    st.integers(1, 8),
    st.builds(
        hfspec.DraftBudget,
        min_tokens=st.integers(0, 2),
        max_tokens=st.integers(2, 8),
        policy=st.sampled_from(["measured", "ratio", "fixed"]),
    ),
)
processors = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.3, 2.0]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=3),
        "suppress_tokens": st.lists(tokens, min_size=1, max_size=20),
        "begin_suppress_tokens": st.lists(tokens, min_size=1, max_size=20),
        "sequence_bias": st.dictionaries(
            st.lists(tokens, min_size=1, max_size=2).map(tuple), st.floats(-6, 6), min_size=1, max_size=3
        ),
        "renormalize_logits": st.booleans(),
    },
)
warpers = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.3, 0.7, 1.5]),
        "top_k": st.sampled_from([0, 1, 3, 20, 200]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.02, 0.3]),
        "typical_p": st.sampled_from([0.4, 0.9]),
        "epsilon_cutoff": st.sampled_from([0.01]),
        "eta_cutoff": st.sampled_from([0.01]),
    },
)
#: Only with an end-of-text token do these mean anything.
eos_options = st.fixed_dictionaries(
    {},
    optional={
        "min_new_tokens": st.integers(1, 6),
        "forced_eos_token_id": st.just("the EOS token"),
        "exponential_decay_length_penalty": st.tuples(st.integers(1, 5), st.sampled_from([1.1, 1.5])),
    },
)


@dataclass
class Case:
    """A drawn call: the model, the prompt, and `generate()`'s keywords."""

    arch: str
    attn: str
    ids: torch.Tensor
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    is_stateful: bool = False

    @property
    def model(self):
        return shared(self.arch, attn=self.attn)

    def call(self) -> dict[str, Any]:
        extra = {"logits_processor": [CountingProcessor()]} if self.is_stateful else {}
        return self.options | extra

    def text(self) -> torch.Tensor:
        return plain_text(self.model, self.ids, self.seed, **self.call())


@st.composite
def cases(draw) -> Case:
    arch = draw(st.sampled_from(SUPPORTED))
    num_pads = draw(st.sampled_from([0, 0, 1, 5]))
    # With padding, eager attention in float64 is nan in vanilla itself where there is an RMSNorm.
    attn = "sdpa" if num_pads and arch != "gpt2" else draw(st.sampled_from(["eager", "sdpa"]))
    length = draw(st.sampled_from([1, 2, 7, 17, 33]))
    ids = torch.cat([torch.full((1, num_pads), PAD), prompt(length, seed=draw(st.integers(0, 99)))], dim=-1)
    case = Case(arch, attn, ids, seed=draw(st.integers(0, 99)), is_stateful=draw(st.booleans()))
    case.options["attention_mask"] = (ids != PAD).long()
    num_new = draw(st.sampled_from([1, 2, 9, 24]))
    if draw(st.booleans()):
        case.options["max_new_tokens"] = num_new
    else:
        case.options["max_length"] = ids.shape[1] + num_new
    case.options |= draw(processors)
    if draw(st.booleans()):
        case.options |= {"do_sample": True} | draw(warpers)
    draw_stop(draw, case, num_new)
    return case


def draw_stop(draw, case: Case, num_new: int) -> None:
    """Make something that vanilla really writes the end of the text, so that it falls in mid-block."""
    kind = draw(st.sampled_from(["length", "int", "list", "tensor", "string"]))
    if kind == "length":
        return
    written = case.text()[0, case.ids.shape[1] :].tolist()
    at = draw(st.integers(0, len(written) - 1))
    if kind == "string":
        tokenizer = char_tokenizer()
        stop = tokenizer.decode(written[at : at + draw(st.integers(1, 3))])
        case.options |= {"stop_strings": stop, "tokenizer": tokenizer}
        return
    eos: Any = written[at]
    if kind == "list":
        eos = [eos, draw(tokens)]
    elif kind == "tensor":
        eos = torch.tensor([eos])
    case.options |= {"eos_token_id": eos, "pad_token_id": PAD}
    more = draw(eos_options)
    if "exponential_decay_length_penalty" in more:
        more.pop("min_new_tokens", None)  # together they are nan in vanilla 4.57
    if "min_new_tokens" in more:
        more["min_new_tokens"] = min(more["min_new_tokens"], num_new)
    if "forced_eos_token_id" in more:
        more["forced_eos_token_id"] = written[at]
    case.options |= more


@st.composite
def drafts(draw, case: Case):
    kind = draw(st.sampled_from(["same", "noisy", "other", "scripted"]))
    if kind == "same":
        return shared(case.arch, attn=case.attn)
    if kind == "noisy":
        return noisy(case.arch, attn=case.attn)
    if kind == "other":
        return shared(draw(st.sampled_from(SUPPORTED)), seed=1)
    return Scripted(case.text(), draw(st.lists(st.integers(0, 8), min_size=1, max_size=4)))


@given(st.data())
def test_any_call_gives_vanillas_tokens_and_random_state(data):
    """Any call, with any draft and budget, gives vanilla's tokens and leaves vanilla's random state."""
    case = data.draw(cases())
    draft = data.draw(drafts(case))
    budget = data.draw(budgets)
    note(f"{case}, draft {type(draft).__name__}, budget {budget}")
    pair = both(case.model, draft, case.ids, case.call, seed=case.seed, draft_budget=budget)
    pair.assert_same()
    assert pair.stats.last.fallback_reason is None


@given(st.data())
def test_any_call_returns_vanillas_dict(data):
    """Scores, logits, hidden states, attentions and cache are vanilla's: lengths, shapes, types and values."""
    case = data.draw(cases())
    names = ["output_scores", "output_logits", "output_hidden_states"]
    names += ["output_attentions"] if case.attn == "eager" else []
    case.options |= {"return_dict_in_generate": True}
    case.options |= {name: True for name in data.draw(st.sets(st.sampled_from(names)))}
    draft = data.draw(drafts(Case(case.arch, case.attn, case.ids, case.seed, _tokens_only(case), case.is_stateful)))
    both(case.model, draft, case.ids, case.call, seed=case.seed, draft_budget=data.draw(budgets)).assert_same()


def _tokens_only(case: Case) -> dict[str, Any]:
    return {name: value for name, value in case.options.items() if name != "return_dict_in_generate"}


@pytest.mark.parametrize("arch", SUPPORTED)
@pytest.mark.parametrize("num_accepted", range(6))
def test_every_accept_count_of_a_round(arch, num_accepted):
    """Whatever part of a draft of 5 is accepted, and then the next round goes on from there."""
    model, ids = shared(arch), prompt(9)
    call = {"max_new_tokens": 30}
    draft = Scripted(plain_text(model, ids, **call), [num_accepted])
    both(model, draft, ids, call, draft_budget=5).assert_same().assert_drafted()
    counts = {outcome.num_accepted for outcome in draft.outcomes[:-1]}
    assert counts == {num_accepted}, "the script did not force the count it was written for"


def test_a_model_that_drafts_for_itself_is_always_accepted():
    """Identical weights accept every draft token: the draft's positions, cache and rollback are right."""
    model = shared()
    pair = both(model, shared(), prompt(5), {"max_new_tokens": 40}, draft_budget=4)
    assert pair.assert_same().stats.last.acceptance_rate == 1.0


def test_a_sampled_draft_peeks_at_the_noise():
    """In a seeded call identical weights accept every draft token, so the draft saw the target's noise."""
    pair = both(shared(), shared(), prompt(5), {"max_new_tokens": 40, "do_sample": True, "top_k": 20}, draft_budget=4)
    assert pair.assert_same().stats.last.acceptance_rate == 1.0


def test_another_seed_gives_another_text():
    """The control: sampled texts under two seeds differ, so equality under one seed says something."""
    call = {"max_new_tokens": 40, "do_sample": True}
    assert not torch.equal(
        plain_text(shared(), prompt(5), seed=0, **call), plain_text(shared(), prompt(5), seed=1, **call)
    )
