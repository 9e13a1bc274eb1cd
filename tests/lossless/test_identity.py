"""Random calls on every kind of model: whatever they ask for, patched `generate()` returns what unpatched returns."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, note, reject
from hypothesis import strategies as st
from transformers import DynamicCache

import hfspec
from hfspec.host import releases
from tests.models import (
    COUNTING,
    ENCODER_DECODER,
    KINDS,
    PAD,
    RECURRENT,
    SUPPORTED,
    WINDOWED,
    CountingProcessor,
    Pair,
    Scripted,
    both,
    char_tokenizer,
    noisy,
    plain_text,
    prompt,
    prompts,
    shared,
)

CACHES = ["the host's", "static", "the user's", "the user's, made for the model", "filled in chunks"]

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
    """A drawn call: the model, the prompts (`[rows, length]`, padded at the left), and `generate()`'s keywords."""

    arch: str
    attn: str
    inputs: dict[str, torch.Tensor]
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    is_stateful: bool = False
    cache: str = "the host's"

    @property
    def model(self):
        return shared(self.arch, attn=self.attn)

    @property
    def num_prompt(self) -> int:
        """Tokens before the first new one; an encoder-decoder model begins with one."""
        return 1 if self.arch in ENCODER_DECODER else self.inputs["input_ids"].shape[1]

    def call(self) -> dict[str, Any]:
        call = self.inputs | self.options
        if self.is_stateful:
            call |= {"logits_processor": [CountingProcessor()]}
        if self.cache == "static":
            call |= {"cache_implementation": "static"}
        elif self.cache == "the user's":
            call |= {releases.CACHE_KEY: DynamicCache()}
        elif self.cache == "the user's, made for the model":
            call |= {releases.CACHE_KEY: DynamicCache(config=self.model.config)}
        elif self.cache == "filled in chunks":
            call |= {"prefill_chunk_size": 4}
        return call

    def text(self) -> torch.Tensor:
        torch.manual_seed(self.seed)
        try:
            out = self.model.generate(**self.call())
        except Exception:  # vanilla itself cannot run it on this release: nothing to compare with
            reject()
        return getattr(out, "sequences", out)

    def both(self, draft: Any, budget: Any) -> Pair:
        return both(self.model, draft, None, self.call, seed=self.seed, draft_budget=budget)


@st.composite
def cases(draw, archs=KINDS) -> Case:
    arch = draw(st.sampled_from(archs))
    lengths = draw(
        st.one_of(
            st.lists(st.sampled_from([1, 2, 7, 17, 33]), min_size=1, max_size=1),
            st.lists(st.sampled_from([1, 2, 7, 9, 17]), min_size=2, max_size=4),
        )
    )
    inputs = prompts(*lengths, seed=draw(st.integers(0, 99)))
    # With padding, eager attention in float64 is nan in vanilla itself where there is an RMSNorm.
    attns = ["eager", "sdpa"] if len(set(lengths)) == 1 or arch == "gpt2" else ["sdpa"]
    attn = "eager" if arch in (*COUNTING, "t5") else draw(st.sampled_from(attns))  # they have but that one on 4.57
    case = Case(arch, attn, inputs, seed=draw(st.integers(0, 99)), is_stateful=draw(st.booleans()))
    num_new = draw(st.sampled_from([1, 2, 9, 24]))
    if draw(st.booleans()):
        case.options["max_new_tokens"] = num_new
    else:
        case.options["max_length"] = case.num_prompt + num_new
    case.options |= draw(processors)
    if draw(st.booleans()):
        case.options |= {"do_sample": True} | draw(warpers)
    if len(lengths) == 1 and draw(st.booleans()):
        case.options |= {"do_sample": True, "num_return_sequences": draw(st.sampled_from([2, 3]))}
    if arch not in (*RECURRENT, *ENCODER_DECODER, "gpt_neo", "bloom"):
        case.cache = draw(st.sampled_from(CACHES))
    draw_stop(draw, case, num_new)
    return case


def draw_stop(draw, case: Case, num_new: int) -> None:
    """Make something that vanilla really writes the end of the text, so that it falls in mid-block."""
    kinds = ["length", "int", "list", "tensor", "string"]
    kind = draw(st.sampled_from(kinds[:-1] if case.arch == "bloom" else kinds))  # 4.57's refuses the tokenizer
    if kind == "length":
        return
    text = case.text()
    written = text[draw(st.integers(0, len(text) - 1)), case.num_prompt :].tolist()
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
        if case.arch in ENCODER_DECODER:
            return shared(case.arch, seed=1, attn=case.attn)
        return shared(draw(st.sampled_from((*SUPPORTED, *WINDOWED, *RECURRENT))), seed=1, attn="sdpa")
    return Scripted(case.text(), draw(st.lists(st.integers(0, 8), min_size=1, max_size=4)))


@given(st.data())
def test_any_call_gives_vanillas_tokens_and_random_state(data):
    """Any call, with any draft and budget, gives vanilla's tokens and leaves vanilla's random state."""
    case = data.draw(cases())
    case.text()
    draft = data.draw(drafts(case))
    budget = data.draw(budgets)
    note(f"{case}, draft {type(draft).__name__}, budget {budget}")
    pair = case.both(draft, budget).assert_same()
    assert pair.stats.last.fallback_reason is None


@given(st.data())
def test_any_call_returns_vanillas_dict(data):
    """Scores, logits, hidden states, attentions and cache are vanilla's: lengths, shapes, types and values."""
    case = data.draw(cases())
    names = ["output_scores", "output_logits", "output_hidden_states"]
    names += ["output_attentions"] if case.attn == "eager" and "mamba" not in case.arch else []
    wanted = {name: True for name in data.draw(st.sets(st.sampled_from(names)))}
    case.options |= {"return_dict_in_generate": True} | wanted
    case.text()
    draft = data.draw(drafts(case))
    note(f"{case}, draft {type(draft).__name__}")
    case.both(draft, data.draw(budgets)).assert_same()


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
