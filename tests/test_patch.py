"""Put on and taken off: one instance, nothing else, and undone completely."""

import copy
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, pipeline
from transformers.generation.streamers import BaseStreamer

import hfspec
from hfspec.patch import is_patched
from tests.models import Scripted, build, char_tokenizer, noisy, plain_text, prompt, shared

NEW = {"max_new_tokens": 16}


def negate(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.neg_()


def test_it_returns_the_same_object():
    """`patch` and `unpatch` return the model they were given."""
    model = build()
    assert hfspec.patch(model, noisy()) is model
    assert hfspec.unpatch(model) is model


def test_taking_it_off_restores_everything():
    """After `unpatch` class and instance dict are what they were, object by object."""
    model = build()
    before_class, before = type(model), dict(vars(model))
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    hfspec.patch(model, noisy())
    assert dict(vars(model)) == before, "patching writes nothing into the instance"
    model.generate(prompt(), **NEW)
    hfspec.unpatch(model)
    assert type(model) is before_class
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[name] is value for name, value in before.items())
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation_config


def test_patching_twice_is_patching_once_with_the_newer_options():
    """A second `patch` changes the options; one `unpatch` takes it off."""
    model = build()
    base = type(model)
    hfspec.patch(model, noisy(), draft_budget=2)
    hfspec.patch(model, noisy(), draft_budget=5)
    assert type(model).__mro__[1] is base
    model.generate(prompt(), **NEW)
    assert max(hfspec.stats(model).budget_histogram) == 5
    assert type(hfspec.unpatch(model)) is base


def test_patching_again_without_a_draft_keeps_it():
    """Options change; the draft, the counts and what was measured stay."""
    model, draft = build(), noisy()
    hfspec.patch(model, draft, draft_budget=2)
    model.generate(prompt(), **NEW)
    hfspec.patch(model, draft_budget=5)
    model.generate(prompt(), **NEW)
    stats = hfspec.stats(model)
    assert stats.total.calls == 2
    assert max(stats.last.budget_histogram) == 5
    hfspec.patch(model, draft)
    assert hfspec.stats(model).total.calls == 0


def test_stats_are_as_they_were_when_asked_for():
    """Later calls do not change what an earlier `stats` returned."""
    model = hfspec.patch(build(), noisy())
    before = hfspec.stats(model)
    model.generate(prompt(), **NEW)
    assert (before.total.calls, before.last.calls) == (0, 0)
    assert hfspec.stats(model).total.calls == 1


def test_unpatching_what_is_not_patched_changes_nothing():
    """`unpatch` twice, or on a model never patched, leaves it as it is."""
    model = build()
    base = type(model)
    hfspec.unpatch(model)
    hfspec.unpatch(hfspec.unpatch(hfspec.patch(model, noisy())))
    assert type(model) is base


def test_only_this_instance_is_patched():
    """Another model of the same class, and the draft, stay plain."""
    model, other, draft = build(), build(), build(seed=1)
    base, sample = type(model), GenerationMixin._sample
    with hfspec.patched(model, draft):
        assert is_patched(model)
        assert type(other) is type(draft) is base
        assert not is_patched(other)
        assert GenerationMixin._sample is sample


def test_the_class_looks_as_before():
    """Name, module, doc, signature and `isinstance` are the plain class's."""
    model = build()
    base = type(model)
    with hfspec.patched(model, noisy()):
        mine = type(model)
        assert isinstance(model, base)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(mine, name) == getattr(base, name)
        for method in ("generate", "_sample"):
            assert inspect.signature(getattr(mine, method)) == inspect.signature(getattr(base, method))
            assert getattr(mine, method).__doc__ == getattr(base, method).__doc__
        assert mine.main_input_name == base.main_input_name
        assert model.can_generate()


