"""Cases 8, 10, 11, 12, 36: batches, in which each row goes its own way to what vanilla writes for it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, TextGenerationPipeline, TextStreamer
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

import hfspec
from hfspec.cache.ledger import SpeculativeCache
from hfspec.cache.rows import Rows
from tests.models import (
    COUNTING,
    PAD,
    SUPPORTED,
    VOCAB,
    WINDOWED,
    CountingProcessor,
    OnForward,
    Scripted,
    both,
    build,
    char_tokenizer,
    noisy,
    plain_text,
    prompt,
    prompts,
    shared,
)

NEW = {"max_new_tokens": 24}
#: Paddings of 0, 3, 7 and 1.
LENGTHS = (11, 8, 4, 10)
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 40}
#: Those whose rows go on each at its own pace.
RAGGED = (*SUPPORTED, *WINDOWED, *COUNTING)


def attention(arch: str) -> str:
    """Eager attention in float64 is nan over padding where there is an RMSNorm; some models have no other."""
    return "eager" if arch in COUNTING else "sdpa"


def models(arch: str) -> tuple[Any, Any]:
    attn = attention(arch)
    return shared(arch, attn=attn), noisy(arch, attn=attn)


# Every row is vanilla's, in the batch and by itself


@pytest.mark.parametrize("quality", ["noisy", "another", "scripted"])
@pytest.mark.parametrize("arch", RAGGED)
def test_every_row_is_what_it_is_alone(arch, quality):
    """Padded by 0, 3, 7 and 1, each row has the text of vanilla's batch, and of its call alone."""
    model, draft = models(arch)
    batch = prompts(*LENGTHS) | NEW
    texts = plain_text(model, None, **batch)
    drafts = {
        "noisy": lambda: draft,
        "another": lambda: shared("gpt2", seed=1, attn="sdpa"),
        "scripted": lambda: Scripted(texts, [3, 0, 5, 1]),
    }
    pair = both(model, drafts[quality](), None, batch, draft_budget=4).assert_same().assert_drafted()
    assert not pair.stats.lockstep_reasons
    assert pair.stats.accepted_tokens > 0 or quality == "another"
    for row, length in enumerate(LENGTHS):
        alone = plain_text(model, prompt(length, seed=row), **NEW)[0, length:]
        assert torch.equal(pair.fast[row, max(LENGTHS) :], alone), f"row {row}"


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_sequences", [2, 4])
@pytest.mark.parametrize("lengths", [(7,), (7, 3)], ids=["one prompt", "two prompts"])
def test_several_sequences_for_a_prompt(lengths, num_sequences, do_sample):
    """`num_return_sequences` gives vanilla's rows in vanilla's order, or vanilla's refusal."""
    model, draft = models("llama")
    call = prompts(*lengths) | NEW | {"num_return_sequences": num_sequences, "do_sample": do_sample}
    if not do_sample:
        with pytest.raises(ValueError, match="num_return_sequences") as vanillas:
            model.generate(**call)
        with hfspec.patched(model, draft), pytest.raises(ValueError, match="num_return_sequences") as ours:
            model.generate(**call)
        assert str(ours.value) == str(vanillas.value)
        return
    pair = both(model, draft, None, call, draft_budget=4).assert_same().assert_drafted()
    assert len(pair.fast) == len(lengths) * num_sequences
    assert len({tuple(row.tolist()) for row in pair.fast}) == len(pair.fast), "the control: rows must differ"


