"""Batches whose rows go on each at its own pace though a dict is returned, which is vanilla's in every part."""

from typing import Any

import pytest
import torch

import hfspec
from hfspec import Draft, RoundBudget, plan
from hfspec.host import releases
from hfspec.host.prepared import Prepared
from hfspec.verification import handback
from hfspec.verification.ragged import RaggedTarget
from hfspec.verification.target import Target
from tests.models import (
    COUNTING,
    PAD,
    SUPPORTED,
    VOCAB,
    WINDOWED,
    FunctionSource,
    OnForward,
    Pair,
    Scripted,
    both,
    build,
    noisy,
    plain_text,
    prompt,
    prompts,
    shared,
)
from tests.trees import ScriptedTrees

#: Paddings of 0, 3, 7 and 1.
LENGTHS = (11, 8, 4, 10)
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 40}
RAGGED = (*SUPPORTED, *WINDOWED, *COUNTING)
DICT = {"return_dict_in_generate": True}
ALL = DICT | {"output_scores": True, "output_logits": True}
#: A source that proposes nothing.
SILENT = FunctionSource(lambda input_ids, budget, number: Draft.empty(1, torch.device("cpu")))
STATES = "states of every token are wanted, those of the padding behind finished rows included"


def models(arch: str) -> tuple[Any, Any]:
    """Eager attention in float64 is nan over padding where there is an RMSNorm; some models have no other."""
    attn = "eager" if arch in COUNTING else "sdpa"
    return shared(arch, attn=attn), noisy(arch, attn=attn)


def ending(model: Any, call: dict[str, Any], *places: int | None) -> dict[str, Any]:
    """The call, in which rows end near these places; rows whose place is `None` write to the full length."""
    text = plain_text(model, None, **call)[:, call["input_ids"].shape[1] :].tolist()
    spared = {token for row, at in zip(text, places, strict=False) if at is None for token in row}
    found = [
        next((token for token in row[at:] + row[:at][::-1] if token not in spared), None)
        for row, at in zip(text, places, strict=False)
        if at is not None
    ]
    eos = [token for token in found if token is not None]
    assert eos, "rows write the same tokens"
    return call | {"eos_token_id": eos, "pad_token_id": PAD}


def lengths_of(pair: Pair, call: dict[str, Any]) -> list[int]:
    """How many tokens each row has written before its padding."""
    new = pair.plain.sequences[:, call["input_ids"].shape[1] :]
    is_end = torch.isin(new, torch.tensor(call["eos_token_id"]))
    return [int(row.nonzero()[0]) + 1 if row.any() else row.numel() for row in is_end]


def assert_at_own_pace(pair: Pair) -> Pair:
    pair.assert_same().assert_drafted()
    assert not pair.stats.lockstep_reasons
    return pair


