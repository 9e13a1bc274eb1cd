"""What users of speculative decoding have reported elsewhere, each as a kind: vanilla's output, or a clear error."""

import json
import threading
from typing import Any

import pytest
import tokenizers
import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    PreTrainedTokenizerFast,
    TextGenerationPipeline,
    TextStreamer,
)

import hfspec
from hfspec import DraftBudget
from tests.models import (
    BOS,
    PAD,
    SUPPORTED,
    VOCAB,
    CountingProcessor,
    ForcingProcessor,
    OnForward,
    Scripted,
    assert_same,
    both,
    build,
    byte_tokenizer,
    char_tokenizer,
    noisy,
    plain_text,
    prompt,
    shared,
)
from tests.rounds import outcome as made_outcome

NEW = {"max_new_tokens": 24}


def positions_of(model: Any) -> tuple[list[list[int]], Any]:
    """The position ids of every forward, and the hook to remove."""
    seen: list[list[int]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["position_ids"][0].tolist())

    return seen, OnForward(model.model, before=note)


@pytest.mark.parametrize("num_prompt", [1, 2, 17])
def test_positions_stay_contiguous_after_rollbacks(num_prompt):
    """Each forward's positions follow on from the committed text, whatever was rolled back."""
    model, ids = build(), prompt(num_prompt)
    script = Scripted(plain_text(model, ids, **NEW), [0, 4, 1, 2])
    explicit = {"position_ids": torch.arange(num_prompt)[None]}
    seen, hook = positions_of(model)
    with hfspec.patched(model, script, draft_budget=4):
        model.generate(ids, **NEW)  # proves what the next call's rounds stand on, by forwards that are none of a round
        seen.clear()
        script.outcomes.clear()
        model.generate(ids, **NEW)
        hook.remove()
    next_position = 0
    outcomes = [None, *script.outcomes]
    outcomes += [made_outcome(0, 0, 1)] * (len(seen) - len(outcomes))  # the last may be plain
    for positions, outcome in zip(seen, outcomes, strict=True):
        assert positions == list(range(next_position, next_position + len(positions)))
        next_position += len(positions) if outcome is None else outcome.num_committed
    assert next_position == num_prompt + 23
    both(model, noisy(), ids, NEW | explicit, draft_budget=4).assert_same().assert_drafted()


@pytest.mark.parametrize("arch", SUPPORTED)
def test_explicit_position_ids_reach_the_target(arch):
    """Positions with a gap, passed by the user, go on as vanilla lets them go on."""
    call = NEW | {"position_ids": torch.tensor([[0, 1, 2, 10, 11, 12, 20]])}
    both(shared(arch), noisy(arch), prompt(7), call, draft_budget=4).assert_same().assert_drafted()


@pytest.mark.parametrize("types", [[1], [3, 4], [3, 4, 5, 6, 7]], ids=len)
def test_token_type_ids_reach_the_target(types):
    """A model that reads token types gets vanilla's: the prompt's last one for all new tokens."""
    call = NEW | {"token_type_ids": torch.tensor([types])}
    ids = prompt(len(types))
    plain = plain_text(shared("gpt2"), ids, **call)
    assert not torch.equal(plain, plain_text(shared("gpt2"), ids, **NEW)), "the control: types must matter"
    both(shared("gpt2"), Scripted(plain, [4, 0, 2]), ids, call, draft_budget=4).assert_same().assert_drafted()