def test_a_deep_copy_generates_with_its_own_weights():
    """A copy of a patched model is patched, counts for itself, and uses its own weights."""
    model = build()
    expected = plain_text(model, prompt(), **NEW)
    with hfspec.patched(model, noisy(), draft_budget=4):
        clone = copy.deepcopy(model)
        assert is_patched(clone)
        negate(clone)
        assert torch.equal(model.generate(prompt(), **NEW), expected)
        fast = clone.generate(prompt(), **NEW)
        assert hfspec.stats(clone).total.calls == 1
        assert hfspec.stats(clone).last.drafted_tokens > 0
        hfspec.unpatch(clone)
        assert torch.equal(clone.generate(prompt(), **NEW), fast)
        assert not torch.equal(fast, expected)
        assert is_patched(model)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_model_comes_back_plain(how):
    """Pickle and `torch.save` write the plain model; the patch belongs to this process."""
    model = build()
    base, expected = type(model), plain_text(model, prompt(), **NEW)
    with hfspec.patched(model, noisy()):
        if how == "pickle":
            loaded = pickle.loads(pickle.dumps(model))
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=False)
        assert is_patched(model)
    assert type(loaded) is base
    assert not is_patched(loaded)
    assert torch.equal(loaded.generate(prompt(), **NEW), expected)


def test_saving_a_patched_model_saves_the_plain_one(tmp_path):
    """`save_pretrained` writes the same files as for the unpatched model."""
    model = build()
    model.save_pretrained(tmp_path / "plain")
    with hfspec.patched(model, noisy()):
        model.save_pretrained(tmp_path / "patched")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "plain" / name).read_text() == (tmp_path / "patched" / name).read_text()
    loaded = type(model).from_pretrained(tmp_path / "patched", dtype=torch.float64)
    assert torch.equal(loaded.generate(prompt(), **NEW), model.generate(prompt(), **NEW))


def test_moving_and_converting_keep_the_patch():
    """`to()`, `float()`, `train()` and `eval()` work on a patched model and stay in force."""
    model, in_float32 = build(), build(dtype=torch.float32)
    with hfspec.patched(model, noisy(), draft_budget=3):
        assert model.to(torch.float32) is model
        model.train()
        assert model.training
        model.eval()
        assert is_patched(model)
        assert torch.equal(model.generate(prompt(), **NEW), in_float32.generate(prompt(), **NEW))
        assert hfspec.stats(model).last.drafted_tokens > 0


def test_new_weights_are_used_at_once():
    """Weights changed between two calls (training) do not meet anything remembered from the old ones."""
    model = build()
    with hfspec.patched(model, noisy(), draft_budget=4):
        model.generate(prompt(), **NEW)
        negate(model)
        fast = model.generate(prompt(), **NEW)
    assert torch.equal(fast, model.generate(prompt(), **NEW))


def test_patched_blocks_nest():
    """An inner `patched` block gives the outer one's options back, also after an error."""
    model = build()
    base = type(model)

    def longest_draft() -> int:
        model.generate(prompt(), **NEW)
        return max(hfspec.stats(model).budget_histogram)

    with hfspec.patched(model, noisy(), draft_budget=2):
        with hfspec.patched(model, noisy(), draft_budget=6):
            assert longest_draft() == 6
        assert longest_draft() == 2
        assert hfspec.stats(model).total.calls == 1
        with pytest.raises(KeyError), hfspec.patched(model, noisy(), draft_budget=6):
            raise KeyError
        assert longest_draft() == 2
    assert type(model) is base


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"draft": 3}, hfspec.PatchError),
        ({"draft": torch.nn.Linear(2, 2)}, hfspec.PatchError),
        ({"draft": noisy(), "draft_budget": -1}, hfspec.ConfigError),
        ({"draft": noisy(), "acceptance": "typical"}, hfspec.ConfigError),
        ({"draft": noisy(), "on_unsupported": "ignore"}, hfspec.ConfigError),
        ({"draft": noisy(), "draft_bugdet": 3}, hfspec.UnknownOptionError),
    ],
    ids=str,
)
def test_a_failed_patch_leaves_nothing_behind(arguments, error):
    """An error of `patch` leaves a plain model plain and a patched one with its earlier options."""
    model = build()
    base = type(model)
    with pytest.raises(error):
        hfspec.patch(model, **arguments)
    assert type(model) is base
    assert not is_patched(model)
    hfspec.patch(model, noisy(), draft_budget=2)
    with pytest.raises(error):
        hfspec.patch(model, **arguments)
    model.generate(prompt(), **NEW)
    assert max(hfspec.stats(model).budget_histogram) == 2