@pytest.mark.parametrize(
    "asked",
    [DICT, DICT | {"output_scores": True}, DICT | {"output_logits": True}, ALL],
    ids=["dict", "scores", "logits", "all"],
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("arch", RAGGED)
def test_rows_that_end_anywhere_give_vanillas_dict(arch, do_sample, asked):
    """Sequences, scores, logits and the cache, whichever row ends first, padded prompts or not."""
    model, draft = models(arch)
    random = torch.Generator().manual_seed(len(asked))
    seen = set()
    for lengths in (LENGTHS, (6, 6, 6, 6)):
        places = torch.randint(0, 30, (4,), generator=random).tolist()
        call = prompts(*lengths, seed=places[0]) | {"max_new_tokens": 32} | (SAMPLED if do_sample else {})
        call = ending(model, call, *places[:3], None) | asked
        pair = assert_at_own_pace(both(model, draft, None, call, draft_budget=4))
        seen.update(lengths_of(pair, call))
    assert len(seen) > 1, "the control: rows must end at different tokens"


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_row_that_ends_with_its_first_token(arch, do_sample):
    """It has read nothing but its prompt."""
    model, draft = models(arch)
    call = prompts(*LENGTHS) | {"max_new_tokens": 20} | (SAMPLED if do_sample else {})
    eos = int(plain_text(model, None, **call)[2, 11])
    call |= {"eos_token_id": eos, "pad_token_id": PAD} | ALL
    pair = assert_at_own_pace(both(model, draft, None, call, draft_budget=3))
    assert 1 in lengths_of(pair, call)


def test_all_rows_end_with_their_first_token():
    """There is no round, and nothing to read on."""
    model, draft = models("llama")
    call = ending(model, prompts(*LENGTHS) | {"max_new_tokens": 20}, 0, 0, 0, 0) | ALL
    pair = both(model, draft, None, call, draft_budget=3).assert_same()
    assert lengths_of(pair, call) == [1, 1, 1, 1]
    assert pair.stats.last.catch_ups == 0


PROCESSED: dict[str, dict[str, Any]] = {
    "a penalty": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "a least length": {"min_new_tokens": 6},
    "a forced end": {"forced_eos_token_id": 5, "renormalize_logits": True},
    "several": {"do_sample": True, "top_p": 0.9, "temperature": 1.2, "repetition_penalty": 1.2, "bad_words_ids": [[7]]},
}


@pytest.mark.parametrize("is_walk", [False, True], ids=["at once", "walking"])
@pytest.mark.parametrize("name", PROCESSED)
def test_finished_rows_are_processed_too(name, is_walk, monkeypatch):
    """What processors make of padding behind padding is in vanilla's scores."""
    model, draft = models("llama")
    if is_walk:
        monkeypatch.setattr(plan, "_is_vectorised", lambda prepared: False)
    call = prompts(*LENGTHS) | {"max_new_tokens": 24} | PROCESSED[name]
    call = ending(model, call, 9, None, 7, 15) | ALL
    pair = assert_at_own_pace(both(model, draft, None, call, draft_budget=4))
    assert len(set(lengths_of(pair, call))) > 1


@pytest.mark.parametrize("limit", ["3 tokens' logits", "no logits", "a proof's width", "positions"])
@pytest.mark.parametrize("arch", ["gpt2", "mistral", "gpt_neo"])
def test_much_padding_is_read_in_parts(arch, limit, monkeypatch):
    """As many tokens at once as memory, what is proved, or the target's positions allow."""
    attn = "eager" if arch in COUNTING else "sdpa"
    model, draft = build(arch, attn=attn), noisy(arch, attn=attn)
    call = ending(model, prompts(*LENGTHS) | {"max_new_tokens": 60}, 2, None, 3)
    if "logits" in limit:
        monkeypatch.setattr(handback, "_MAX_LOGITS", 3 * 3 * VOCAB if limit.startswith("3") else 1)
    if limit == "positions":
        monkeypatch.setattr(Prepared, "max_length", 11 + 40)
    budget = 1 if limit == "a proof's width" else 4
    pair = assert_at_own_pace(both(model, draft, None, call | ALL, draft_budget=budget))
    assert pair.stats.last.catch_ups > 3
    without = both(model, draft, None, call, draft_budget=budget).assert_same()
    is_proved = pair.stats.last.trials == without.stats.last.trials
    assert is_proved or limit == "positions", "what is proved of drafts is enough for padding"


@pytest.mark.parametrize("when", ["by a draft", "by padding"])
def test_padding_is_read_one_by_one_where_more_is_disproved(when, monkeypatch):
    """A forward that is wrong when it is wide serves no row, nor its padding; the dict is vanilla's."""
    model = build(attn="sdpa")
    source = noisy(attn="sdpa") if when == "by a draft" else SILENT
    honest = Target._forward

    def wrong_if_wide(self: Target, inputs: dict[str, Any], *counts: int) -> Any:
        verified = honest(self, inputs, *counts)
        if inputs["input_ids"].shape[1] > 1:
            verified.logits.mul_(-1.0)
        return verified

    monkeypatch.setattr(Target, "_forward", wrong_if_wide)
    call = ending(model, prompts(*LENGTHS) | {"max_new_tokens": 60}, 3, None, 8) | ALL
    last = both(model, source, None, call, draft_budget=3).assert_same().stats.last
    assert last.trials == 1
    assert last.catch_ups > 3
    assert last.fallback_reason is not None
    assert "differ" in last.fallback_reason


@pytest.mark.parametrize("when", [1, 3])
def test_rows_are_filled_up_where_drafts_failed(when):
    """Whatever became of the drafts, scores and cache are whole, and padding is proved on its own account."""
    model = build(attn="sdpa")
    call = ending(model, prompts(*LENGTHS) | {"max_new_tokens": 30}, 4, None, 12) | ALL

    def fail(input_ids: torch.Tensor, budget: RoundBudget, number: int) -> Draft:
        if number >= when:
            raise RuntimeError("no more")
        return Draft(torch.full((1, 2), 5))

    pair = both(model, FunctionSource(fail), None, call, draft_budget=3).assert_same()
    assert not pair.stats.lockstep_reasons
    assert pair.stats.last.catch_ups > 0


def test_padding_is_read_at_once_where_nothing_was_drafted():
    """Nothing is proved by then; the proof is made for the padding, and rows that ended early cost no more than it."""
    model = build(attn="sdpa")
    call = ending(model, prompts(*LENGTHS) | {"max_new_tokens": 17}, 3, None, 8) | ALL
    pair = both(model, SILENT, None, call, draft_budget=3).assert_same()
    assert pair.stats.last.catch_ups == 1
    assert pair.stats.last.trial_forwards <= 2


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3"])
def test_rows_that_were_packed_come_back_whole(arch):
    """Long texts behind much padding: slots that packing has thrown away are vanilla's in the returned cache."""
    model, draft = models(arch)
    call = prompts(3, 90, 40, 1) | {"max_new_tokens": 150}
    script = Scripted(plain_text(model, None, **call), [0, 6, 1, 3, 6, 6, 2])
    for source in (draft, script):
        assert_at_own_pace(both(model, source, None, call | DICT, draft_budget=6))
    ended = ending(model, call, 20, None, 70) | ALL
    assert_at_own_pace(both(model, draft, None, ended, draft_budget=6))


@pytest.mark.parametrize("arch", RAGGED)
def test_a_single_row_behind_much_padding(arch):
    """Its padding is in vanilla's cache, too."""
    model, draft = models(arch)
    ids = torch.cat([torch.full((1, 50), PAD), prompt(4)], dim=1)
    call = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "max_new_tokens": 60} | ALL
    assert_at_own_pace(both(model, draft, None, call, draft_budget=4))


