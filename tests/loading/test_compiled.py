"""`torch.compile` in its three forms, for targets and drafts, before and after patching.

The backends here run the captured graphs as they are, so that nothing is built; what is tested is that captured
forwards of every width still find their cache and their weights.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import hfspec
from tests.loading import tiny
from tests.loading.tiny import assert_exact, noisy_copy
from tests.models import both, plain_text, prompt

# torch's own, on the way through 4.57's masks.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

#: Few tokens and one layer, as every width that is met is captured.
NEW = {"max_new_tokens": 9}


def target() -> Any:
    return tiny.target(num_hidden_layers=1)


def in_place(model: Any, backend: str = "eager") -> None:
    model.compile(backend=backend, dynamic=True)


def its_forward(model: Any, backend: str = "eager") -> None:
    model.forward = torch.compile(model.forward, backend=backend, dynamic=True)


COMPILE: dict[str, Callable[..., None]] = {"in place": in_place, "its forward": its_forward}


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("how", "call"), [("in place", NEW), ("its forward", NEW | {"do_sample": True})])
def test_a_compiled_target(how, call):
    """A target compiled first and patched then, greedy and sampled under a seed."""
    model = target()
    COMPILE[how](model)
    assert_exact(model, noisy_copy(target()), call)


def test_a_target_compiled_after_it_was_patched():
    """The other order: the captured forwards are the model's, patched or not."""
    expected = plain_text(target(), prompt(), **NEW)
    model = hfspec.patch(target(), noisy_copy(target()), draft_budget=4)
    in_place(model)
    assert torch.equal(model.generate(prompt(), **NEW), expected)
    assert hfspec.stats(model).last.accepted_tokens > 0
    hfspec.unpatch(model)
    assert torch.equal(model.generate(prompt(), **NEW), expected)


def test_a_compiled_draft():
    """A compiled draft drafts, here through the functional graphs that real backends get."""
    draft = noisy_copy(target())
    in_place(draft, backend="aot_eager")
    assert_exact(target(), draft, {"max_new_tokens": 6})


def test_the_wrapper_is_refused_with_the_way_out():
    """`torch.compile(model)` wraps the model, target or draft; the error names what to pass."""
    compiled = torch.compile(target(), backend="eager")
    for pair in ((compiled, target()), (target(), compiled)):
        with pytest.raises(hfspec.PatchError, match=r"OptimizedModule.*see its \._orig_mod"):
            hfspec.patch(*pair)


@pytest.mark.parametrize("first", ["patched", "compiled"])
def test_the_model_inside_a_wrapper(first):
    """`generate()` of the wrapper is the patched model's."""
    expected = plain_text(target(), prompt(), **NEW)
    model, draft = target(), noisy_copy(target())
    if first == "patched":
        hfspec.patch(model, draft, draft_budget=4)
    compiled = torch.compile(model, backend="eager")
    if first == "compiled":
        hfspec.patch(compiled._orig_mod, draft, draft_budget=4)
    assert torch.equal(compiled.generate(prompt(), **NEW), expected)
    assert hfspec.stats(model).last.accepted_tokens > 0


def test_a_static_cache_where_the_host_compiles_is_left_to_it():
    """As on accelerators: the reason names the way out, and with it the call is sped up to the same tokens."""
    config = CompileConfig(backend="eager", mode=None, fullgraph=False)
    config._compile_all_devices = True
    call = NEW | {"cache_implementation": "static", "compile_config": config, "do_sample": False}
    model = target()
    both(model, noisy_copy(target()), prompt(), call).assert_plain("disable_compile=True")
    both(model, noisy_copy(target()), prompt(), call | {"disable_compile": True}).assert_same().assert_drafted()