def test_other_forward_keywords_reach_every_target_forward():
    """A keyword of the model's own forward is handed on in every round, and never to the draft."""

    class Shifted(type(shared())):
        def forward(self, *args: Any, shift: float = 0.0, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.roll(int(shift), dims=-1)
            return out

    model = build()
    model.__class__ = Shifted
    call = NEW | {"shift": 3.0}
    assert not torch.equal(plain_text(model, prompt(), **call), plain_text(model, prompt(), **NEW))
    both(model, noisy(), prompt(), call, draft_budget=4).assert_same().assert_drafted()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_float32_and_float64_are_equal(dtype, do_sample):
    """In float32 and float64 the tokens are vanilla's."""
    model, draft = build(dtype=dtype), build(dtype=dtype, seed=0)
    call = {"max_new_tokens": 60, "do_sample": do_sample}
    both(model, draft, prompt(), call, draft_budget=5).assert_same().assert_drafted()


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_differs_only_at_near_ties(seed):
    """In bfloat16 a difference, if there is one, is proved to be a near-tie."""
    model, draft = build(dtype=torch.bfloat16), build(dtype=torch.bfloat16)
    with hfspec.patched(model, draft, draft_budget=5):
        verdict = hfspec.verify(model, prompt(seed=seed), max_new_tokens=40)
    assert verdict.identical or verdict.near_tie, verdict.summary()


def test_a_temperature_near_zero_works():
    """A law with all its weight on one token divides nothing by nothing."""
    for acceptance in ("seeded", "rejection"):
        call = NEW | {"do_sample": True, "temperature": 1e-6}
        with hfspec.patched(shared(), noisy(), draft_budget=4, acceptance=acceptance):
            fast = shared().generate(prompt(), **call)
        assert torch.equal(fast, plain_text(shared(), prompt(), **NEW)), acceptance


@pytest.mark.parametrize("position", range(1, 8))
@pytest.mark.parametrize(
    "form", [int, lambda eos: [eos, 2], lambda eos: torch.tensor([eos])], ids=["int", "list", "tensor"]
)
def test_eos_ends_the_text_at_every_block_position(position, form):
    """The first EOS ends text, stream and scores, also in the midst of accepted draft tokens."""
    model, ids = shared(), prompt(7)
    text = plain_text(model, ids, **NEW)
    written = text[0, 7:].tolist()
    eos = written[position]
    call = NEW | {"eos_token_id": form(eos), "pad_token_id": PAD}
    call |= {"return_dict_in_generate": True, "output_scores": True}
    pair = both(model, Scripted(text, [9]), ids, call, draft_budget=5).assert_same().assert_drafted()
    assert pair.fast.sequences.shape[1] == 7 + written.index(eos) + 1
    assert len(pair.fast.scores) == written.index(eos) + 1


def test_the_drafts_own_eos_means_nothing():
    """A draft whose config names another EOS drafts on, and the target's decides."""
    draft = build(seed=0)
    text = plain_text(shared(), prompt(), **NEW)
    draft.generation_config.eos_token_id = draft.config.eos_token_id = int(text[0, 9])
    pair = both(shared(), draft, prompt(), NEW, draft_budget=4).assert_same()
    assert pair.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("num_chars", [1, 2, 3])
@pytest.mark.parametrize("start", [1, 4, 5, 6, 11])
def test_stop_strings_cut_where_vanilla_cuts(num_chars, start):
    """Stop strings of one to three tokens, inside a block and across two, cut at vanilla's token."""
    tokenizer, ids = char_tokenizer(), prompt(7)
    text = plain_text(shared(), ids, **NEW)
    stop = tokenizer.decode(text[0, 7 + start : 7 + start + num_chars])
    call = NEW | {"stop_strings": ["not there", stop], "tokenizer": tokenizer}
    pair = both(shared(), Scripted(text, [9]), ids, call, draft_budget=5).assert_same()
    assert pair.fast.shape[1] <= 7 + start + num_chars
    assert tokenizer.decode(pair.fast[0, 7:]).endswith(stop)


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_the_earliest_boundary_wins(max_new_tokens):
    """Where one block holds an EOS, a stop string and the length cap, the first of them ends the text."""
    tokenizer, ids = char_tokenizer(), prompt(7)
    text = plain_text(shared(), ids, **NEW)
    written = text[0, 7:].tolist()
    call = {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": written[5],
        "pad_token_id": PAD,
        "stop_strings": tokenizer.decode(written[3:5]),
        "tokenizer": tokenizer,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    pair = both(shared(), Scripted(text, [9]), ids, call, draft_budget=6).assert_same()
    assert len(pair.fast.scores) == min(max_new_tokens, 5)


def test_minimum_lengths_forbid_the_same_positions(recwarn):
    """EOS is forbidden at vanilla's positions, without a warning."""
    ids = prompt(7)
    eos = int(plain_text(shared(), ids, **NEW)[0, 8])
    for least in ({"min_new_tokens": 9}, {"min_length": 15}):
        call = NEW | least | {"eos_token_id": eos, "pad_token_id": PAD}
        pair = both(shared(), noisy(), ids, call, draft_budget=5).assert_same().assert_drafted()
        assert eos not in pair.fast[0, 7:15].tolist()
    assert not recwarn.list


def test_the_callers_lists_are_left_alone():
    """The caller's processors are in the caller's list after the call, in the same order."""
    mine = LogitsProcessorList([MinLengthLogitsProcessor(12, torch.tensor([5])), CountingProcessor()])
    before = list(mine)
    with hfspec.patched(shared(), noisy(), draft_budget=4):
        shared().generate(prompt(), logits_processor=mine, repetition_penalty=1.2, **NEW)
    assert list(mine) == before


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_streamed_text_is_vanillas_down_to_the_emoji(skip_prompt, capsys):
    """Characters of several tokens are streamed whole, and the text ends where the ids end."""
    tokenizer = byte_tokenizer()
    model = build(vocab_size=len(tokenizer))
    ids = tokenizer("Say: ", return_tensors="pt").input_ids
    words = "h\u00e9llo \U0001f600 w\u00f6rld \U0001f469\u200d\U0001f52c!"
    forced = [ForcingProcessor(ids.shape[1], tokenizer(words).input_ids)]
    call = {"max_new_tokens": len(tokenizer(words).input_ids), "logits_processor": forced}
    text = plain_text(model, ids, **call)

    def streamed(patch: bool) -> tuple[str, str]:
        streamer = TextStreamer(tokenizer, skip_prompt=skip_prompt)
        capsys.readouterr()
        if patch:
            script = Scripted(text, [3, 9, 1], vocab=len(tokenizer))
            with hfspec.patched(model, script, draft_budget=5):
                out = model.generate(ids, streamer=streamer, **call)
                assert hfspec.stats(model).accepted_tokens > 0
        else:
            out = model.generate(ids, streamer=streamer, **call)
        return capsys.readouterr().out, tokenizer.decode(out[0])

    assert streamed(patch=True) == streamed(patch=False)
    printed, decoded = streamed(patch=True)
    assert printed.strip().endswith(words)
    assert decoded.endswith(words)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("kept", [0, 1, 6, 7])
def test_rollback_equals_a_cache_never_extended(kept, attn):
    """After a draft of 7 of which so many are kept, the next logits and the cache are vanilla's."""
    model, ids = shared(attn=attn), prompt(5)
    call = NEW | {"return_dict_in_generate": True, "output_logits": True}
    script = Scripted(plain_text(model, ids, **NEW), [kept])
    both(model, script, ids, call, draft_budget=7).assert_same().assert_drafted()
    assert script.outcomes[0].num_accepted == kept


def test_other_tokenizers_of_equal_size_are_found_out():
    """Vocabularies of equal size with other ids are told apart by content, and the message names both."""
    names = {"tokenizer": named("target-tokens", 0), "draft_tokenizer": named("draft-tokens", 50)}
    model, draft = build(vocab_size=258), build(vocab_size=258, seed=1)
    with pytest.raises(hfspec.IncompatibleDraftError, match="draft-tokens and target tokenizer target-tokens"):
        hfspec.patch(model, draft, on_unsupported="raise", **names)
    both(model, draft, prompt(), NEW, **names).assert_same().assert_plain("draft-tokens", "target-tokens")
    names["draft_tokenizer"] = names["tokenizer"]
    both(model, draft, prompt(), NEW, draft_budget=3, **names).assert_same().assert_drafted()


def named(name: str, shift: int) -> PreTrainedTokenizerFast:
    """The byte tokenizer with every id but the special ones moved on by `shift`."""
    state = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    state["model"]["vocab"] = {
        token: index if index < 2 else 2 + (index + shift) % (len(vocab) - 2) for token, index in vocab.items()
    }
    moved = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(state)))
    moved.name_or_path = name
    return moved


