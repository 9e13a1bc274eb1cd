"""Calls of which one architecture or another makes something of its own; found by trying such calls on all of them."""

import pytest
import torch

import hfspec
from hfspec.host import releases
from tests.models import Scripted, assert_close, both
from tests.zoo.tiny import all_species, build
from tests.zoo.verdict import noisy_copy

_SPECIES = {species.name: species for species in all_species()}
NEW = {"max_new_tokens": 14, "do_sample": False}


def of(name, seed=0, dtype=torch.float32):
    """A tiny model of that row of the zoo, and a draft that agrees with it now and then."""
    if name not in _SPECIES:
        pytest.skip("not in this release")
    model = build(_SPECIES[name], seed, dtype)
    model.generation_config.eos_token_id = None
    return model, noisy_copy(model)


def ids_of(*lengths, seed=3):
    """Rows of ids and their mask, padded at the left."""
    ids = torch.randint(3, 79, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def same(name, call, draft=None, **options):
    model, noisy = of(name)
    return both(model, draft or noisy, None, call | NEW, **{"draft_budget": 4} | options).assert_same()


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "jamba", "zamba", "nemotron_h", "recurrent_gemma"])
def test_recurrent_models_without_a_cache(kind):
    """Nothing goes on from a state then: several tokens are read as vanilla reads the whole text."""
    model, _ = of(f"causal: {kind}")
    call = ids_of(10) | NEW | {"use_cache": False}
    script = Scripted(model.generate(**call), [2, 0, 3], vocab=97)
    both(model, script, None, call, draft_budget=4).assert_same().assert_drafted()


@pytest.mark.parametrize("name", ["causal: gpt_neo", "seq2seq: led", "seq2seq: nllb-moe"])
def test_static_caches_that_a_single_token_sees_otherwise(name):
    """Some leave the mask of unfilled slots out where one token comes by itself."""
    same(name, ids_of(10) | {"cache_implementation": "static"}).assert_plain("static cache")


def test_a_decoder_that_leaves_its_mask_out():
    """LED looks at the padding before its decoder's text, unless several tokens come at once."""
    beginning = ids_of(6, 3, seed=8)
    given = {f"decoder_{name}": value for name, value in beginning.items()}
    same("seq2seq: led", ids_of(10, 6) | given).assert_plain("leaves the mask out")
    given["decoder_attention_mask"] = torch.ones_like(given["decoder_attention_mask"])
    same("seq2seq: led", ids_of(10, 6) | given).assert_drafted()


@pytest.mark.parametrize("lengths", [(10, 10), (10, 7), (4, 10)])
def test_a_model_that_widens_masks_keeps_rows_in_step(lengths):
    """GIT makes room for its picture in any mask, so that no slot may be hidden."""
    pair = same("causal: git", ids_of(*lengths)).assert_drafted()
    assert any("widens masks" in reason for reason in pair.stats.last.lockstep_reasons)


@pytest.mark.parametrize(("capacity", "is_plain"), [(4, True), (64, False)])
def test_experts_that_take_so_many_tokens(capacity, is_plain):
    """More draft tokens than an expert takes would be left out."""
    model, draft = of("seq2seq: switch_transformers")
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = capacity
    model.config.expert_capacity = capacity
    pair = both(model, draft, None, ids_of(10) | NEW, draft_budget=6).assert_same()
    pair.assert_plain("leave out tokens") if is_plain else pair.assert_drafted()


def test_experts_drawn_at_random():
    """Another number of forwards would draw others."""
    model, draft = of("seq2seq: nllb-moe")
    model.config.second_expert_policy = "random"
    both(model, draft, None, ids_of(10) | NEW | {"do_sample": True}).assert_same().assert_plain("at random")


@pytest.mark.parametrize("seed", [1, 2])
def test_positions_that_begin_later(seed):
    """DeepSeek-V4's attention goes by where positions begin."""
    model, draft = of("causal: deepseek_v4", seed)
    call = ids_of(10) | {"position_ids": torch.arange(10)[None] + 3} | NEW
    both(model, draft, None, call, draft_budget=4).assert_same().assert_plain("where positions begin later")


@pytest.mark.parametrize("num_rows", [1, 3])
def test_no_draft_reaches_beyond_a_table_of_positions(num_rows):
    """MPT's ends at `max_seq_len`; a text that ends just before it is vanilla's."""
    model, draft = of("causal: mpt")
    limit = model.config.max_seq_len
    call = ids_of(*[limit - 12] * num_rows) | NEW | {"max_new_tokens": 40}
    ends = [int(row[limit - 3]) for row in model.generate(**call | {"max_new_tokens": 12})]
    both(model, draft, None, call | {"eos_token_id": ends}, draft_budget=16).assert_same()


def test_a_state_of_the_models_own_kind_over_turns():
    """MiniMax writes into the cache that is passed: the user's own, and as vanilla leaves it."""
    model, draft = of("causal: minimax")
    texts = []
    for is_fast in (False, True):
        out = model.generate(**ids_of(10), return_dict_in_generate=True, **NEW)
        text, cache = out.sequences, out[releases.CACHE_KEY]
        for turn in range(2):
            text = torch.cat([text, ids_of(4, seed=turn)["input_ids"]], dim=-1)
            with hfspec.patched(model, draft, draft_budget=3) if is_fast else torch.no_grad():
                text = model.generate(text, **{releases.CACHE_KEY: cache}, **NEW)
        texts.append(text)
    assert torch.equal(*texts)


@pytest.mark.parametrize(("kind", "is_plain"), [("rwkv", True), ("minimax", True), ("gemma3n_text", False)])
def test_states_of_other_shapes(kind, is_plain):
    """Gemma 3n's hidden states have a dimension more; models with a state of their own have no attention weights."""
    model, draft = of(f"causal: {kind}")
    states = {"output_hidden_states": True, "output_attentions": is_plain, "return_dict_in_generate": True}
    pair = both(model, draft, None, ids_of(10) | NEW | states, draft_budget=4)
    for name in ("sequences", "hidden_states", *(["attentions"] if is_plain else [])):
        assert_close(pair.plain[name], pair.fast[name], name)
    pair.assert_plain("attention weights") if is_plain else pair.assert_drafted()


def test_a_state_is_handed_back_under_the_name_of_a_cache():
    """As vanilla hands it back."""
    model, _ = of("causal: rwkv")
    call = ids_of(10) | {"return_dict_in_generate": True} | NEW
    plain = model.generate(**call)
    with hfspec.patched(model, Scripted(plain.sequences, [2, 0, 3], vocab=97), draft_budget=3):
        fast = model.generate(**call)
        assert hfspec.stats(model).drafted_tokens > 0
    assert list(fast) == list(plain)
    assert torch.equal(fast.sequences, plain.sequences)


def test_layers_that_a_model_adds_to_its_cache():
    """Dory's later loops write into layers of their own: those handed back are of the kind that vanilla's are."""
    model, draft = of("causal: dory")
    text, caches = None, []
    for is_fast in (False, True):
        with hfspec.patched(model, draft, draft_budget=4) if is_fast else torch.no_grad():
            out = model.generate(**ids_of(10), return_dict_in_generate=True, **NEW)
        text, cache = out.sequences, out[releases.CACHE_KEY]
        caches.append([(type(layer), int(layer.get_seq_length()), layer.keys.shape) for layer in cache.layers])
        longer = torch.cat([text, ids_of(4)["input_ids"]], dim=-1)
        caches[-1].append(model.generate(longer, **{releases.CACHE_KEY: cache}, **NEW).tolist())
    assert caches[0] == caches[1]