def test_a_first_patch_needs_a_draft():
    """There is nothing to keep yet."""
    model = build()
    with pytest.raises(hfspec.PatchError, match="needs a draft"):
        hfspec.patch(model)
    assert not is_patched(model)


def test_errors_are_also_pythons_own_kinds():
    """Callers may catch `TypeError` for keywords and `ValueError` for values."""
    with pytest.raises(TypeError, match="did you mean 'draft_budget'"):
        hfspec.patch(build(), noisy(), draft_bugdet=3)
    with pytest.raises(ValueError, match="'seeded', 'rejection'"):
        hfspec.patch(build(), noisy(), acceptance="typical")


@pytest.mark.parametrize(
    ("keyword", "nearest"),
    [("draft_bugdet", "draft_budget"), ("acceptence", "acceptance"), ("speculat", "speculate"), ("drafts", "draft")],
)
def test_a_misspelt_keyword_of_a_call_names_the_nearest(keyword, nearest):
    """`generate()` refuses hfspec's keywords spelt wrongly, and the next call is right."""
    model = build()
    with hfspec.patched(model, noisy()):
        with pytest.raises(TypeError, match=f"did you mean '{nearest}'"):
            model.generate(prompt(), **NEW, **{keyword: 3})
        model.generate(prompt(), **NEW)


def test_a_keyword_unknown_to_everybody_is_vanillas_error():
    """What does not look like hfspec's is left to the host, which raises as it would."""
    with hfspec.patched(shared(), noisy()), pytest.raises(ValueError, match="zebra"):
        shared().generate(prompt(), zebra=1, **NEW)


@pytest.mark.parametrize("not_a_model", [None, 3, torch.nn.Linear(2, 2), build().model])
def test_what_cannot_generate_is_refused(not_a_model):
    """The error names the type that was passed."""
    with pytest.raises(hfspec.PatchError, match=type(not_a_model).__name__):
        hfspec.patch(not_a_model, noisy())


