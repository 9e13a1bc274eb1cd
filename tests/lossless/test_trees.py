"""Trees of drafts: whatever their shape, the text is vanilla's, and of the cache only the accepted path is moved."""

import functools
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hfspec
from hfspec import Context, Draft, DraftSession, DraftSource, RoundBudget
from hfspec.cache.ledger import SpeculativeLayer
from hfspec.host import releases
from hfspec.host.verdicts import tree_problem
from tests.models import (
    COUNTING,
    ENCODER_DECODER,
    RECURRENT,
    VOCAB,
    CountingProcessor,
    Pair,
    Scripted,
    both,
    build,
    char_tokenizer,
    plain_text,
    prompts,
    shared,
)
from tests.trees import ScriptedTrees

#: Nodes that a round may draft, and lengths of right paths: none, some, all.
MOST, ACCEPTS = 32, (3, 0, 5, 1, 99, 2)
#: Five times the windows of the models that have one.
NEW = {"max_new_tokens": 40}
#: Paddings of 0, 3, 7 and 1.
LENGTHS = (11, 8, 4, 10)
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 40}
TAKING = ("llama", "qwen2", "gpt2", "gemma3", "mistral")


@functools.cache
def model_for(arch: str, attn: str, batch: int) -> Any:
    # With padding, eager attention in float64 is nan in vanilla itself where there is an RMSNorm.
    is_nan = attn == "eager" and batch > 1
    return build(arch, attn=attn, dtype=torch.float32) if is_nan else shared(arch, attn=attn)


def call_of(batch: int) -> dict[str, Any]:
    return (prompts(*LENGTHS) if batch > 1 else prompts(9)) | NEW


def with_trees(model: Any, call: Any, accepts: Any = ACCEPTS, **settings: Any) -> tuple[Pair, ScriptedTrees]:
    """A call with trees that know its text, and their source."""
    make = call if callable(call) else lambda: call
    options = {"draft_budget": MOST} | {name: settings.pop(name) for name in ("acceptance",) if name in settings}
    text = plain_text(model, None, **make())
    source = ScriptedTrees(text if isinstance(text, torch.Tensor) else text.sequences, accepts, **settings)
    return both(model, source, None, call, **options), source


