"""What a call brings besides its ids: masks of any kind, token types, odd padding ids, an encoder's inputs, a cache."""

import copy
import importlib
import inspect
import pkgutil
import warnings

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    MistralForCausalLM,
    StaticCache,
    StoppingCriteria,
    UdopConfig,
    UdopForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

import hfspec
from hfspec.host import architectures, forwards, releases
from tests.models import (
    PAD,
    RECURRENT,
    FunctionSource,
    OnForward,
    Scripted,
    both,
    build,
    noisy,
    prompt,
    prompts,
    shared,
)
from tests.multimodal.tiny import IMAGE, pictures, seeing, sounds, whisper

GREEDY = {"do_sample": False, "max_new_tokens": 20}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.float64])
@pytest.mark.parametrize("arch", ["llama", "mistral", "gpt2"])
def test_a_mask_of_any_dtype(arch, dtype):
    """Rows of other lengths go each at its own pace, packed or not, whatever the mask's numbers are."""
    call = prompts(7, 3, 9)
    call["attention_mask"] = call["attention_mask"].to(dtype)
    model = build(arch, attn="sdpa", dtype=torch.float32)
    draft = copy.deepcopy(model)
    both(model, draft, None, call | GREEDY, draft_budget=4).assert_same().assert_drafted()


def test_rotary_positions_have_no_end():
    """Beyond `max_position_embeddings` too, the target writes on and the draft drafts."""
    model, draft = (build("llama", attn="sdpa", max_position_embeddings=16) for _ in range(2))
    pair = both(model, draft, prompt(20), GREEDY, draft_budget=4).assert_same().assert_drafted()
    assert pair.stats.last.acceptance_rate == 1
    assert not pair.stats.last.plain_reasons


@pytest.mark.parametrize("length", [7, 14, 15])
def test_learned_positions_end_where_vanilla_ends(length):
    """A table of positions is used up to its last; behind it vanilla fails, and so does the patched model."""
    model, draft = (build("gpt2", attn="sdpa", n_positions=16) for _ in range(2))
    fits = {"do_sample": False, "max_new_tokens": 17 - length}
    both(model, draft, prompt(length), fits, draft_budget=4).assert_same()
    for is_fast in (False, True):
        if is_fast:
            hfspec.patch(model, draft, draft_budget=4)
        with pytest.raises(IndexError):
            model.generate(prompt(length), do_sample=False, max_new_tokens=18 - length)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_an_empty_prompt_gets_vanillas_error(arch):
    model, nothing = build(arch), torch.empty(1, 0, dtype=torch.long)
    errors = []
    for is_fast in (False, True):
        if is_fast:
            hfspec.patch(model, noisy(arch))
        with pytest.raises((IndexError, RuntimeError, ValueError)) as caught:
            model.generate(nothing, **GREEDY)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_an_end_token_without_padding_gets_vanillas_error():
    model, errors = build(), []
    model.generation_config.pad_token_id = None
    for is_fast in (False, True):
        if is_fast:
            hfspec.patch(model, noisy())
        with pytest.raises(TypeError) as caught:
            model.generate(prompt(), stopping_criteria=[EosTokenCriteria(5)], **GREEDY)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("pad_id", [-1, -100, 5000])
@pytest.mark.parametrize("more", [{}, {"return_dict_in_generate": True}], ids=["ids", "dict"])
def test_padding_that_cannot_be_read(more, pad_id):
    """Vanilla never reads it if the last row ends right behind the first, and fails if the last one goes on."""
    model, ids = build(attn="sdpa"), torch.cat([prompt(seed=seed) for seed in range(2)])
    free = model.generate(ids, **GREEDY)[:, 7:]
    outcomes = []
    for is_fast in (False, True):
        if is_fast:
            hfspec.patch(model, copy.deepcopy(model), draft_budget=3)
        for ends in ([int(free[0, 2]), int(free[1, 3])], [int(free[0, 2])]):
            try:
                out = model.generate(ids, eos_token_id=ends, pad_token_id=pad_id, **GREEDY, **more)
                outcomes.append((out if isinstance(out, torch.Tensor) else out.sequences).tolist())
            except IndexError as error:
                outcomes.append(str(error))
    assert outcomes[:2] == outcomes[2:]
    assert isinstance(outcomes[0], list)
    assert isinstance(outcomes[1], str)