@pytest.mark.parametrize("arch", RAGGED)
def test_accept_counts_are_forced_for_ten_rounds(arch):
    """Rows that accept all, none and two of their drafts, in turns, for ten rounds, stay vanilla's."""
    model, _ = models(arch)
    budget = 4
    call = prompts(9, 2, 6) | {"max_new_tokens": 40}
    script = Scripted(plain_text(model, None, **call), [budget, 0, 2])
    seen: list[list[int]] = []
    honest = Rows.close

    def noting(self: Rows, lengths: Sequence[int], kept: Sequence[int], *on_device: Any) -> None:
        if len(kept) == 3:
            seen.append([each - 1 for each in kept])
        honest(self, lengths, kept, *on_device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "close", noting)
        both(model, script, None, call, draft_budget=budget).assert_same().assert_drafted()
    assert len(seen) >= 10
    turns = [budget, 0, 2]
    for number, accepted in enumerate(seen[:10]):
        assert accepted == [turns[(number + row) % 3] for row in range(3)]


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
def test_a_mask_of_any_type(kind):
    """What vanilla takes as a mask has the same effect."""
    model, draft = models("llama")
    batch = prompts(*LENGTHS)
    call = batch | {"attention_mask": batch["attention_mask"].to(kind)} | NEW
    try:
        plain_text(model, None, **call)
    except Exception as error:
        with hfspec.patched(model, draft), pytest.raises(type(error)):
            model.generate(**call)
        return
    both(model, draft, None, call, draft_budget=4).assert_same().assert_drafted()


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("arch", RAGGED)
def test_prompts_padded_at_the_right(arch, do_sample, num_rows):
    """Vanilla goes on behind the padding; so does a patched model, whatever becomes of the text."""
    model, draft = models(arch)
    ids = torch.full((num_rows, 11), PAD)
    for row, length in enumerate(LENGTHS[-num_rows:]):
        ids[row, :length] = prompt(length, seed=row)
    call = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "do_sample": do_sample} | NEW
    both(model, draft, None, call, draft_budget=4).assert_same().assert_drafted()


@pytest.mark.parametrize("arch", RAGGED)
def test_prompts_with_holes(arch):
    """A mask may hide tokens anywhere in the prompt."""
    model, draft = models(arch)
    batch = prompts(9, 9, 9)
    mask = batch["attention_mask"].clone()
    mask[0, 3:5], mask[1, [0, 2, 6]] = 0, 0
    call = batch | {"attention_mask": mask} | NEW
    both(model, draft, None, call, draft_budget=4).assert_same().assert_drafted()


# Dead slots


HUGE = 1e30


@pytest.fixture
def poison(monkeypatch):
    """Fill every slot that a mask hides, or that was given back, with huge values, whenever rows have moved on.

    Huge but finite: nothing times nothing is nothing, infinity times nothing is not a number.
    """
    counts: Counter[str] = Counter()

    def spoil(rows: Rows) -> None:
        for layer in rows._cache.layers:
            if not layer.is_initialized:
                continue
            begin = layer.length - layer.start
            for buffer in (layer._key_buffer, layer._value_buffer):
                buffer[..., begin:, :] = HUGE
            counts["given back"] += layer._key_buffer.shape[-2] - begin
            if rows._mask is None:
                continue
            hidden = rows._mask[:, layer.start : layer.length] == 0
            counts["hidden"] += int(hidden.sum())
            for states in (layer.keys, layer.values):
                states.masked_fill_(hidden[:, None, :, None], HUGE)

    def spoiling(honest: Any) -> Any:
        def wrapped(self: Rows, *args: Any) -> None:
            honest(self, *args)
            spoil(self)

        return wrapped

    for name in ("close", "forget", "select"):
        monkeypatch.setattr(Rows, name, spoiling(getattr(Rows, name)))
    return counts


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("arch", RAGGED)
def test_dead_slots_weigh_nothing(arch, do_sample, poison):
    """Rejected drafts, filling and padding left in target's and draft's caches weigh exactly 0."""
    model, draft = models(arch)
    expected = plain_text(model, None, **prompts(*LENGTHS), **NEW)
    eos = {"eos_token_id": [int(expected[0, 18]), int(expected[2, 14])], "pad_token_id": PAD}
    call = prompts(*LENGTHS) | NEW | {"do_sample": do_sample} | eos
    pair = both(model, draft, None, call, draft_budget=4).assert_same().assert_drafted()
    assert not pair.stats.lockstep_reasons
    assert poison["given back"] > 0
    assert poison["hidden"] > 0


def test_the_poison_would_be_seen(poison, monkeypatch):
    """The control: with a mask that hides nothing the same poison changes the text."""
    honest = Rows.open

    def hiding_nothing(self: Rows, *args: Any, **kwargs: Any) -> Any:
        mask, position_ids = honest(self, *args, **kwargs)
        return None if mask is None else torch.ones_like(mask), position_ids

    model, draft = models("llama")
    call = prompts(*LENGTHS) | NEW
    expected = plain_text(model, None, **call)
    monkeypatch.setattr(Rows, "open", hiding_nothing)
    with hfspec.patched(model, draft, draft_budget=4):
        assert not torch.equal(model.generate(**call), expected)