def test_a_wrapped_model_is_refused_with_the_way_in():
    """For a wrapper the error names the attribute that holds the model."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    with pytest.raises(hfspec.PatchError, match=r"\.module"):
        hfspec.patch(Wrapper(build()), noisy())


def test_stats_need_a_patched_model():
    """`stats` of a plain model says what to do."""
    with pytest.raises(hfspec.PatchError, match="patch"):
        hfspec.stats(build())


def test_a_draft_may_be_a_path(tmp_path):
    """A draft given by name or path is loaded beside the target, in its dtype."""
    build().save_pretrained(tmp_path)
    model = build()
    for name in (tmp_path, str(tmp_path)):
        with hfspec.patched(model, name, draft_budget=4):
            model.generate(prompt(), **NEW)
            assert hfspec.stats(model).acceptance_rate == 1.0


def test_a_draft_with_an_encoder_may_be_a_path(tmp_path):
    """It is loaded as what it is."""
    target = build("t5")
    build("t5").save_pretrained(tmp_path)
    with hfspec.patched(target, tmp_path, draft_budget=4):
        target.generate(prompt(), **NEW)
        assert hfspec.stats(target).acceptance_rate == 1.0


def test_a_draft_that_cannot_be_loaded_is_a_clear_error(tmp_path):
    """It names the draft, and the model stays as it was."""
    model = build()
    for name in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(hfspec.DraftError, match="cannot be loaded"):
            hfspec.patch(model, name)
    assert not is_patched(model)


def test_tokenizers_are_found_beside_the_weights(tmp_path):
    """Vocabularies are compared by content where both models were loaded from folders with tokenizers."""
    from tests.lossless.test_cases import named

    folders = tmp_path / "target", tmp_path / "draft"
    for folder, shift in zip(folders, (0, 50), strict=True):
        build(vocab_size=258).save_pretrained(folder)
        named("any", shift).save_pretrained(folder)
    target, draft = (type(build()).from_pretrained(folder) for folder in folders)
    with pytest.raises(hfspec.IncompatibleDraftError):
        hfspec.patch(target, draft, on_unsupported="raise")
    hfspec.unpatch(hfspec.patch(target, target, on_unsupported="raise"))


def test_a_model_may_draft_for_itself():
    """The same object as target and draft works, and is taken off completely."""
    model = build()
    expected = plain_text(model, prompt(), **NEW)
    with hfspec.patched(model, model, draft_budget=4):
        assert torch.equal(model.generate(prompt(), **NEW), expected)
        assert hfspec.stats(model).acceptance_rate == 1.0
    assert not is_patched(model)


def test_a_patched_model_may_draft():
    """A draft that is itself a patched target drafts as any other."""
    model, draft = build(), build()
    with hfspec.patched(draft, noisy()), hfspec.patched(model, draft, draft_budget=4):
        model.generate(prompt(), **NEW)
        assert hfspec.stats(model).acceptance_rate == 1.0
        assert hfspec.stats(draft).total.calls == 0


def test_a_source_keeps_for_the_call_alone():
    """`draft=` in a call serves that call; the next has the patch's own again."""
    model = build()
    text = plain_text(model, prompt(), **NEW)
    mine, once = Scripted(text, [9]), Scripted(text, [9])
    with hfspec.patched(model, mine, draft_budget=4):
        model.generate(prompt(), draft=once, **NEW)
        assert (mine.num_starts, once.num_starts) == (0, 1)
        model.generate(prompt(), **NEW)
        assert (mine.num_starts, once.num_starts) == (1, 1)


def test_a_patched_model_that_nobody_holds_is_collected():
    """Patching keeps no model alive."""
    model, draft = build(), build(seed=1)
    hfspec.patch(model, draft)
    model.generate(prompt(), **NEW)
    watched = weakref.ref(model), weakref.ref(draft)
    del model, draft
    gc.collect()
    assert [each() for each in watched] == [None, None]


def test_a_model_that_drafts_for_itself_is_collected_too():
    """Target and draft being one object makes no cycle that lasts."""
    model = build()
    hfspec.patch(model, model)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_a_class_makes_plain_models():
    """Made by the patched class, in whatever way, models are of the plain class; its signature is the plain one's."""
    model = build()
    base = type(model)
    expected = plain_text(model, prompt(), **NEW)
    signature = inspect.signature(base)
    with hfspec.patched(model, noisy()):
        mine = type(model)
        assert inspect.signature(mine) == signature
        assert type(mine.__new__(mine)) is base
        assert type(mine(model.config)) is base
        replica = model._replicate_for_data_parallel()
        assert type(replica) is base
        assert torch.equal(replica.generate(prompt(), **NEW), expected)
        assert type(copy.copy(model)) is base
        assert model.__class__ is mine


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("pickler", [pickle.Pickler, pickle._Pickler], ids=["C", "Python"])
def test_a_pickled_model_is_byte_for_byte_the_plain_one(protocol, pickler):
    """So the file needs no hfspec, and a fingerprint of the model stays the same."""
    model = build()

    def pickled() -> bytes:
        buffer = io.BytesIO()
        pickler(buffer, protocol).dump(model)
        return buffer.getvalue()

    before = pickled()
    with hfspec.patched(model, noisy()):
        mine = type(model)
        assert pickled() == before
        assert type(model) is mine
        assert model.__class__ is mine
    assert b"hfspec" not in before


