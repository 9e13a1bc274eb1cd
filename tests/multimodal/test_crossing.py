"""Models whose text looks across at pictures: inputs hold a mask for each token, or what was made of a picture."""

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    LlamaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    StaticCache,
)

import hfspec
from hfspec.host import releases
from hfspec.verification.target import Target
from tests.models import PAD, VOCAB, Scripted, both, build, noisy, prompt
from tests.multimodal.tiny import noisy_copy

#: What 5.17 has to say of its own code.
pytestmark = pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")

NEW = {"max_new_tokens": 20}
SEEDED = {"do_sample": True, "top_k": 12}
IDS = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None}


def _mllama() -> Any:
    text = {
        **IDS,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "cross_attention_layers": [1],
        ("rope_parameters" if releases.CACHE_KEY == "cache" else "rope_scaling"): {"rope_type": "default"},
    }
    vision = {
        "image_size": 30,
        "patch_size": 15,
        "hidden_size": 16,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 32,
        "num_hidden_layers": 2,
        "num_global_layers": 2,
        "attention_heads": 4,
        "intermediate_size": 37,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [2, 2]],
        "max_num_tiles": 2,
    }
    return MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=vision, image_token_index=4))


def _idefics(uses_resampler: bool) -> Any:
    vision = {
        "image_size": 30,
        "patch_size": 15,
        "embed_dim": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 37,
    }
    perceiver = {
        "qk_layer_norms_perceiver": False,
        "resampler_depth": 2,
        "resampler_head_dim": 8,
        "resampler_n_heads": 2,
        "resampler_n_latents": 16,
    }
    config = IdeficsConfig(
        **IDS,
        vocab_size=VOCAB,
        additional_vocab_size=1,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=37,
        max_position_embeddings=512,
        cross_layer_interval=2,
        use_resampler=uses_resampler,
        vision_config=vision,
        perceiver_config=perceiver,
    )
    return IdeficsForVisionText2Text(config)


MODELS = {"mllama": _mllama, "idefics": lambda: _idefics(False), "idefics with a resampler": lambda: _idefics(True)}


@functools.cache
def seeing(name: str) -> Any:
    """A random model of that kind, which heeds what it looks across at."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name]().double().eval()
        with torch.no_grad():
            for path, weight in model.named_parameters():
                if path.endswith("_gate") or "alpha" in path:  # how much of the pictures is let in: at first nothing
                    weight.fill_(1.0 if "resampler" in name else 0.3)
                elif weight.dim() > 1 and "norm" not in path:
                    weight.mul_(3.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def pictures(name: str, num_rows: int, seed: int = 0) -> dict[str, Any]:
    """Prompts of nine ids with two pictures; the first three ids see none of them, the next three one."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB, (num_rows, 9), generator=random)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    sees = torch.tensor([[0, 0]] * 3 + [[1, 0]] * 3 + [[1, 1]] * 3).expand(num_rows, -1, -1)
    if name != "mllama":
        pixels = torch.rand(num_rows, 2, 3, 30, 30, generator=random, dtype=torch.float64)
        return text | {"pixel_values": pixels, "image_attention_mask": sees}
    return text | {
        "pixel_values": torch.rand(num_rows, 2, 2, 3, 30, 30, generator=random, dtype=torch.float64),
        "aspect_ratio_ids": torch.tensor([[2, 1]] * num_rows),
        "aspect_ratio_mask": torch.tensor([[[1, 1], [1, 0]]] * num_rows),
        "cross_attention_mask": sees[..., None].expand(-1, -1, -1, 2).contiguous(),
    }


each_model = pytest.mark.parametrize("name", MODELS)
each_size = pytest.mark.parametrize("num_rows", [1, 2])


@each_model
def test_the_text_depends_on_the_pictures(name):
    """The control: other pictures, another text."""
    one, other = (seeing(name).generate(**pictures(name, 1), **NEW)[0, 9:] for _ in range(2))
    assert torch.equal(one, other)
    call = pictures(name, 1)
    call["pixel_values"] = -call["pixel_values"]
    assert not torch.equal(one, seeing(name).generate(**call, **NEW)[0, 9:])


@pytest.mark.parametrize("choice", [{}, SEEDED], ids=["greedy", "seeded"])
@each_size
@each_model
def test_a_draft_that_sees(name, num_rows, choice):
    call = pictures(name, num_rows) | NEW | choice
    both(seeing(name), noisy_copy(seeing(name)), None, call, draft_budget=4).assert_same().assert_drafted()


@pytest.mark.parametrize("is_padded", [False, True], ids=["bare", "padded"])
@each_model
def test_the_same_weights_are_always_accepted(name, is_padded):
    """The draft looks at the pictures in all of its forwards, and at as many of them as the target."""
    model, call = seeing(name), pictures(name, 1)
    if is_padded:  # what there is for each id has a place for padding, too
        call = {
            key: torch.cat([torch.zeros_like(each[:, :2]), each], 1) if each.shape[1] == 9 else each
            for key, each in call.items()
        }
    pair = both(model, copy.deepcopy(model), None, call | NEW, draft_budget=4)
    assert pair.assert_same().stats.last.acceptance_rate == 1.0