class Bushy(DraftSource):
    """Proposes the right token at each depth, with a wrong one beside it."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text[0].tolist()
        self.drafts: list[int] = []

    def start(self, context: Context) -> DraftSession:
        return _BushySession(self)


class _BushySession(DraftSession):
    def __init__(self, source: Bushy) -> None:
        self._source = source

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        right = (self._source.text[input_ids.shape[1] :] + [0] * VOCAB)[: (budget.num_tokens + 1) // 2]
        tokens = [token for each in right for token in (each, (each + 1) % VOCAB)][: budget.num_tokens]
        parents = [2 * (node // 2) - 2 if node > 1 else -1 for node in range(len(tokens))]
        self._source.drafts.append(len(tokens))
        return Draft(torch.tensor([tokens]), parents=torch.tensor([parents]))


# The text is vanilla's


@pytest.mark.parametrize("has_duplicates", [False, True], ids=["distinct", "duplicates"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("arch", TAKING)
def test_any_tree_leaves_vanillas_text(arch, attn, batch, do_sample, has_duplicates):
    """Random trees of 1–32 nodes with forced accept counts: the same text, and the same random state."""
    call = call_of(batch) | (SAMPLED if do_sample else {})
    options = {"acceptance": "seeded"} if do_sample else {}
    pair, source = with_trees(model_for(arch, attn, batch), call, has_duplicates=has_duplicates, **options)
    pair.assert_same().assert_drafted()
    source.assert_forced()
    assert {0, 1, 2, 3, 5} <= source.accepted
    assert max(source.accepted) > 8, "all of a tree"
    assert source.has_branched, "the control: some path must not be the first nodes"
    assert all(source.allowed)
    assert not pair.stats.chain_reasons
    assert not pair.stats.lockstep_reasons


@pytest.mark.parametrize("arch", TAKING)
@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_trees_of_one_size(arch, size):
    """From a single node on, each size in a batch of rows that each draw another tree."""
    pair, source = with_trees(model_for(arch, "sdpa", 4), call_of(4), [0, 1, 2], sizes=[size], has_duplicates=True)
    pair.assert_same().assert_drafted()
    source.assert_forced()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_more_trees(seed, batch):
    """Other shapes, other accept counts, over both kinds of attention layer."""
    accepts = torch.randint(0, 7, (11,), generator=torch.Generator().manual_seed(seed)).tolist()
    model = model_for("gemma3", "sdpa", batch)
    pair, source = with_trees(model, call_of(batch), accepts, seed=seed, has_duplicates=True)
    pair.assert_same().assert_drafted()
    source.assert_forced()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("arch", TAKING)
def test_an_end_within_an_accepted_path(arch, batch):
    """EOS may fall on any depth of a path: what is behind it is not committed, whatever the tree says."""
    model = model_for(arch, "sdpa", batch)
    text = plain_text(model, None, **call_of(batch))[:, -NEW["max_new_tokens"] :]
    for at in (3, 8, 17):
        ends = text[:, at].tolist()
        pair, source = with_trees(model, call_of(batch) | {"eos_token_id": ends}, [4, 7])
        pair.assert_same().assert_drafted()
        source.assert_forced()


@pytest.mark.parametrize("batch", [1, 4])
def test_a_stop_string_within_an_accepted_path(batch):
    """A string of several tokens that a path completes, partly in the text and partly in the tree, ends the text."""
    model, tokenizer = model_for("llama", "sdpa", batch), char_tokenizer()
    text = plain_text(model, None, **call_of(batch))[:, -NEW["max_new_tokens"] :]
    for begin, length in ((2, 3), (9, 5), (14, 2), (20, 4)):
        stops = ["".join(tokenizer.convert_ids_to_tokens(row[begin : begin + length])) for row in text.tolist()]
        call = call_of(batch) | {"stop_strings": stops, "tokenizer": tokenizer}
        pair, _ = with_trees(model, call, [4, 7, 1])
        pair.assert_same().assert_drafted()
        assert pair.plain.shape[1] < max(LENGTHS) + NEW["max_new_tokens"], "the control: some string must be found"


@pytest.mark.parametrize("num_new", [2, 3, 5, 9])
@pytest.mark.parametrize("arch", TAKING)
def test_the_length_limit_is_reached_within_a_tree(arch, num_new):
    """Nodes beyond the last token are never committed."""
    model = model_for(arch, "sdpa", 4)
    pair, _ = with_trees(model, prompts(*LENGTHS) | {"max_new_tokens": num_new}, [1, 0, 99, 2])
    pair.assert_same()
    assert pair.fast.shape[1] == max(LENGTHS) + num_new


def test_the_last_position_of_a_model_is_not_passed():
    """GPT-2's position table ends where the text may end: rows far ahead of others get no nodes below that."""
    model = build("gpt2", n_positions=48, attn="sdpa")
    pair, source = with_trees(model, prompts(8, 8, 8) | {"max_new_tokens": 40}, [6, 0, 0, 6, 1], sizes=[12])
    pair.assert_same().assert_drafted()
    source.assert_forced()


# What is asked for besides the text


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3"])
def test_states_along_the_path(arch, do_sample):
    """Scores, logits, hidden states, attentions and the cache are the accepted path's, token by token."""
    model = model_for(arch, "eager", 1)
    call = call_of(1) | (SAMPLED if do_sample else {})
    call |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    call |= {"output_hidden_states": True, "output_attentions": arch not in ("gemma3",)}
    options = {"acceptance": "seeded"} if do_sample else {}
    pair, source = with_trees(model, call, **options)
    pair.assert_same().assert_drafted()
    assert source.has_branched


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.parts.append([-1])


def test_a_streamer_hears_token_by_token():
    """A single text's streamer gets what it gets in vanilla."""
    heard: list[Heard] = []

    def call() -> dict[str, Any]:
        heard.append(Heard())
        return call_of(1) | {"streamer": heard[-1]}

    pair, source = with_trees(model_for("llama", "sdpa", 1), call)
    pair.assert_same().assert_drafted()
    assert heard[1].parts == heard[2].parts
    assert source.has_branched


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "seeded"])
def test_a_processor_with_a_state_walks_along_trees(do_sample, seed):
    """A user's processor is called once a committed token, in order, by the walk."""
    made: list[CountingProcessor] = []

    def call() -> dict[str, Any]:
        made.append(CountingProcessor())
        return call_of(1) | {"logits_processor": [made[-1]]} | (SAMPLED if do_sample else {})

    options = {"acceptance": "seeded"} if do_sample else {}
    pair, source = with_trees(model_for("gpt2", "sdpa", 1), call, has_duplicates=True, seed=seed, **options)
    pair.assert_same().assert_drafted()
    source.assert_forced()
    assert made[-1].num_calls == NEW["max_new_tokens"]
    assert source.has_branched


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 12, "eos_token_id": list(range(20))}],
    ids=lambda settings: next(iter(settings)),
)
def test_processors_that_look_at_the_text_see_the_path(settings, batch):
    """What is behind a node is processed with that node's path, not with its neighbours."""
    pair, source = with_trees(model_for("llama", "sdpa", batch), call_of(batch) | settings, has_duplicates=True)
    pair.assert_same().assert_drafted()
    source.assert_forced()