def test_vocabularies_of_other_sizes_are_found_out_without_tokenizers():
    """Far apart sizes are another tokenizer; sizes that padding explains are not."""
    both(shared(), build(vocab_size=150), prompt(), NEW).assert_same().assert_plain("97", "150")
    for size in (96, 98):
        pair = both(shared(), build(vocab_size=size), prompt(), NEW, draft_budget=3).assert_same()
        assert pair.stats.drafted_tokens > 0


def test_a_text_with_an_id_the_draft_lacks_goes_on_plainly():
    """A draft with fewer ids stops at the first text it cannot read, and says so."""
    ids = torch.cat([prompt(), torch.tensor([[VOCAB - 1]])], dim=-1)
    both(shared(), build(vocab_size=96), ids, NEW, draft_budget=3).assert_same().assert_plain("vocabulary of 96")


def test_a_drafts_context_may_be_shorter():
    """Past the draft's last position the call goes on plainly, to vanilla's end."""
    draft = build("gpt2", seed=1, n_positions=16)
    pair = both(shared("gpt2"), draft, prompt(9), {"max_new_tokens": 30}, draft_budget=4).assert_same()
    assert pair.stats.drafted_tokens > 0
    assert "context of 16" in pair.stats.fallback_reason
    long_prompt = both(shared("gpt2"), draft, prompt(20), NEW, draft_budget=4).assert_same()
    assert long_prompt.stats.drafted_tokens == 0


