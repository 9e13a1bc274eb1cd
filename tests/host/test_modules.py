"""A model's modules, walked once."""

import gc
import weakref

import torch

from hfspec.host.modules import all_modules, modules_where
from tests.models import build


def test_all_modules_are_found_once():
    """Also those that stand in two places; in the order of `modules()`, by which the first problem is named."""
    model = build()
    model.again = model.base_model.layers[0]
    found = all_modules(model)
    assert len(found) == len(set(found))
    assert set(found) == set(model.modules())
    assert found == list(model.modules())


def test_each_module_is_asked_once_until_modules_change():
    """A layer that is replaced, added or taken away makes the question new; a question asked again costs nothing."""
    model, asked = build(), []

    def is_linear(module):
        asked.append(module)
        return isinstance(module, torch.nn.Linear)

    linear = modules_where(model, is_linear)
    assert set(linear) == {each for each in model.modules() if isinstance(each, torch.nn.Linear)}
    num_modules = len(asked)
    assert modules_where(model, is_linear) == linear
    assert len(asked) == num_modules

    layer = model.base_model.layers[0]
    kinds = [torch.nn.Identity(), torch.nn.Linear(2, 2, bias=False)]
    for new in kinds:
        layer.mlp.up_proj = new
        assert (new in modules_where(model, is_linear)) == isinstance(new, torch.nn.Linear)
    model.extra = torch.nn.Linear(2, 2)
    assert model.extra in modules_where(model, is_linear)
    extra = model.extra
    del model.extra
    assert extra not in modules_where(model, is_linear)


def test_nothing_keeps_a_model():
    """What is known of a model goes with it."""
    model = build()
    modules_where(model, callable)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