# Rows that end


def rows_in_forwards(model: Any) -> tuple[list[int], Any]:
    """The number of rows in each forward of a model, and the hook to remove."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(len(kwargs["input_ids"]))

    return seen, OnForward(model, before=note)


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "int": lambda ids: ids[0],
    "list": list,
    "tensor": torch.tensor,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("arch", "pad_id"), [("llama", PAD), ("mistral", PAD), ("llama", 2), ("gpt_neo", 2)])
def test_rows_leave_as_they_end(arch, do_sample, form, pad_id):
    """A row that wrote its end is in no later forward of target or draft, and is filled up as vanilla's."""
    model, draft = build(arch, attn=attention(arch)), build(arch, attn=attention(arch))
    call = prompts(*LENGTHS) | NEW | {"do_sample": do_sample, "pad_token_id": pad_id}
    texts = plain_text(model, None, **call)
    ends = [int(texts[row, 11 + 3 + 5 * row]) for row in range(3)]
    call |= {"eos_token_id": FORMS[form](ends)}
    expected = plain_text(model, None, **call)
    num_in, hook = rows_in_forwards(model)
    num_drafting, draft_hook = rows_in_forwards(draft)
    try:
        with hfspec.patched(model, draft, draft_budget=3):
            torch.manual_seed(0)
            assert torch.equal(model.generate(**call), expected)
            assert not hfspec.stats(model).last.lockstep_reasons
            assert hfspec.stats(model).last.accepted_tokens > 0
            counted = hfspec.stats(model).last.new_tokens
    finally:
        hook.remove()
        draft_hook.remove()
    is_end = torch.isin(expected[:, 11:], torch.tensor(ends if form != "int" else ends[:1]))
    lengths = [int(row.nonzero()[0]) + 1 if row.any() else row.numel() for row in is_end]
    assert min(lengths) < max(lengths), "the control: rows must end at different tokens"
    for row, length in enumerate(lengths):
        assert (expected[row, 11 + length :] == pad_id).all()
    assert counted == sum(lengths)
    for seen in (num_in, num_drafting):
        assert seen == sorted(seen, reverse=True)
        assert seen[-1] < 4
    assert num_in[0] == 4
    # One more token than rounds is all that a row can have been in.
    assert sum(num_in) <= 4 + sum(lengths)


@pytest.mark.parametrize("kind", ["length", "tokens", "stop strings and tokens"])
def test_rows_reach_their_ends_in_different_rounds(kind):
    """`max_length`, EOS and stop strings end each row at vanilla's token, however far the others are."""
    model, _ = models("llama")
    call: dict[str, Any] = prompts(*LENGTHS) | {"max_length": 11 + 17}
    texts = plain_text(model, None, **call)
    if kind != "length":
        call |= {"eos_token_id": int(texts[1, 15]), "pad_token_id": PAD}
    if kind == "stop strings and tokens":
        stop = char_tokenizer().decode(texts[0, 17:20])
        call |= {"stop_strings": [stop], "tokenizer": char_tokenizer()}
    for accepts in ([9], [0, 9], [9, 0, 0, 0], [1, 7, 2]):
        script = Scripted(plain_text(model, None, **call), accepts)
        for budget in (1, 4, 16):
            pair = both(model, script, None, call, draft_budget=budget).assert_same().assert_drafted()
            assert not pair.stats.lockstep_reasons
            assert pair.fast.shape[1] <= 28


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_the_targets_last_position_is_reached_by_each_row_in_its_turn(arch):
    """Rows near the target's last position are not drafted beyond it, whoever gets there first."""
    sizes = {"n_positions": 24} if arch == "gpt2" else {"max_position_embeddings": 24}
    model, draft = build(arch, attn="sdpa", **sizes), noisy(arch, attn="sdpa")
    call = prompts(*LENGTHS) | {"max_length": 24}
    for budget in (2, 5, 8):
        both(model, draft, None, call, draft_budget=budget).assert_same().assert_drafted()
    short = build(arch, attn="sdpa", **{name: 16 for name in sizes})
    pair = both(shared(arch, attn="sdpa"), short, None, call | {"max_length": 40}, draft_budget=4).assert_same()
    assert pair.stats.drafted_tokens > 0
    assert arch == "llama" or "context of 16" in pair.stats.fallback_reason


