"""One test a fact: a transformers or torch release that breaks one fails here, by name."""

import copy
import functools
import inspect
import io
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    TextGenerationPipeline,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from hfspec.cache.ledger import SpeculativeCache
from hfspec.host import caches, forwards, releases
from hfspec.host.verdicts import cache_problem
from tests.models import PAD, SUPPORTED, build, char_tokenizer, prompt, rows, shared

ALL_STATES = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def spied(base: type, seen: list[Any]) -> type:
    """A subclass made on the fly that notes the arguments of the decoding loops and goes on."""

    def spy(name: str) -> Any:
        def loop(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((name, args, kwargs))
            return getattr(base, name)(self, *args, **kwargs)

        return loop

    loops = (releases.SAMPLE_METHOD, *releases.OTHER_DECODING_METHODS)
    return type(base)(base.__name__, (base,), {name: spy(name) for name in loops if hasattr(base, name)})


def loop_calls(**call: Any) -> list[Any]:
    """The decoding loops that a call came to, with their arguments."""
    model, seen = build(), []
    model.__class__ = spied(type(model), seen)
    model.generate(prompt(5), **({"max_new_tokens": 4} | call))
    return seen


def read(model: Any, ids: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
    """A forward with the cache under this release's name for it."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{releases.CACHE_KEY: cache}, **kwargs)


# The decoding loops


@pytest.mark.parametrize("call", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_the_loop_is_looked_up_on_the_class(call):
    """`generate()` finds `_sample` on `type(model)`, for greedy and sampled calls."""
    assert [name for name, _, _ in loop_calls(**call)] == [releases.SAMPLE_METHOD]


def test_other_loops_are_where_we_look_for_them():
    """Beams and assisted generation go through the methods that hfspec stands in for."""
    assert loop_calls(num_beams=2)[0][0] == "_beam_search"
    assert loop_calls(assistant_model=build(seed=1))[0][0] == "_assisted_decoding"
    assert loop_calls(prompt_lookup_num_tokens=2)[0][0] == "_assisted_decoding"
    assert set(releases.OTHER_DECODING_METHODS) <= set(dir(GenerationMixin))


def test_the_loop_gets_these_arguments():
    """`_sample` is given the ids alone by position, and by keyword what `decode.sample` takes."""
    _, args, kwargs = loop_calls(streamer=char_streamer())[0]
    assert len(args) == 1
    assert torch.equal(args[0], prompt(5))
    assert {"logits_processor", "stopping_criteria", "generation_config", "streamer"} <= set(kwargs)
    assert {"use_cache", releases.CACHE_KEY} <= set(kwargs)
    assert isinstance(kwargs["logits_processor"], LogitsProcessorList)
    assert isinstance(kwargs["generation_config"], GenerationConfig)
    assert type(kwargs[releases.CACHE_KEY]) is DynamicCache


def test_a_callable_loop_passes_the_hook_by():
    """`custom_generate=callable` does not come to `_sample` of the class."""

    def own_loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids

    assert loop_calls(custom_generate=own_loop) == []


def test_the_length_limit_is_readable():
    """`stopping_criteria.max_length` is the whole length at which the call will end."""
    assert loop_calls(max_new_tokens=4)[0][2]["stopping_criteria"].max_length == 9
    assert loop_calls(max_length=8, max_new_tokens=None)[0][2]["stopping_criteria"].max_length == 8


def test_an_all_ones_mask_is_dropped_or_kept_whole():
    """A mask that hides nothing reaches the loop as all ones or not at all; one that hides something, as it is."""
    mask = loop_calls(attention_mask=torch.ones(1, 5, dtype=torch.long))[0][2].get("attention_mask")
    assert mask is None or bool(mask.all())
    padded = torch.tensor([[0, 1, 1, 1, 1]])
    model, seen = build("gpt2"), []
    model.__class__ = spied(type(model), seen)
    model.generate(prompt(5), attention_mask=padded, max_new_tokens=2)
    assert torch.equal(seen[0][2]["attention_mask"], padded)


def test_an_assistant_knows_that_it_is_one():
    """Hugging Face's assisted generation marks the assistant's calls with `is_assistant`."""
    assistant, seen = build(seed=1), []
    assistant.__class__ = spied(type(assistant), seen)
    build().generate(prompt(5), assistant_model=assistant, max_new_tokens=6)
    assert seen
    assert all(kwargs["generation_config"].is_assistant for _, _, kwargs in seen)


def test_unknown_keywords_are_refused():
    """`generate()` raises for keywords that no forward takes, so hfspec's own must be taken out before."""
    with pytest.raises(ValueError, match="draft_budget"):
        build().generate(prompt(5), draft_budget=3)


# One token's work


class Noting(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Processor, criterion and streamer in one, writing the order of calls down."""

    def __init__(self, name: str, order: list[str]) -> None:
        self._name, self._order = name, order

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self._order.append(self._name)
        return scores if self._name == "processor" else torch.tensor([False])

    def put(self, value: torch.Tensor) -> None:
        self._order.append(f"put {list(value.shape)}")

    def end(self) -> None:
        self._order.append("end")


def char_streamer() -> BaseStreamer:
    return Noting("streamer", [])


def test_the_order_of_calls_per_token():
    """Prompt to the streamer; per token processors, then criteria and streamer in the release's order; then the end."""
    order: list[str] = []
    build().generate(
        prompt(5),
        max_new_tokens=2,
        logits_processor=[Noting("processor", order)],
        stopping_criteria=[Noting("criterion", order)],
        streamer=Noting("streamer", order),
    )
    token = ["criterion", "put [1]"] if releases.STREAMS_AFTER_CRITERIA else ["put [1]", "criterion"]
    assert order == ["put [1, 5]", *2 * ["processor", *token], "end"]


def test_processors_get_float32():
    """Scores reach the processors as float32, whatever the model computes in."""
    seen: list[torch.dtype] = []

    class Dtype(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(scores.dtype)
            return scores

    build(dtype=torch.bfloat16).generate(prompt(5), max_new_tokens=2, logits_processor=[Dtype()])
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize("num_rows", [1, 3])
def test_multinomial_is_an_argmax_over_noise(num_rows):
    """`torch.multinomial(probs, 1)` is `argmax(probs / Exp(1))` and leaves the generator where that noise does."""
    probs = torch.randn(num_rows, 1000).softmax(-1)
    for seed in range(20):
        torch.manual_seed(seed)
        drawn, state = torch.multinomial(probs, 1).squeeze(1), torch.get_rng_state()
        torch.manual_seed(seed)
        noise = torch.empty_like(probs).exponential_(1)
        assert torch.equal((probs / noise).argmax(-1), drawn)
        assert torch.equal(torch.get_rng_state(), state)
    other_noise = torch.empty_like(probs).exponential_(1)
    assert not torch.equal((probs / other_noise).argmax(-1), drawn), "the control: other noise, other tokens"


def test_a_private_generator_gives_the_same_noise():
    """A generator put into the default one's state draws what the default one would."""
    state = torch.get_rng_state()
    private = torch.Generator()
    private.set_state(state)
    noise = torch.empty(1, 97).exponential_(1, generator=private)
    assert torch.equal(torch.empty(1, 97).exponential_(1), noise)
    assert torch.equal(private.get_state(), torch.get_rng_state())


def test_the_result_has_these_fields():
    """The dict is a `GenerateDecoderOnlyOutput` with one entry a token and the cache under `CACHE_KEY`."""
    out = build().generate(prompt(5), max_new_tokens=3, **ALL_STATES)
    assert type(out) is GenerateDecoderOnlyOutput
    assert list(out) == ["sequences", "scores", "logits", "attentions", "hidden_states", releases.CACHE_KEY]
    assert [len(out[name]) for name in list(out)[1:5]] == [3] * 4
    assert [tuple(step[0].shape) for step in out.hidden_states] == [(1, 5, 32), (1, 1, 32), (1, 1, 32)]
    assert [tuple(step[0].shape) for step in out.attentions] == [(1, 4, 5, 5), (1, 4, 1, 6), (1, 4, 1, 7)]


def test_the_last_token_is_not_in_the_cache():
    """The cache handed back holds all but the last token, in a plain `DynamicCache`."""
    out = build().generate(prompt(5), max_new_tokens=3, return_dict_in_generate=True)
    cache = out[releases.CACHE_KEY]
    assert type(cache) is DynamicCache
    assert cache.get_seq_length() == 7


# Forwards


@pytest.mark.parametrize("arch", SUPPORTED)
def test_reading_at_once_equals_reading_one_by_one(arch):
    """Logits of several tokens in one cached forward are those of one token at a time."""
    model, ids = shared(arch), prompt(12)
    at_once, single = DynamicCache(), DynamicCache()
    read(model, ids[:, :6], at_once)
    read(model, ids[:, :6], single)
    wide = read(model, ids[:, 6:], at_once).logits
    narrow = torch.cat([read(model, ids[:, i : i + 1], single).logits for i in range(6, 12)], dim=1)
    torch.testing.assert_close(wide, narrow, rtol=1e-5, atol=1e-5)
    assert torch.equal(wide.argmax(-1), narrow.argmax(-1))


@pytest.mark.parametrize("arch", SUPPORTED)
def test_the_cache_keyword_is_not_ignored(arch):
    """The forward fills and reads the cache given as `CACHE_KEY`."""
    cache = DynamicCache()
    read(shared(arch), prompt(6), cache)
    assert cache.get_seq_length() == 6
    with_cache = read(shared(arch), rows(5), cache).logits
    without = read(shared(arch), rows(5), DynamicCache()).logits
    assert not torch.allclose(with_cache, without)


@pytest.mark.parametrize("arch", SUPPORTED)
def test_prefill_is_vanillas(arch):
    """`forwards.prefill` gives the logits of vanilla's first token and fills the cache with the prompt."""
    model, seen = build(arch), []
    model.__class__ = spied(type(model), seen)
    vanilla = model.generate(prompt(5), max_new_tokens=1, return_dict_in_generate=True, output_logits=True).logits[0]
    kwargs = dict(seen[0][2])
    cache = DynamicCache()
    config = kwargs["generation_config"]
    model_kwargs = {
        name: value
        for name, value in kwargs.items()
        if name not in ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
    }
    with torch.no_grad():
        outputs, grown = forwards.prefill(model, prompt(5), config, model_kwargs | {releases.CACHE_KEY: cache})
        assert torch.equal(outputs.logits[:, -1].float(), vanilla)
        assert cache.get_seq_length() == 5
        grown = forwards.advance(model, outputs, grown, 1)
        grown = forwards.advance(model, ModelOutput(), grown, 3)
        inputs = forwards.prepare_last(model, prompt(9), 4, grown)
    assert torch.equal(inputs["input_ids"], prompt(9)[:, 5:])
    positions = inputs.get("position_ids", inputs.get("cache_position"))
    assert positions.flatten().tolist() == [5, 6, 7, 8]


def test_masks_and_token_types_grow_with_the_text():
    """`forwards.advance` appends ones to the mask and repeats the last token type, many at a time."""
    start = {"attention_mask": torch.tensor([[0, 1, 1]]), "token_type_ids": torch.tensor([[0, 0, 1]])}
    if not releases.FEEDS_BY_LENGTH:
        start["cache_position"] = torch.arange(3)
    grown = forwards.advance(build("gpt2"), ModelOutput(), start | {"use_cache": True}, 2)
    assert grown["attention_mask"].tolist() == [[0, 1, 1, 1, 1]]
    assert grown["token_type_ids"].tolist() == [[0, 0, 1, 1, 1]]
    assert start["attention_mask"].shape == (1, 3)


def test_decoding_forwards_have_a_context():
    """`forwards.decoding` is a context manager that leaves the model as it was."""
    model = build()
    before = dict(vars(model))
    with forwards.decoding(model):
        read(model, prompt(3))
    assert vars(model).keys() == before.keys()


def additive(allowed: torch.Tensor) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_an_additive_4d_mask_is_taken_as_it_is(attn):
    """A token masked out by a 4-D additive mask changes nothing, eager and sdpa."""
    model = shared(attn=attn)
    allowed = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    allowed[..., 3:, 2] = False
    one, other = prompt(6), prompt(6)
    other[0, 2] = (other[0, 2] + 1) % 97
    blind = [read(model, ids, attention_mask=additive(allowed)).logits[:, 3:] for ids in (one, other)]
    torch.testing.assert_close(*blind)
    seeing = [read(model, ids).logits[:, 3:] for ids in (one, other)]
    assert not torch.allclose(*seeing)


def test_a_bool_4d_mask_is_a_trap_in_eager_attention():
    """A bool 4-D mask equals the additive one in sdpa, and is silently something else in eager."""
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]

    def same(attn: str) -> bool:
        given_bool = read(shared(attn=attn), prompt(6), attention_mask=allowed).logits
        given_numbers = read(shared(attn=attn), prompt(6), attention_mask=additive(allowed)).logits
        return torch.allclose(given_bool, given_numbers, atol=1e-5)

    assert same("sdpa")
    assert not same("eager")


def test_float64_eager_left_padding_is_nan_in_vanilla():
    """The trap the tests step around: padded RMSNorm models in float64 with eager attention give nan."""
    ids = torch.cat([torch.full((1, 3), PAD), prompt(4)], dim=-1)
    call = {"attention_mask": (ids != PAD).long(), "max_new_tokens": 1} | ALL_STATES
    assert build().generate(ids, **call).logits[0].isnan().all()
    assert not build("gpt2").generate(ids, **call).logits[0].isnan().any()


# Caches


def filled(length: int = 7) -> DynamicCache:
    cache = DynamicCache()
    read(shared(), prompt(12)[:, :length], cache)
    return cache


@pytest.mark.parametrize("kept", [1, 6])
def test_crop_by_a_negative_count_removes_so_many(kept):
    """`crop(-n)` takes the last n slots away and leaves the others as they were, in every release."""
    cache, short = filled(7), filled(kept)
    cache.crop(kept - 7)
    assert cache.get_seq_length() == kept
    for one, other in zip(cache.layers, short.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.values, other.values, rtol=1e-6, atol=1e-6)


def test_a_plain_cache_grows_full_attention_layers():
    """A `DynamicCache` made without a config makes its layers as they are written, all `DynamicLayer`."""
    cache = filled()
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2
    assert cache.offloading is False
    assert not caches.is_empty(cache)
    assert caches.is_empty(DynamicCache())
    assert not caches.is_static(cache)
    assert not caches.keeps_elsewhere(cache)


def test_our_layers_are_made_by_the_host():
    """`layer_class_to_replicate` decides which layers grow, and models are content with them, to the last bit."""
    cache = SpeculativeCache()
    ours = [read(shared(), part, cache).logits for part in prompt(12).split([6, 4, 2], dim=1)]
    theirs_cache = DynamicCache()
    theirs = [read(shared(), part, theirs_cache).logits for part in prompt(12).split([6, 4, 2], dim=1)]
    assert {type(layer).__name__ for layer in cache.layers} == {"SpeculativeLayer"}
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_caches_of_each_kind_are_told_apart():
    """Windows, fixed sizes and offloading are seen on the cache that the host makes for a config."""
    windows = DynamicCache(config=build("mistral").config)
    assert [caches.is_sliding(layer) for layer in windows.layers] == [True, True]
    full = DynamicCache(config=shared().config)
    assert not any(caches.is_sliding(layer) for layer in full.layers)
    static = StaticCache(config=shared().config, max_cache_len=16)
    assert caches.is_static(static)
    assert caches.keeps_elsewhere(static)
    offloaded = DynamicCache()
    offloaded.offloading = True
    assert caches.keeps_elsewhere(offloaded)
    assert all(cache_problem(cache) is None for cache in (windows, full, static, offloaded))
    pair = EncoderDecoderCache(static, DynamicCache())
    assert caches.text_layers(pair) is static.layers
    assert caches.keeps_elsewhere(pair)


@pytest.mark.parametrize("layer", sorted(caches.CROPPABLE_LAYERS, key=lambda layer: layer.__name__))
def test_croppable_layers_forget_their_last_tokens(layer):
    """The layers that are cropped, not copied, hold afterwards what a layer holds that never read more."""
    parts = inspect.signature(layer.__init__).parameters
    make = functools.partial(layer, max_cache_len=16) if "max_cache_len" in parts else layer
    longer, shorter = make(), make()
    keys = torch.randn(1, 2, 9, 4)
    if layer.__name__ == "DummyLayer":  # it holds nothing, so there is nothing to forget
        longer.crop(-3)
        return
    longer.update(keys, -keys)
    shorter.update(keys[..., :6, :], -keys[..., :6, :])
    longer.crop(-3)
    assert int(longer.get_seq_length()) == int(shorter.get_seq_length()) == 6
    more = torch.randn(1, 2, 2, 4)
    assert torch.equal(longer.update(more, more)[0][..., :8, :], shorter.update(more, more)[0][..., :8, :])


def test_a_windows_layer_cannot_be_cropped_beyond_its_window():
    """Why sliding layers of the host's own are brought back by a snapshot."""
    layer = DynamicSlidingWindowLayer(4)
    keys = torch.randn(1, 2, 9, 4)
    layer.update(keys, keys)
    with pytest.raises((ValueError, RuntimeError)):
        layer.crop(-2)


def test_dynamic_layers_never_write_into_their_keys():
    """Why a snapshot of them may keep references: every update makes new tensors."""
    for layer in (DynamicLayer(), DynamicSlidingWindowLayer(4)):
        keys = torch.randn(1, 2, 3, 4)
        layer.update(keys, keys)
        held = layer.keys
        before = held.clone()
        layer.update(keys + 1, keys + 1)
        assert layer.keys is not held
        assert torch.equal(held, before)


def test_model_kwargs_hold_vanillas_cache():
    """The loop is handed a cache made for the config; a sliding model's is recognised there."""
    model, seen = build("mistral"), []
    model.__class__ = spied(type(model), seen)
    model.generate(prompt(5), max_new_tokens=2)
    assert all(caches.is_sliding(layer) for layer in seen[0][2][releases.CACHE_KEY].layers)


def test_an_encoder_decoder_has_run_its_encoder():
    """The loop gets the encoder's outputs and a pair of caches; the encoder's input goes through `ENCODER_METHOD`."""
    model, seen, given = build("t5"), [], []
    encode = getattr(type(model), releases.ENCODER_METHOD)

    def spy(self: Any, inputs_tensor: Any, model_kwargs: Any, model_input_name: Any, *args: Any, **kwargs: Any) -> Any:
        given.append((inputs_tensor, model_input_name))
        return encode(self, inputs_tensor, model_kwargs, model_input_name, *args, **kwargs)

    model.__class__ = spied(type(model), seen)
    setattr(type(model), releases.ENCODER_METHOD, spy)
    out = model.generate(prompt(5), max_new_tokens=3, num_return_sequences=2, do_sample=True, **ALL_STATES)
    _, args, kwargs = seen[0]
    assert torch.equal(given[0][0], prompt(5))
    assert given[0][1] in (None, "input_ids")
    assert args[0].tolist() == [[PAD], [PAD]]
    assert kwargs["encoder_outputs"].last_hidden_state.shape[:2] == (2, 5)
    assert type(kwargs[releases.CACHE_KEY]) is EncoderDecoderCache
    assert type(out) is GenerateEncoderDecoderOutput
    row = forwards.row_of_outputs(kwargs["encoder_outputs"], 1)
    assert torch.equal(row.last_hidden_state, kwargs["encoder_outputs"].last_hidden_state[1:])


# Batches


def test_a_batch_is_drawn_at_once():
    """`_sample` draws one token for all rows from the default generator, finished rows included."""
    ids = torch.cat([prompt(5, seed=seed) for seed in range(3)])
    call = {"do_sample": True, "max_new_tokens": 6, "top_k": 0, "return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(3)
    out = build().generate(ids, **call)
    torch.manual_seed(3)
    for step, scores in enumerate(out.scores):
        assert torch.equal(torch.multinomial(scores.softmax(-1), 1)[:, 0], out.sequences[:, 5 + step])
    eos = int(out.sequences[1, 6])
    torch.manual_seed(3)
    ended = build().generate(ids, **call, eos_token_id=eos, pad_token_id=PAD).sequences
    for row, text in enumerate(out.sequences[:, : ended.shape[1]]):
        after_end = (text[5:] == eos).cumsum(-1) - (text[5:] == eos).long() > 0
        assert torch.equal(ended[row, 5:], text[5:].masked_fill(after_end, PAD))


def test_holes_that_a_mask_hides_change_nothing():
    """Slots in the midst of a row, hidden by a 2-D mask, are nothing to a rotary model that is told the positions."""
    model, ids = shared(attn="sdpa"), prompt(6)
    holes = torch.cat([ids[:, :3], rows(7, 7), ids[:, 3:]], dim=-1)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 2, 2, 3, 4, 5]])
    plain = read(model, ids, DynamicCache()).logits[:, 3:]
    cache = DynamicCache()
    read(model, holes[:, :5], cache, attention_mask=mask[:, :5], position_ids=positions[:, :5])
    hidden = read(model, holes[:, 5:], cache, attention_mask=mask, position_ids=positions[:, 5:]).logits
    torch.testing.assert_close(hidden, plain, rtol=1e-5, atol=1e-5)


def test_rows_are_taken_from_every_tensor_but_the_positions_in_the_cache():
    """`forwards.select_rows` relies on the host's convention that tensors have rows first."""
    kwargs = {
        "attention_mask": torch.arange(6).view(3, 2),
        "cache_position": torch.arange(3),
        "use_cache": True,
        "scalar": torch.tensor(3),
    }
    chosen = forwards.select_rows(kwargs, [2, 0], 3)
    assert chosen["attention_mask"].tolist() == [[4, 5], [0, 1]]
    assert chosen["cache_position"].tolist() == [0, 1, 2]
    assert (chosen["use_cache"], int(chosen["scalar"])) == (True, 3)


# A class made on the fly


def disguised(model: Any) -> Any:
    base = type(model)
    looks = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    model.__class__ = type(base)(base.__name__, (base,), looks)
    return model


def test_a_class_made_on_the_fly_survives_deepcopy():
    """A copy generates with its own weights."""
    model = disguised(build())
    clone = copy.deepcopy(model)
    before = model.generate(prompt(5), max_new_tokens=8)
    with torch.no_grad():
        for weight in clone.parameters():
            weight.neg_()
    assert torch.equal(model.generate(prompt(5), max_new_tokens=8), before)
    assert not torch.equal(clone.generate(prompt(5), max_new_tokens=8), before)


def test_a_class_made_on_the_fly_survives_saving(tmp_path):
    """`save_pretrained` writes the plain model's name and loads as such."""
    model = disguised(build())
    base = type(model).__mro__[1]
    model.save_pretrained(tmp_path)
    loaded = base.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded.generate(prompt(5), max_new_tokens=8), model.generate(prompt(5), max_new_tokens=8))


def test_a_class_made_on_the_fly_works_in_a_pipeline():
    """The text-generation pipeline takes the model by its class's name."""
    pipe = TextGenerationPipeline(model=disguised(build()), tokenizer=char_tokenizer())
    assert pipe("Hello", max_new_tokens=3)[0]["generated_text"].startswith("Hello")


def test_a_class_made_on_the_fly_cannot_be_pickled_by_itself():
    """Why hfspec brings `__reduce_ex__`: pickle refuses a class it does not find by its name."""
    with pytest.raises(Exception, match="not the same object"):
        torch.save(disguised(build()), io.BytesIO())


def test_what_crop_makes_of_a_count():
    """Below 0: so many slots fewer. 0 and above: as `releases` says, in a layer of the host's."""

    def cropped(count):
        layer = DynamicLayer()
        layer.update(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2))
        layer.crop(count)
        return layer.get_seq_length()

    assert cropped(-2) == 3
    assert cropped(0) == (0 if releases.CROPS_ALL_BY_ZERO else 5)
    if releases.CROPS_TO_LENGTH:
        assert cropped(2) == 2
    else:
        with pytest.raises(ValueError, match="positive"):
            cropped(2)