def test_the_targets_own_limit_is_reached_exactly():
    """A target with a last position is never asked for one beyond it by a draft."""
    model = build("gpt2", n_positions=24)
    call = {"max_length": 24}
    pair = both(model, shared("gpt2"), prompt(7), call, draft_budget=8).assert_same().assert_drafted()
    assert pair.fast.shape[1] == 24


def test_a_draft_may_have_another_dtype():
    """A draft in another dtype drafts, and the output is where and what vanilla's is."""
    for dtype in (torch.float32, torch.bfloat16):
        draft = build(seed=0, dtype=dtype)
        for do_sample in (False, True):
            call = NEW | {"do_sample": do_sample}
            both(shared(), draft, prompt(), call, draft_budget=4).assert_same().assert_drafted()


def test_a_draft_without_weights_is_refused_at_once():
    """A draft on `meta` is a clear error when patching, not a puzzle when generating."""
    with torch.device("meta"):
        draft = type(shared())(shared().config)
    with pytest.raises(hfspec.DraftError, match="meta"):
        hfspec.patch(build(), draft)


def test_the_calls_budget_wins_and_does_not_stay():
    """A budget passed to `generate()` holds for that call alone."""
    model = build()
    text = plain_text(model, prompt(), **NEW)
    with hfspec.patched(model, Scripted(text, [9]), draft_budget=2):
        for budget, most in ((6, 6), (None, 2), (DraftBudget(max_tokens=1, policy="fixed"), 1), (None, 2)):
            script = Scripted(text, [9])
            option = {} if budget is None else {"draft_budget": budget}
            model.generate(prompt(), draft=script, **option, **NEW)
            assert max(map(len, script.drafts)) == most