def test_overlapping_blocks_of_two_threads_leave_the_model_plain():
    """Each block ends its own patch; the newest open one is in force."""
    model = build()
    base, config = type(model), model.config
    first, second = hfspec.patched(model, noisy(), draft_budget=2), hfspec.patched(model, noisy(), draft_budget=6)
    for block in (first, second):
        block.__enter__()
    first.__exit__(None, None, None)
    model.generate(prompt(), **NEW)
    assert max(hfspec.stats(model).budget_histogram) == 6
    second.__exit__(None, None, None)
    assert type(model) is base
    assert model.config is config


def test_whoever_hands_over_something_else_is_told_what_to_pass():
    """A pipeline, a path, and what is not patched."""
    generator = pipeline("text-generation", model=build(), tokenizer=char_tokenizer(), device="cpu")
    with pytest.raises(hfspec.PatchError, match=r"\.model"):
        hfspec.patch(generator, noisy())
    with pytest.raises(hfspec.PatchError, match=r"\.model"):
        hfspec.stats(generator)
    with pytest.raises(hfspec.PatchError, match="from_pretrained"):
        hfspec.patch("some/path", noisy())


def test_whether_a_model_is_patched_can_be_asked():
    """Of anything."""
    model = build()
    assert not hfspec.is_patched(model)
    assert not hfspec.is_patched("a path")
    assert hfspec.is_patched(hfspec.patch(model, noisy()))


def test_a_draft_that_does_not_fit_is_told_when_patching(caplog):
    """Once, by a warning with the reason, or by an error if that is wanted."""
    target, draft = build(), build(vocab_size=500)
    hfspec.patch(target, draft)
    assert "different tokenizers" in caplog.text
    target.generate(prompt(), **NEW)
    assert len(caplog.records) == 1
    with pytest.raises(hfspec.IncompatibleDraftError):
        hfspec.patch(target, draft, on_unsupported="raise")


def test_a_model_as_its_own_draft_is_told_of(caplog):
    """It works, and cannot pay."""
    model = build()
    hfspec.patch(model, model)
    assert "the target itself" in caplog.text


def test_options_on_a_generation_config_count():
    """A keyword goes before the call's `GenerationConfig`, that before the model's own, that before the patch's."""
    model = hfspec.patch(build(), noisy(), draft_budget=6)

    def longest_draft(**call) -> int:
        model.generate(prompt(), **(NEW | call))
        return max(hfspec.stats(model).budget_histogram)

    assert longest_draft() == 6
    model.generation_config.draft_budget = 5
    assert longest_draft() == 5
    config = GenerationConfig(draft_budget=2, max_new_tokens=16)
    assert longest_draft(generation_config=config) == 2
    assert longest_draft(generation_config=config, draft_budget=3) == 3
    with pytest.raises(hfspec.ConfigError):
        longest_draft(generation_config=GenerationConfig(draft_budget="much"))


@pytest.mark.parametrize(
    "call", [{}, {"speculate": False}, {"assistant_model": build(seed=1)}], ids=["sped up", "plain", "assisted"]
)
def test_a_call_is_counted_before_its_streamer_ends(call):
    """Whoever has read the text finds the call in `stats`, with all its tokens; it is counted once."""

    class Asking(BaseStreamer):
        seen = None

        def put(self, value):
            pass

        def end(self):
            self.seen = hfspec.stats(model).total

    model, streamer = hfspec.patch(build(), noisy(), draft_budget=4), Asking()
    model.generate(prompt(), streamer=streamer, **NEW, **call)
    assert (streamer.seen.calls, streamer.seen.new_tokens) == (1, 16)
    total = hfspec.stats(model).total
    assert (total.calls, total.new_tokens) == (1, 16)