def test_attention_weights_over_much_padding():
    """They are as wide as vanilla's cache."""
    model, draft = shared("gpt2"), noisy("gpt2")
    call = {name: each[:1] for name, each in prompts(6, 60).items()} | {"max_new_tokens": 20} | ALL
    both(model, draft, None, call | {"output_attentions": True}, draft_budget=3).assert_same().assert_drafted()


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mistral"])
def test_the_conversation_goes_on_with_the_cache(arch):
    """A second turn over the returned cache writes what it writes over vanilla's."""
    model, draft = models(arch)
    first = ending(model, prompts(*LENGTHS) | {"max_new_tokens": 20}, 5, None, 11) | DICT
    more = prompt(3, seed=5).expand(4, -1)

    def turns() -> tuple[Any, Any]:
        one = model.generate(**first)
        ids = torch.cat([one.sequences, more], dim=1)
        mask = torch.cat([first["attention_mask"], torch.ones(4, ids.shape[1] - 11, dtype=torch.long)], dim=1)
        cache = {releases.CACHE_KEY: one[releases.CACHE_KEY]}
        return one.sequences, model.generate(ids, attention_mask=mask, max_new_tokens=9, pad_token_id=PAD, **cache)

    plain = turns()
    with hfspec.patched(model, draft, draft_budget=4):
        fast = turns()
        assert hfspec.stats(model).total.accepted_tokens > 0
    assert all(torch.equal(*pair) for pair in zip(plain, fast, strict=True))


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_trees_at_own_paces(arch):
    """Scores and cache are those of the accepted paths, row by row."""
    model, _ = models(arch)
    call = ending(model, prompts(*LENGTHS) | {"max_new_tokens": 40}, 12, None, 20)
    source = ScriptedTrees(plain_text(model, None, **call), [3, 0, 5, 1, 2], sizes=[12, 7])
    assert_at_own_pace(both(model, source, None, call | ALL, draft_budget=12))
    assert source.has_branched


@pytest.mark.parametrize("num_sequences", [2, 3])
def test_several_sequences_of_padded_prompts(num_sequences):
    """Rows of one prompt have one padding."""
    model, draft = models("qwen2")
    call = prompts(7, 3) | {"max_new_tokens": 24, "num_return_sequences": num_sequences} | SAMPLED
    call = ending(model, call, 6, None, 15) | ALL
    assert_at_own_pace(both(model, draft, None, call, draft_budget=4))