class RaisingProcessor(LogitsProcessor):
    """Raises when the text has a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            raise KeyError("stop here")
        return scores


class RaisingCriterion(StoppingCriteria):
    """The same."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            raise KeyError("stop here")
        return torch.zeros(len(input_ids), dtype=torch.bool)


class RaisingStreamer(BaseStreamer):
    """The same."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, 0

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.shape[-1]
        if self.seen == self.length:
            raise KeyError("stop here")

    def end(self) -> None:
        """Never reached."""


_RAISING = {
    "logits_processor": lambda length: [RaisingProcessor(length)],
    "stopping_criteria": lambda length: [RaisingCriterion(length)],
    "streamer": RaisingStreamer,
}
_CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
}
_KINDS = [("dynamic", "llama"), ("static", "llama"), ("dynamic", "mistral")]
_KINDS += [("dynamic", arch) for arch in RECURRENT if arch == "qwen3_next"]


@pytest.mark.parametrize("place", _RAISING)
@pytest.mark.parametrize(("kind", "arch"), _KINDS)
def test_a_cache_after_an_error(kind, arch, place):
    """Wherever somebody's code raises, the caller's cache is as long as vanilla leaves it, and goes on as vanilla's."""
    model = build(arch, attn="sdpa")

    def run(length):
        cache = _CACHES[kind](model.config)
        with pytest.raises(KeyError):
            model.generate(prompt(7), **{place: _RAISING[place](length), releases.CACHE_KEY: cache}, **GREEDY)
        read = int(cache.get_seq_length())
        kwargs = {releases.CACHE_KEY: cache, "return_dict": True, "use_cache": True}
        if not releases.FEEDS_BY_LENGTH:
            kwargs["cache_position"] = torch.tensor([read])
        with torch.no_grad():
            return read, model(prompt(1, seed=3), **kwargs).logits

    lengths = range(8, 16)
    plain = [run(length) for length in lengths]
    hfspec.patch(model, copy.deepcopy(model), draft_budget=4)
    fast = [run(length) for length in lengths]
    assert [read for read, _ in plain] == [read for read, _ in fast]
    for (_, one), (_, other) in zip(plain, fast, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("arch", ["llava", "qwen2_vl", "gemma3", "idefics3"])
def test_a_draft_proposes_an_images_place(arch, use_cache):
    """Where forwards read the whole text with its images, a draft is cut before an id that stands for one."""
    source = FunctionSource(
        lambda ids, budget, number: hfspec.Draft(torch.tensor([[7, IMAGE, 8]])[:, : budget.num_tokens])
    )
    call = pictures(arch, 3) | GREEDY | {"use_cache": use_cache, "suppress_tokens": [IMAGE]}
    both(seeing(arch), source, None, call, draft_budget=3).assert_same()


def test_token_types_reach_the_draft():
    """A draft that is the target's copy is right in every token, whatever types the prompt's ids have; batches too."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5, eos_token_id=None, pad_token_id=PAD
    )
    model = GPT2LMHeadModel(config).double().eval()
    for call in ({"input_ids": prompt(8)}, prompts(7, 3, 9)):
        types = torch.randint(0, 97, call["input_ids"].shape)
        model_call = call | {"token_type_ids": types} | GREEDY
        if len(types) > 1:
            model = model.float()
        pair = both(model, copy.deepcopy(model), None, model_call, draft_budget=3).assert_same().assert_drafted()
        assert pair.stats.last.acceptance_rate == 1


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_draft_reads_a_prompt_in_the_calls_chunks(chunk):
    """No forward of the draft is wider than the call wants it, but for its last token and a round's."""
    model, draft, widths = build(attn="sdpa"), build(attn="sdpa"), []
    OnForward(draft, lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]))
    both(
        model, draft, prompt(30), GREEDY | {"prefill_chunk_size": chunk}, draft_budget=3
    ).assert_same().assert_drafted()
    assert max(widths) <= max(chunk, 2) or chunk > 30
    assert sum(widths) >= 30