# Whoever watches the whole batch


class Log:
    """Keeps every call of a processor, a criterion and a streamer, with all that they were given."""

    def __init__(self, ends: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self._ends = ends

    def kit(self) -> dict[str, Any]:
        return {"logits_processor": [_Processor(self)], "stopping_criteria": [_Criterion(self, self._ends)]}


class _Processor(LogitsProcessor):
    def __init__(self, log: Log) -> None:
        self._log = log

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        numbers = [round(float(score), 4) for score in scores.flatten()[::7]]
        self._log.entries.append(("processor", input_ids.tolist(), tuple(scores.shape), scores.dtype, numbers))
        return scores


class _Criterion(StoppingCriteria):
    def __init__(self, log: Log, ends: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self._log, self._ends = log, ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._log.entries.append(("criterion", input_ids.tolist(), None if scores is None else len(scores)))
        return torch.zeros(len(input_ids), dtype=torch.bool) if self._ends is None else self._ends(input_ids)


class _Streamer(BaseStreamer):
    def __init__(self, log: Log) -> None:
        self._log = log

    def put(self, value: torch.Tensor) -> None:
        self._log.entries.append(("put", tuple(value.shape), value.dtype, value.device, value.tolist()))

    def end(self) -> None:
        self._log.entries.append(("end",))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("watches", ["a processor and a criterion", "a streamer", "all"])
@pytest.mark.parametrize("ends", ["by length", "by tokens", "by a criterion, row by row"])
def test_who_watches_the_batch_sees_vanillas_calls(ends, watches, do_sample):
    """Cases 13, 18, 30: whole batches, finished rows and their padding included, one token a row at a time."""
    model, draft = models("llama")
    call = prompts(*LENGTHS) | {"max_new_tokens": 16} | (SAMPLED if do_sample else {})
    texts = plain_text(model, None, **call)
    by_row: Any = None
    if ends != "by length":
        call |= {"eos_token_id": [int(texts[0, 11 + 4]), int(texts[2, 11 + 9])], "pad_token_id": PAD}
    if ends == "by a criterion, row by row":

        def by_row(input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids.shape[1] > torch.tensor([13, 99, 20, 16])

    logs: list[Log] = []

    def make() -> dict[str, Any]:
        log = Log(by_row)
        logs.append(log)
        watching = {} if watches == "a streamer" else log.kit()
        return call | watching | ({} if watches.startswith("a processor") else {"streamer": _Streamer(log)})

    pair = both(model, draft, None, make, draft_budget=4).assert_same().assert_drafted()
    assert pair.stats.lockstep_reasons.total() == 1
    plain, fast = logs
    assert plain.entries == fast.entries
    assert len(fast.entries) > 5


def test_a_streamer_that_takes_one_row_only_says_so():
    """Vanilla's `TextStreamer` refuses a batch, and goes on refusing."""
    model, draft = models("llama")
    with hfspec.patched(model, draft), pytest.raises(ValueError, match="batch size 1"):
        model.generate(**prompts(4, 7), **NEW, streamer=TextStreamer(char_tokenizer()))
    both(model, draft, None, prompts(4, 7) | NEW, draft_budget=3).assert_same().assert_drafted()


# Long texts


@pytest.fixture
def packings(monkeypatch):
    """How often rows were packed, of target and draft."""
    counts: Counter[str] = Counter()
    honest = SpeculativeCache.arrange

    def noting(self: SpeculativeCache, slots: torch.Tensor) -> None:
        counts["packed"] += 1
        honest(self, slots)

    monkeypatch.setattr(SpeculativeCache, "arrange", noting)
    return counts


@pytest.mark.parametrize("arch", ["llama", *WINDOWED])
def test_long_texts_of_many_rows(arch, packings):
    """300 tokens for six rows, far beyond windows of 8, with drafts good and bad: rows are packed, and vanilla's."""
    model, draft = models(arch)
    call = prompts(3, 20, 9, 1, 14, 7) | {"max_new_tokens": 300}
    script = Scripted(plain_text(model, None, **call), [0, 6, 1, 3, 6, 6, 2])
    for source, budget in ((draft, 4), (script, 6)):
        pair = both(model, source, None, call, draft_budget=budget).assert_same().assert_drafted()
        assert not pair.stats.lockstep_reasons
        assert pair.stats.accepted_tokens > 300
    assert packings["packed"] > 0


def held_by(cache: Any) -> int:
    """Bytes of keys and values, buffers whole."""
    tensors = [
        tensor
        for layer in cache.layers
        if getattr(layer, "is_initialized", False)
        for tensor in (getattr(layer, "_key_buffer", layer.keys), getattr(layer, "_value_buffer", layer.values))
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


#: What a batch's cache may take beyond vanilla's: a quarter, and so many slots (a first growth of 64, holes of 32).
MORE_SHARE, MORE_SLOTS = 1.25, 96


@pytest.mark.parametrize("accepts", [[0], [8], [0, 8, 2]], ids=str)
@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (256, 8, 90, 200)], ids=["alike", "padded"])
def test_a_batchs_cache_needs_little_more_than_vanillas(accepts, lengths, monkeypatch):
    """However far rows drift apart, the target's cache is never much larger than vanilla's for the longest row."""
    model, _ = models("llama")
    call = prompts(*lengths) | {"max_new_tokens": 160}
    script = Scripted(plain_text(model, None, **call), accepts)
    taken: list[tuple[float, int]] = []
    honest = Rows.close

    def noting(self: Rows, read: Sequence[int], kept: Sequence[int], *on_device: Any) -> None:
        honest(self, read, kept, *on_device)
        keys = self._cache.layers[0].keys
        bytes_of_a_slot = 2 * len(self._cache.layers) * keys[:, :, :1].numel() * keys.element_size()
        taken.append((held_by(self._cache) / bytes_of_a_slot, max(*lengths, *self._num_tokens)))

    monkeypatch.setattr(Rows, "close", noting)
    both(model, script, None, call, draft_budget=8).assert_same().assert_drafted()
    assert len(taken) >= 160 // 9
    assert all(slots <= MORE_SHARE * longest + MORE_SLOTS for slots, longest in taken), max(taken)


def test_vanillas_cache_is_what_it_is_measured_by():
    """The control: a cache of the host's has no room to grow into."""
    cache = DynamicCache()
    keys = torch.zeros(2, 2, 10, 8)
    cache.update(keys, keys, 0)
    assert held_by(cache) == 2 * keys.numel() * 4


# Pipelines


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


TEXTS = ["Once upon a time", "Twice", "Never say", "Thrice again", "And so on it went"]


@pytest.mark.parametrize("call", [{}, {"return_full_text": False}, {"num_return_sequences": 2, **SAMPLED}], ids=str)
@pytest.mark.parametrize("kind", ["strings", "chats"])
def test_a_pipeline_of_batches(kind, call):
    """Lists of strings and of chats, three at a time, padded at the left, give vanilla's texts with drafts."""
    tokenizer = char_tokenizer().__class__(
        tokenizer_object=char_tokenizer().backend_tokenizer, pad_token="<pad>", bos_token="<s>", padding_side="left"
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }} | {% endfor %}"
    model, draft = build(attn="sdpa"), noisy(attn="sdpa")
    inputs: Any = TEXTS if kind == "strings" else [chat(text) for text in TEXTS]
    results = []

    def run() -> None:
        torch.manual_seed(0)
        pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer, batch_size=3)
        results.append(pipe(inputs, max_new_tokens=16, pad_token_id=PAD, **({"do_sample": False} | call)))

    run()
    with hfspec.patched(model, draft, draft_budget=4):
        run()
        total = hfspec.stats(model).total
    assert results[0] == results[1]
    assert len(results[1]) == 5
    assert (total.calls, total.speculative_calls, total.fallback_reasons) == (2, 2, {})
    assert total.accepted_tokens > 0
    assert not total.lockstep_reasons


