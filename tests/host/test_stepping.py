"""Recurrent layers that take several tokens one after the other."""

import copy

import torch

from hfspec.host.stepping import stepping, stepping_layers
from tests.models import build, prompt


def test_a_copy_made_meanwhile_is_bound_to_its_own_weights():
    """A deep copy of model or layer, taken while layers step, is another model, and the original is as it was."""
    model = build("mamba")
    layers = stepping_layers(model)
    with stepping(layers):
        clone = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(prompt()).logits
        assert torch.equal(clone(prompt()).logits, expected)
        for weight in model.parameters():
            weight.neg_()
        assert torch.equal(clone(prompt()).logits, expected)
        again = copy.deepcopy(clone)
        for weight in clone.parameters():
            weight.neg_()
        assert torch.equal(again(prompt()).logits, expected)
    assert layers
    assert not any("forward" in vars(layer) for layer in layers)


def test_what_stood_on_the_instance_is_copied_too():
    """A forward that somebody else put there, Accelerate's hooks, say."""
    model = build("mamba")
    layer = stepping_layers(model)[0]
    theirs = layer.forward
    layer.forward = theirs
    with stepping([layer]):
        clone = copy.deepcopy(layer)
    assert clone.forward.__self__ is clone
    assert vars(layer)["forward"] is theirs