def test_rejection_gives_a_dict_of_one_piece():
    """Texts are not vanilla's, but everything else belongs to them: scores, logits and cache are the texts' own."""
    model, draft = models("llama")
    call = prompts(*LENGTHS) | {"max_new_tokens": 24, "eos_token_id": [*range(10, 16)], "pad_token_id": PAD} | SAMPLED
    torch.manual_seed(3)
    with hfspec.patched(model, draft, draft_budget=4, acceptance="rejection"):
        fast = model.generate(**call, **ALL)
        assert not hfspec.stats(model).lockstep_reasons
    num_new = fast.sequences.shape[1] - 11
    assert len(fast.scores) == len(fast.logits) == num_new
    mask = torch.cat([call["attention_mask"], torch.ones(4, num_new, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=fast.sequences, attention_mask=mask, position_ids=positions).logits[:, 10:-1]
    torch.testing.assert_close(torch.stack(fast.logits, dim=1), logits.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("states", ["output_hidden_states", "output_attentions"])
def test_states_keep_rows_in_step(states):
    """They are wanted of every token, and the reason says so."""
    model, draft = shared(attn="eager"), noisy(attn="eager")
    call = prompts(6, 6) | {"max_new_tokens": 12, states: True} | DICT
    pair = both(model, draft, None, call, draft_budget=4).assert_same().assert_drafted()
    assert list(pair.stats.lockstep_reasons) == [STATES]


def forwards_of(model: Any, source: Any, call: dict[str, Any]) -> list[int]:
    """The rows of every forward that the target makes, the prompt's first."""
    seen: list[int] = []
    watch = OnForward(model, before=lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])))
    try:
        with hfspec.patched(model, source, draft_budget=6):
            model.generate(**call)
            assert hfspec.stats(model).last.target_forward_passes == len(seen)
    finally:
        watch.remove()
    return seen


def test_fewer_forwards_than_in_step():
    """Rows that drift apart do not wait for each other, as if no dict were wanted."""
    model, _ = models("llama")
    call = prompts(*LENGTHS) | {"max_new_tokens": 48}
    script = Scripted(plain_text(model, None, **call), [6, 0, 6, 6])
    without = forwards_of(model, script, call)
    own_pace = forwards_of(model, script, call | ALL)
    in_step = forwards_of(model, script, call | ALL | {"output_hidden_states": True})
    assert own_pace == without
    assert len(own_pace) < 0.7 * len(in_step)


def test_a_row_that_ends_early_is_read_in_a_few_wide_forwards():
    """The others go on without it; what it lacks is read at the end, by it alone."""
    model = build(attn="sdpa")
    call = ending(model, prompts(*LENGTHS) | {"max_new_tokens": 80}, None, 5)
    pair = assert_at_own_pace(both(model, build(attn="sdpa"), None, call | ALL, draft_budget=6))
    lengths = lengths_of(pair, call)
    without = forwards_of(model, build(attn="sdpa"), call)
    forwards = forwards_of(model, build(attn="sdpa"), call | ALL)
    assert forwards[: len(without)] == without, "padding is read when all have ended"
    assert len(forwards) - len(without) == pair.stats.last.catch_ups <= 3
    assert max(forwards[len(without) :]) == sum(length < max(lengths) for length in lengths)


@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (200, 8, 90, 150)], ids=["alike", "padded"])
@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_what_is_kept_takes_little_more_than_vanillas_cache(arch, lengths, monkeypatch):
    """Rows in the cache and rows that have left, together: vanilla's, a quarter, and 96 slots."""
    model, _ = models(arch)
    call = ending(model, prompts(*lengths) | {"max_new_tokens": 120}, 10, 40, 70, None)
    script = Scripted(plain_text(model, None, **call), [6, 0, 3])
    taken: list[tuple[float, int]] = []
    honest = RaggedTarget.select

    def noting(self: RaggedTarget, rows: Any) -> None:
        honest(self, rows)
        layer, parked = self._cache.layers[-1], self._parked
        assert parked is not None
        kept = [row.layers[-1][0] for row in parked._rows.values()]
        kept += [row[-1][0] for row in parked._padding]
        num = sum(each.untyped_storage().nbytes() // each.element_size() for each in (layer._key_buffer, *kept))
        taken.append((num / layer.keys[:1, :, :1].numel() / len(lengths), self._the_rows().num_slots))

    monkeypatch.setattr(RaggedTarget, "select", noting)
    assert_at_own_pace(both(model, script, None, call | ALL, draft_budget=6))
    assert len(taken) >= 2
    assert all(slots <= 1.25 * max(num, max(lengths)) + 96 for slots, num in taken), taken
