"""`verify` tells a near-tie from a bug, and calls no bug a near-tie."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hfspec
from hfspec import compare
from hfspec.compare import explain_difference
from hfspec.host import releases
from tests.models import CountingProcessor, build, noisy, plain_text, prompt, shared

NEW = {"max_new_tokens": 20}


@pytest.mark.parametrize("call", [{}, {"do_sample": True, "top_k": 30}], ids=["greedy", "sampled"])
def test_equal_tokens_are_identical(call):
    """A speculative call that is right is identical, and the random state is left as it was."""
    state = torch.get_rng_state()
    with hfspec.patched(shared(), noisy(), draft_budget=4):
        verdict = hfspec.verify(shared(), prompt(), **NEW, **call)
        assert verdict.identical
        assert verdict.summary() == "same tokens"
        assert hfspec.verify(shared(), {"input_ids": prompt()}, seed=3, **NEW, **call).identical
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("position", [0, 5, 19])
@pytest.mark.parametrize("call", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_bug_is_not_called_a_near_tie(position, call, dtype):
    """A token that the target would never have chosen there is reported as what it is, in any dtype."""
    model = build(dtype=dtype)
    plain = plain_text(model, prompt(), **NEW, **call)
    broken = plain.clone()
    with torch.no_grad():
        unlikely = model(input_ids=plain[:, : 7 + position]).logits[0, -1].argmin()
    broken[0, 7 + position] = unlikely
    verdict = explain_difference(model, prompt(), plain, broken, **NEW, **call)
    assert not verdict.identical
    assert verdict.first_difference == position
    assert verdict.near_tie is False
    assert "NOT a near-tie" in verdict.summary()


def test_a_text_that_stops_early_is_not_a_near_tie():
    """No rounding makes a text end where the other goes on."""
    plain = plain_text(shared(), prompt(), **NEW)
    verdict = explain_difference(shared(), prompt(), plain, plain[:, :-3], **NEW)
    assert (verdict.identical, verdict.first_difference, verdict.near_tie) == (False, 17, False)


def near_tie_case():
    """A bfloat16 model with two equally likely first tokens: two rows of its head are the same."""
    model = build(dtype=torch.bfloat16, seed=2)
    first = int(plain_text(model, prompt(), max_new_tokens=1)[0, -1])
    other = (first + 1) % 97
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[first]
    return model, first, other


def test_a_near_tie_is_called_one():
    """Two tokens whose scores rounding cannot tell apart are a near-tie."""
    model, first, other = near_tie_case()
    plain = plain_text(model, prompt(), **NEW)
    swapped = plain.clone()
    assert int(plain[0, 7]) in (first, other)
    swapped[0, 7] = other if int(plain[0, 7]) == first else first
    verdict = explain_difference(model, prompt(), plain, swapped, **NEW)
    assert verdict.first_difference == 0
    assert verdict.margin == pytest.approx(0.0, abs=1e-6)
    assert verdict.near_tie is True
    assert "a near-tie" in verdict.summary()


def test_what_cannot_be_reproduced_is_not_explained():
    """Where plain decoding does not give the plain text again, no verdict is given."""
    plain = plain_text(shared(), prompt(), seed=1, do_sample=True, **NEW)
    other = plain_text(shared(), prompt(), seed=2, do_sample=True, **NEW)
    verdict = explain_difference(shared(), prompt(), plain, other, seed=3, do_sample=True, **NEW)
    assert verdict.near_tie is None
    assert "not explained" in verdict.summary()


def test_the_law_cannot_be_compared_by_tokens():
    """`verify` refuses rejection, named in the call or in the patch, where sampled tokens may rightly differ."""
    with hfspec.patched(shared(), noisy()), pytest.raises(hfspec.ConfigError, match="distribution"):
        hfspec.verify(shared(), prompt(), acceptance="rejection", do_sample=True, **NEW)
    with (
        hfspec.patched(shared(), noisy(), acceptance="rejection"),
        pytest.raises(hfspec.ConfigError, match="distribution"),
    ):
        hfspec.verify(shared(), prompt(), do_sample=True, **NEW)


def test_a_plain_model_cannot_be_verified():
    """There is nothing to compare without a patch."""
    with pytest.raises(hfspec.PatchError):
        hfspec.verify(build(), prompt(), **NEW)


def test_what_a_run_changes_is_the_same_for_both_runs():
    """Each run has its own copy of caches, processors and criteria; the user's stay as they are."""
    cache, processor = DynamicCache(config=shared().config), CountingProcessor()
    stopper = StopAfter(12)
    with hfspec.patched(shared(), noisy(), draft_budget=4):
        verdict = hfspec.verify(
            shared(),
            prompt(),
            **{releases.CACHE_KEY: cache},
            logits_processor=[processor],
            stopping_criteria=[stopper],
            streamer=Unwanted(),
            **NEW,
        )
    assert verdict.identical
    assert (cache.get_seq_length(), processor.num_calls, stopper.num_seen) == (0, 0, 0)


class StopAfter(StoppingCriteria):
    """Stops after so many calls, which it counts itself."""

    def __init__(self, num_calls):
        self.num_calls, self.num_seen = num_calls, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.num_seen += 1
        return torch.full((len(input_ids),), self.num_seen >= self.num_calls)


class Unwanted(BaseStreamer):
    """A streamer that nothing may reach."""

    def put(self, value):
        raise AssertionError("streamed")

    def end(self):
        raise AssertionError("streamed")


@pytest.mark.parametrize("device", ["xpu:0", "mps", "cuda:0"])
def test_the_generators_of_every_type_of_device_are_left_as_they_were(device, monkeypatch):
    """A seed reaches every device's generator; the model's own are put back, whatever they are."""

    class Generator:
        """Of XPU and CUDA, a device is named; there is but one MPS device, and its functions take none."""

        state = torch.tensor([7])

        def get_rng_state(self, *which):
            assert len(which) == (device != "mps")
            return self.state.clone()

        def set_rng_state(self, state, *which):
            assert len(which) == (device != "mps")
            self.state = state

    class Model:
        def parameters(self):
            return [SimpleNamespace(device=torch.device(name)) for name in (device, "cpu", "meta")]

    generator, state = Generator(), torch.get_rng_state()
    monkeypatch.setattr(torch, "get_device_module", lambda device: generator)
    with compare._seeded(Model(), 3):
        generator.state = torch.tensor([3])
        assert not torch.equal(torch.get_rng_state(), state)
    assert generator.state == 7
    assert torch.equal(torch.get_rng_state(), state)
