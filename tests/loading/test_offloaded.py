"""Accelerate: weights in the machine's memory, on disk, or moved about by hand; `model.device` may be `meta`."""

import json
import sys
from typing import Any

import accelerate
import pytest
import torch

import hfspec
from tests.loading.tiny import CALLS, assert_exact, noisy_copy, reload, target
from tests.models import PAD, both, build, prompt
from tests.scripts import benchmark

# Before 5.24 the host asks where `model.device` is, and minds that nothing can be brought there.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`:UserWarning")

INNER_PARTS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
#: Where the parts of a model go.
PLACES = {
    "all in memory": {"": "cpu"},
    "layers on disk": {part: "cpu" for part in INNER_PARTS} | {"model.layers": "disk"},
    "all but the head on disk": {"model": "disk", "lm_head": "cpu"},
    "one layer on disk": {part: "cpu" for part in INNER_PARTS} | {"model.layers.0": "cpu", "model.layers.1": "disk"},
}


def on_disk(model: Any, tmp_path: Any, place: str = "layers on disk") -> Any:
    """`model`, saved and loaded to those places."""
    return reload(model, tmp_path / "saved", device_map=PLACES[place], offload_folder=tmp_path / "offloaded")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", PLACES)
def test_a_target_loaded_with_a_device_map(tmp_path, place, call):
    """A target whose weights are brought in for each forward; the draft is in memory."""
    model = on_disk(target(), tmp_path, place)
    devices = {weight.device.type for weight in model.parameters()}
    assert ("meta" in devices) == (place != "all in memory")
    assert_exact(model, noisy_copy(target()), call)


@pytest.mark.parametrize("place", ["layers on disk", "all but the head on disk"])
def test_a_draft_on_disk(tmp_path, place):
    """An offloaded draft has weights, if not in memory: it drafts, for a target in memory and for one on disk."""
    draft = on_disk(noisy_copy(target()), tmp_path / "draft", place)
    assert_exact(target(), draft, {"max_new_tokens": 12})
    assert_exact(on_disk(target(), tmp_path / "target", place), draft, {"max_new_tokens": 12})


@pytest.mark.parametrize("first", ["patched", "dispatched"])
def test_dispatched_by_hand(tmp_path, first):
    """`dispatch_model`, before and after patching, and the hooks taken off again."""

    def dispatch(model: Any) -> Any:
        places = {part: "cpu" for part in INNER_PARTS} | {"model.layers": "disk"}
        return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)

    expected = target().generate(prompt(), max_new_tokens=16)
    model = target()
    if first == "dispatched":
        dispatch(model)
    hfspec.patch(model, noisy_copy(target()), draft_budget=4)
    if first == "patched":
        dispatch(model)
    assert torch.equal(model.generate(prompt(), max_new_tokens=16), expected)
    assert hfspec.stats(model).last.accepted_tokens > 0
    accelerate.hooks.remove_hook_from_submodules(model)
    assert hfspec.unpatch(model) is model


@pytest.mark.parametrize("offload", [accelerate.cpu_offload, accelerate.disk_offload])
def test_offloaded_as_a_whole(tmp_path, offload):
    """`cpu_offload` and `disk_offload`: no weight of the target is on a device between forwards."""
    model = target()
    more = {"offload_dir": tmp_path} if offload is accelerate.disk_offload else {}
    offload(model, execution_device=torch.device("cpu"), **more)
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert_exact(model, noisy_copy(target()), {"max_new_tokens": 12})


def test_the_hooks_are_left_as_they_were(tmp_path):
    """After a patched call, and after unpatching, weights are where they were and vanilla's call is what it was."""
    model = on_disk(target(), tmp_path)
    before = {name: weight.device for name, weight in model.named_parameters()}
    forwards = {name: module.forward for name, module in model.named_modules()}
    both(model, noisy_copy(target()), prompt(), {"max_new_tokens": 12}, draft_budget=4).assert_same().assert_drafted()
    assert {name: weight.device for name, weight in model.named_parameters()} == before
    assert all(module.forward == forwards[name] for name, module in model.named_modules())


def test_a_draft_by_name_beside_a_target_on_disk(tmp_path):
    """A draft given as a path is loaded into memory, in the target's dtype, whatever the target's own device is."""
    build("llama", seed=1, dtype=torch.float32).save_pretrained(tmp_path / "draft")
    model = on_disk(target(), tmp_path, "all but the head on disk")
    with hfspec.patched(model, tmp_path / "draft", draft_budget=4):
        model.generate(prompt(), max_new_tokens=12, pad_token_id=PAD)
        assert hfspec.stats(model).last.drafted_tokens > 0


def test_the_benchmark_of_it(stand_ins, tmp_path, monkeypatch, capsys):
    """`benchmarks/offload.py` runs a pair to the end, finds the same tokens, and writes what it says."""
    offload = benchmark("offload")
    written = tmp_path / "out" / "offload.json"
    options = {"--dtype": "float32", "--limit": "2", "--tokens": "12", "--repeats": "2", "--output": str(written)}
    monkeypatch.setattr(sys, "argv", ["offload.py", "--cold", *(each for pair in options.items() for each in pair)])
    offload.main()
    result = json.loads(written.read_text())
    assert len(result["prompts"]) == 2
    assert all(entry["same_tokens"] and entry["speedup"] > 0 for entry in result["prompts"])
    assert all(len(entry["hfspec"]) == 2 for entry in result["prompts"])
    assert set(result["target_forward_seconds"]) == {"1", "2", "4", "8"}
    assert f"{result['speedup']['geometric_mean']:.2f}×" in capsys.readouterr().out