# Who takes trees, and who does not


def reason_of(model: Any, call: dict[str, Any], **patch_options: Any) -> str:
    """Why a call's trees are cut to chains, whose text must be vanilla's."""
    pair, source = with_trees(model, call, [99, 0, 3], **patch_options)
    pair.assert_same().assert_drafted()
    assert not any(source.allowed)
    reasons = pair.stats.last.chain_reasons
    assert list(reasons.values()) == [1], "once a call"
    reason = next(iter(reasons))
    assert f"trees cut to chains 1×: {reason}"[:60] in " ".join(str(pair.stats).split())
    return reason


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("arch", ENCODER_DECODER)
def test_decoders_behind_an_encoder_get_chains(arch, batch):
    """T5 works positions out from slots: the first path of each tree is verified, and `stats` says why."""
    assert "takes a token's slot for its position" in reason_of(shared(arch), call_of(batch))


@pytest.mark.parametrize("arch", RECURRENT)
def test_recurrent_models_get_chains(arch):
    """A state has one past."""
    assert "recurrent" in reason_of(shared(arch), call_of(1))


@pytest.mark.parametrize("arch", COUNTING)
def test_models_that_count_slots_get_chains(arch):
    """ALiBi and GPT-Neo's local attention take slots for the text."""
    reason = reason_of(shared(arch, attn="eager"), call_of(1))
    assert "slots" in reason or "positions" in reason


def test_static_caches_get_chains():
    """A cache of fixed size is not ours to move slots in."""
    assert "fixed size" in reason_of(shared("llama"), call_of(1) | {"cache_implementation": "static"})


def test_a_callers_own_cache_gets_chains():
    """So is one that the caller passed."""
    model = shared("llama")
    text = plain_text(model, None, **call_of(1))
    source = ScriptedTrees(text, [99, 0, 3])
    pair = both(model, source, None, lambda: call_of(1) | {releases.CACHE_KEY: DynamicCache()}, draft_budget=MOST)
    pair.assert_same().assert_drafted()
    assert "the caller's own" in next(iter(pair.stats.last.chain_reasons))


def test_an_attention_kernel_of_somebody_elses_gets_chains():
    """Nobody knows what it makes of a mask for each token."""
    AttentionInterface.register("somebodys", sdpa_attention_forward)
    AttentionMaskInterface.register("somebodys", sdpa_mask)
    assert "'somebodys' takes no mask for each token" in reason_of(build("llama", attn="somebodys"), call_of(1))


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_kernels_without_masks_get_chains(kernel):
    """FlashAttention and its like take no mask, or one of their own kind."""
    model = build("llama")
    model.config._attn_implementation_internal = kernel
    assert f"{kernel!r} takes no mask" in tree_problem(model, DynamicCache())


def test_chains_given_as_trees_are_no_loss():
    """Where nothing is cut off a tree, there is nothing to be told."""
    pair, _ = with_trees(shared("t5"), call_of(1), [99])
    assert not pair.assert_same().assert_drafted().stats.chain_reasons