@each_model
def test_a_draft_that_reads_text_alone(name):
    draft = build(vocab_size=VOCAB) if name == "mllama" else noisy()
    assert isinstance(draft, LlamaForCausalLM)
    both(seeing(name), draft, None, pictures(name, 1) | NEW, draft_budget=4).assert_same()


@pytest.mark.parametrize(
    "more",
    [{}, {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}],
    ids=["ids", "dict"],
)
@each_size
@each_model
def test_every_accept_count(name, num_rows, more):
    """What holds pictures in the cache is never cut; rounds of every outcome go on behind it as vanilla would."""
    model, call = seeing(name), pictures(name, num_rows) | NEW
    script = Scripted(model.generate(**call), [0, 3, 1, 4, 2])
    both(model, script, None, call | more, draft_budget=4).assert_same().assert_drafted()
    assert len({outcome.num_accepted for outcome in script.outcomes}) >= 3


@pytest.mark.parametrize("kind", ["the user's", "static", "none"])
@each_model
def test_other_caches(name, kind):
    """The text is vanilla's over every cache; drafted, but for static ones that cannot hold pictures."""
    model = seeing(name)

    def call() -> dict[str, Any]:
        config = model.config.get_text_config()
        if kind == "static":
            cache = {releases.CACHE_KEY: StaticCache(config=config, max_cache_len=60)}
        else:
            cache = {"use_cache": False} if kind == "none" else {releases.CACHE_KEY: DynamicCache(config=config)}
        return pictures(name, 1) | NEW | cache

    try:
        expected = model.generate(**call())
    except Exception as error:
        with hfspec.patched(model, copy.deepcopy(model), draft_budget=4), pytest.raises(type(error)):
            model.generate(**call())
        return
    with hfspec.patched(model, copy.deepcopy(model), draft_budget=4):
        assert torch.equal(model.generate(**call()), expected)
        assert hfspec.stats(model).last.accepted_tokens > 0


@each_model
def test_a_wide_forward_that_fails_cuts_no_picture(name, monkeypatch):
    """It is taken back, layer by layer, and the rest is written plainly."""
    model, honest = seeing(name), Target._forward
    last = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")][-1]

    def failing(self: Target, inputs: dict[str, Any], *counts: int) -> Any:
        is_wide = inputs["input_ids"].shape[1] > 1
        hook = last.register_forward_pre_hook(lambda *_: 1 / 0) if is_wide else None
        try:
            return honest(self, inputs, *counts)
        finally:
            if hook is not None:
                hook.remove()

    monkeypatch.setattr(Target, "_forward", failing)
    pair = both(model, copy.deepcopy(model), None, pictures(name, 1) | NEW, draft_budget=4)
    pair.assert_same().assert_plain("raises ZeroDivisionError")


class Counts(LlamaForCausalLM):
    """Its inputs grow by how many forwards were made: nobody can tell what a wide forward would have to be given."""

    def forward(self, *args: Any, num_forwards: int = 0, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs["logits"] = outputs.logits + 0.0 * num_forwards
        outputs["num_forwards"] = num_forwards + 1
        return outputs

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: Any, is_encoder_decoder: bool = False, num_new_tokens: int = 1
    ) -> Any:
        grown = super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
        return grown | {"num_forwards": outputs.num_forwards}

    def prepare_inputs_for_generation(self, *args: Any, num_forwards: int = 0, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs) | {"num_forwards": num_forwards}


def test_inputs_that_grow_by_every_forward():
    """Logits agree, and yet what comes after a wide forward would be another input: the model is written plainly."""
    model = build("llama", attn="sdpa")
    model.__class__ = Counts
    Counts._update_model_kwargs_for_generation.__module__ = "transformers.models.counts"
    Counts.prepare_inputs_for_generation.__module__ = "transformers.models.counts"
    call = {"use_cache": True, **NEW}
    both(model, noisy(attn="sdpa"), prompt(), call, draft_budget=4).assert_same().assert_plain("depend on what every")


def test_an_input_that_comes_while_the_text_is_written():
    """Every growth of the inputs takes a piece of it: nothing may be grown ahead."""

    class Hears(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, *args: Any, pieces: Any = None, **kwargs: Any) -> Any:
            return super().prepare_inputs_for_generation(*args, **kwargs)

        def _update_model_kwargs_for_generation(
            self, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            heard.append(next(model_kwargs["pieces"]))
            return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

        def _validate_model_kwargs(self, model_kwargs: Any) -> None:
            """Anything goes."""

    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        getattr(Hears, name).__module__ = "transformers.models.hears"
    heard: list[int] = []
    model = build("llama", attn="sdpa")
    model.__class__ = Hears
    pair = both(model, noisy(attn="sdpa"), prompt(), lambda: NEW | {"pieces": iter(range(100))}, draft_budget=4)
    pair.assert_same().assert_plain("piece by piece")
    assert heard == 2 * list(range(20))