def test_the_ratio_schedule_does_not_leak_between_calls():
    """Each call of the ratio policy starts anew, also after one that raised."""
    model = build()
    text = plain_text(model, prompt(), **NEW)

    def lengths(accepts: list[int], **call: Any) -> list[int]:
        script = Scripted(text, accepts)
        model.generate(prompt(), draft=script, **NEW, **call)
        return [len(draft) for draft in script.drafts]

    class Failing(CountingProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > 18:
                raise RuntimeError("by a user's processor")
            return scores

    with hfspec.patched(model, Scripted(text, [9]), draft_budget="ratio"):
        first = lengths([9])
        assert first[:3] == [5, 6, 7]
        lengths([0])
        assert lengths([9]) == first
        with pytest.raises(RuntimeError, match="by a user's processor"):
            lengths([9], logits_processor=[Failing()])
        assert lengths([9]) == first


def test_threads_do_not_share_a_call():
    """Four threads with ten prompts each write what they would write alone."""
    model, draft = shared(), noisy()
    prompts = [[prompt(3 + i % 5, seed=10 * thread + i) for i in range(10)] for thread in range(4)]
    expected = [[plain_text(model, ids, max_new_tokens=12) for ids in mine] for mine in prompts]
    results: list[list[torch.Tensor]] = [[] for _ in prompts]

    def work(thread: int) -> None:
        results[thread] += [model.generate(ids, max_new_tokens=12) for ids in prompts[thread]]

    with hfspec.patched(model, draft, draft_budget=4):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert hfspec.stats(model).total.accepted_tokens > 0
        assert hfspec.stats(model).total.calls == 40
    for mine, theirs in zip(results, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_a_call_within_a_call_of_the_same_model():
    """A processor that asks the same patched model for a text does not disturb the text around it."""
    expected = plain_text(shared(), prompt(), **NEW)

    class CallsItself(CountingProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 12:
                assert torch.equal(shared().generate(prompt(), **NEW), expected)
            return scores

    with hfspec.patched(shared(), noisy(), draft_budget=4):
        assert torch.equal(shared().generate(prompt(), logits_processor=[CallsItself()], **NEW), expected)


class TestPipeline:
    """The text-generation pipeline gives vanilla's text, and the draft is seen to run."""

    def run(self, texts: Any, rows: int = 1, make_streamer: Any = None, **call: Any) -> tuple[Any, hfspec.Metrics]:
        """The pipeline's result, the same patched and unpatched, and what the patched one counted."""
        model = build()
        results = []

        def generate() -> None:
            more = {"streamer": make_streamer()} if make_streamer else {}
            pipe = TextGenerationPipeline(model=model, tokenizer=char_tokenizer(), batch_size=rows)
            results.append(pipe(texts, max_new_tokens=16, do_sample=False, **call, **more))

        generate()
        with hfspec.patched(model, noisy(), draft_budget=4):
            generate()
            counts = hfspec.stats(model).total
        assert results[0] == results[1]
        return results[1], counts

    def test_a_string(self):
        result, counts = self.run("Once upon a time")
        assert result[0]["generated_text"].startswith("Once upon a time")
        assert counts.drafted_tokens > 0

    def test_a_list(self):
        result, counts = self.run(["Once", "Twice upon", "Never"])
        assert len(result) == 3
        assert (counts.calls, counts.speculative_calls) == (3, 3)

    def test_the_new_text_alone(self):
        result, counts = self.run("Once", return_full_text=False)
        assert not result[0]["generated_text"].startswith("Once")
        assert counts.drafted_tokens > 0

    def test_a_batch(self):
        result, counts = self.run(["Once", "Twice", "Once again", "Never"], rows=2)
        assert len(result) == 4
        assert (counts.calls, counts.speculative_calls) == (2, 2)

    def test_a_streamer(self, capsys):
        _, counts = self.run("Once", make_streamer=lambda: TextStreamer(char_tokenizer()))
        plain, fast = capsys.readouterr().out.strip().split("\n")
        assert plain == fast
        assert counts.drafted_tokens > 0

    def test_hfspecs_own_options(self):
        with hfspec.patched(shared(), noisy()):
            pipe = TextGenerationPipeline(model=shared(), tokenizer=char_tokenizer())
            pipe("Once", max_new_tokens=9, do_sample=False, speculate=False)
            assert hfspec.stats(shared()).fallback_reason == "speculate=False"
            pipe("Once", max_new_tokens=9, do_sample=False, draft_budget=3)
            assert max(hfspec.stats(shared()).budget_histogram) == 3


@pytest.mark.parametrize("arch", SUPPORTED)
def test_a_long_prompt_read_in_chunks(arch):
    """`prefill_chunk_size` reads the prompt in parts, as vanilla does."""
    call = NEW | {"prefill_chunk_size": 4}
    both(shared(arch), noisy(arch), prompt(17), call, draft_budget=4).assert_same().assert_drafted()


def test_a_generation_config_object():
    """What serving code passes: `inputs=`, and everything else in a `GenerationConfig`."""
    config = type(shared().generation_config)(max_new_tokens=20, do_sample=True, top_k=30, bos_token_id=BOS)
    call = {"generation_config": config}
    both(shared(), noisy(), prompt(), call, draft_budget=4).assert_same().assert_drafted()
    assert config.max_new_tokens == 20
    assert not any(name in vars(config) for name in ("draft", "draft_budget"))


def test_ids_stay_below_the_vocabulary():
    """A draft with padded vocabulary lanes never gets one of them into the text."""
    draft = build(vocab_size=VOCAB + 1)
    with torch.no_grad():
        draft.lm_head.weight[VOCAB] = 10.0
    pair = both(shared(), draft, prompt(), NEW, draft_budget=4).assert_same().assert_drafted()
    assert int(pair.fast.max()) < VOCAB


def test_a_round_commits_at_least_one_token():
    """Rounds whose drafts are all wrong still commit the target's own token."""
    script = Scripted(plain_text(shared(), prompt(), **NEW), [0])
    pair = both(shared(), script, prompt(), NEW, draft_budget=5).assert_same()
    assert pair.stats.accepted_tokens == 0
    assert pair.stats.tokens_per_round == 1.0
    assert_same(pair.plain, pair.fast)