# What it costs, and what is counted


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_only_the_accepted_path_is_moved(arch, batch, monkeypatch):
    """The slots that change places are those of accepted nodes, at most one each, however long the text is."""
    moved = [0]
    honest = SpeculativeLayer.move

    def counting(self: SpeculativeLayer, rows: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> None:
        before = [bits_of(buffer).clone() for buffer in (self._key_buffer, self._value_buffer)]
        honest(self, rows, sources, places)
        after = map(bits_of, (self._key_buffer, self._value_buffer))
        moved[0] += sum(int((one != other).any(dim=-1).sum()) for one, other in zip(before, after, strict=True))

    monkeypatch.setattr(SpeculativeLayer, "move", counting)
    model = model_for(arch, "sdpa", batch)
    pair, source = with_trees(model, call_of(batch), sizes=[24])
    pair.assert_same()
    displaced = sum(sum(node != depth for depth, node in enumerate(outcome.path)) for _, outcome in source.verdicts)
    head_slots = 2 * sum(layer_heads(model) for _ in range(model.config.num_hidden_layers))
    assert 0 < moved[0] <= displaced * head_slots
    moved[0] = 0
    chains = Scripted(pair.plain, [3, 0, 5])
    both(model, chains, None, call_of(batch), draft_budget=4).assert_same().assert_drafted()
    assert moved[0] == 0, "chains stay where they are"


def bits_of(numbers: torch.Tensor) -> torch.Tensor:
    """As integers: what was never written may be nan, which equals nothing."""
    return numbers.view(torch.int64 if numbers.dtype == torch.float64 else torch.int32)


def layer_heads(model: Any) -> int:
    return getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("has_duplicates", [False, True])
def test_trees_are_counted_by_nodes_and_judged_by_depth(batch, has_duplicates):
    """Nodes are drafted and budgeted; a depth is judged once; tokens a round are the paths' and the target's own."""
    pair, source = with_trees(model_for("llama", "sdpa", batch), call_of(batch), has_duplicates=has_duplicates)
    last, outcomes = pair.stats.last, [outcome for _, outcome in source.verdicts]
    drafted = [draft.num_tokens for draft in source.drafts]
    assert last.drafted_tokens == sum(drafted)
    assert last.accepted_tokens == sum(outcome.num_accepted for outcome in outcomes)
    assert last.committed_tokens == sum(outcome.num_committed for outcome in outcomes)
    assert last.row_rounds == sum(size > 0 for size in drafted)
    assert last.tokens_per_round == last.committed_tokens / last.row_rounds
    assert sum(size * rounds for size, rounds in last.budget_histogram.items()) <= sum(drafted)
    assert max(last.budget_histogram) == max(drafted)
    assert last.drafted_by_depth[1] == sum(outcome.num_judged > 0 for outcome in outcomes)
    assert all(0 <= rate <= 1 for rate in last.acceptance_by_depth.values())


@pytest.mark.parametrize("policy", ["measured", "ratio"])
@pytest.mark.parametrize("batch", [1, 4])
def test_policies_that_learn_take_trees(policy, batch):
    """They see a forward over 1 + nodes tokens, and acceptance by depth; confidences of a tree tell nothing."""
    model = model_for("llama", "sdpa", batch)
    text = plain_text(model, None, **call_of(batch))
    source = ScriptedTrees(text, [2, 3, 5])
    budget = hfspec.DraftBudget(min_tokens=4, max_tokens=16, policy=policy)
    both(model, source, None, call_of(batch), draft_budget=budget).assert_same().assert_drafted()
    source.assert_forced()


def test_the_ratio_policy_judges_paths_by_their_depth():
    """A tree whose deepest path is accepted whole is a success, however many nodes it has besides."""
    model = model_for("llama", "sdpa", 1)
    text = plain_text(model, None, **call_of(1))
    source = Bushy(text)
    both(model, source, None, call_of(1), draft_budget="ratio").assert_same().assert_drafted()
    assert max(source.drafts) > source.drafts[0]


# Numbers of other kinds


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_autocast(arch, attn):
    """Under autocast scores have another dtype than the model: masks are taken all the same."""
    model = build(arch, attn=attn, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair, source = with_trees(model, call_of(4))
    pair.assert_drafted()
    assert source.has_branched
    assert "source stopped" not in str(pair.stats)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_layers_of_several_dtypes(attn):
    """A mask in the dtype of the model's first weights does for layers of another."""
    model = build("llama", attn=attn, dtype=torch.float32)
    model.model.layers[1].to(torch.float64)
    model.model.norm.to(torch.float64)
    model.lm_head.to(torch.float64)
    feed = model.model.layers[1].forward
    model.model.layers[1].forward = lambda states, *args, **kwargs: feed(states.double(), *args, **kwargs)
    pair, source = with_trees(model, call_of(1))
    pair.assert_same().assert_drafted()
    source.assert_forced()