def test_all_of_an_encoders_inputs_reach_the_drafts_encoder():
    torch.manual_seed(0)
    config = UdopConfig(
        vocab_size=100, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_decoder_layers=2, num_heads=4, image_size=32,
        patch_size=16, max_2d_position_embeddings=1024, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = UdopForConditionalGeneration(config).eval()
    ids = torch.randint(3, 99, (1, 6))
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "bbox": torch.rand(1, 6, 4).sort(-1).values,
        "pixel_values": torch.rand(1, 3, 32, 32),
        "max_new_tokens": 12,
        "min_new_tokens": 12,
    }
    pair = both(model, copy.deepcopy(model), None, call, draft_budget=3).assert_same().assert_drafted()
    assert pair.stats.last.acceptance_rate == 1


def test_features_are_cast_for_the_draft():
    """A speech draft in another dtype gets the sound in its own."""
    call = {"input_features": sounds(), "max_new_tokens": 12, "return_timestamps": False}
    pair = both(whisper(), whisper().to(torch.float64), None, call, draft_budget=3)
    pair.assert_same().assert_drafted()


class OwnPositions(MistralForCausalLM):
    """Lets the model count slots, whatever positions there are: EXAONE 4.5, Kosmos 2.5."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs) | {"position_ids": None}


OwnPositions.prepare_inputs_for_generation.__module__ = "transformers.models.own_positions"


@pytest.mark.parametrize("lengths", [(12,), (12, 5, 9)], ids=["one row", "rows"])
def test_a_preparation_that_makes_positions_of_its_own(lengths):
    """Rows are never moved about in its cache: padding and holes count as places in the text."""
    model = build("mistral", attn="sdpa")
    model.__class__ = OwnPositions
    call = prompts(*lengths) | {"do_sample": False, "max_new_tokens": 40}
    script = Scripted(model.generate(**call), [0, 4, 1, 2])
    pair = both(model, script, None, call, draft_budget=4).assert_same().assert_drafted()
    own = ["the model's own preparation of its inputs makes positions of its own"]
    assert list(pair.stats.lockstep_reasons) == (own if len(lengths) > 1 else [])


def _overriding(method: str) -> list[type]:
    """The host's generating classes that have a method of their own."""
    found = []
    for module in pkgutil.iter_modules(transformers.models.__path__):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what the host's modules have to say of torch
                modeling = importlib.import_module(f"transformers.models.{module.name}.modeling_{module.name}")
        except ImportError:  # some need packages that are not here
            continue
        for _, kind in inspect.getmembers(modeling, inspect.isclass):
            own = vars(kind).get(method)
            if issubclass(kind, GenerationMixin) and own is not None and kind.__module__ == modeling.__name__:
                found.append(kind)
    return found


def test_inputs_that_a_class_grows_itself_are_grown_as_vanilla_grows_them():
    """By every override in this release: one token at a time, as vanilla calls it, whatever number is wanted."""
    overriding = _overriding("_update_model_kwargs_for_generation")
    assert len(overriding) >= 4
    for kind in overriding:
        calls = []

        def noting(self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=1, calls=calls, **kwargs):
            calls.append(num_new_tokens)
            return model_kwargs

        stand_in = type(kind.__name__, (kind,), {"_update_model_kwargs_for_generation": noting})
        model = stand_in.__new__(stand_in)
        torch.nn.Module.__init__(model)
        model.config = transformers.PretrainedConfig()
        forwards.advance(model, {}, {}, num_new_tokens=3)
        assert calls == [1, 1, 1], kind
    assert architectures.is_rotary(shared().config)