# Random numbers


@pytest.mark.parametrize("arch", RAGGED)
def test_a_seeded_batch_leaves_vanillas_random_state(arch):
    """The next call draws what it draws after vanilla's, whichever row was the last to end; three batches in a row."""
    model, draft = models(arch)
    call = prompts(*LENGTHS) | NEW | SAMPLED
    texts = plain_text(model, None, **call)
    ends = {"eos_token_id": [int(texts[row, 14 + 4 * row]) for row in range(3)], "pad_token_id": PAD}
    batches = [call | ends, call, prompts(2, 5, seed=9) | NEW | SAMPLED]

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [*(model.generate(**each) for each in batches), torch.rand(3)]

    expected = run()
    with hfspec.patched(model, draft, draft_budget=4):
        written = run()
        assert hfspec.stats(model).total.accepted_tokens > 0
    assert all(torch.equal(*each) for each in zip(expected, written, strict=True))


def test_rejection_in_a_padded_batch_keeps_each_rows_law():
    """Under rejection each row's second token follows the law of that row's own prompt, not another's."""
    model, draft = shared(attn="sdpa"), noisy(attn="sdpa", scale=0.05)
    lengths, num_calls, copies = (5, 2), 30, 16
    call = {"max_new_tokens": 3, "do_sample": True, "temperature": 4.0, "top_k": 4}
    batch = prompts(*lengths)
    pairs: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    with hfspec.patched(model, draft, draft_budget=2, acceptance="rejection"):
        for seed in range(num_calls):
            torch.manual_seed(seed)
            out = model.generate(**batch, **call, num_return_sequences=copies)
            for row, text in enumerate(out):
                pairs[row // copies][tuple(text[5:7].tolist())] += 1
        total = hfspec.stats(model).total
    assert 0.2 < total.acceptance_rate < 0.95, "the test needs acceptances and rejections"
    assert not total.lockstep_reasons
    for row, length in enumerate(lengths):
        law = two_token_law(model, batch["input_ids"][row : row + 1, 5 - length :])
        seen = {pair: count / pairs[row].total() for pair, count in pairs[row].items()}
        assert set(seen) <= set(law), "a token outside the target's support"
        assert sum(abs(seen.get(pair, 0) - weight) for pair, weight in law.items()) / 2 < 0.12


def two_token_law(model: Any, ids: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Vanilla's law of the first two tokens after `ids` `[1, length]`, at temperature 4 and top-k 4."""

    def law(prefix: torch.Tensor) -> list[tuple[int, float]]:
        with torch.no_grad():
            best = (model(input_ids=prefix).logits[0, -1].float() / 4.0).topk(4)
        return list(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    return {
        (first, second): weight * more
        for first, weight in law(ids)
        for second, more in law(torch.cat([ids, torch.tensor([[first]])], dim=-1))
    }


def test_rows_see_ids_below_the_vocabulary_only():
    """A draft with padded vocabulary lanes that always wins never gets one of them into a row."""
    model = shared(attn="sdpa")
    draft = build(vocab_size=VOCAB + 1, attn="sdpa")
    with torch.no_grad():
        draft.lm_head.weight[VOCAB:] = 10.0
    for options in ({}, SAMPLED):
        pair = both(model, draft, None, prompts(*LENGTHS) | NEW | options, draft_budget=4).assert_same()
        assert int(pair.fast.max()) < VOCAB
        assert pair.stats.drafted_tokens > 0


def test_each_row_moves_on_in_each_round():
    """Rounds whose drafts are wrong in every row still commit a token of each."""
    model, _ = models("llama")
    script = Scripted(plain_text(model, None, **prompts(*LENGTHS), **NEW), [0])
    pair = both(model, script, None, prompts(*LENGTHS) | NEW, draft_budget=5).assert_same().assert_drafted()
    assert pair.stats.accepted_tokens == 0
    assert pair.stats.tokens_per_round == 1.0


def test_a_stateful_processor_keeps_rows_in_step():
    """One that counts its calls sees one call a token for the whole batch, as in vanilla."""
    model, draft = models("llama")

    def make() -> dict[str, Any]:
        return prompts(*LENGTHS) | NEW | {"logits_processor": [CountingProcessor()]}

    pair = both(model, draft, None, make, draft_budget=4).assert_same().assert_drafted()
    assert list(pair.stats.lockstep_reasons) == ["a logits processor may look at the whole batch"]
