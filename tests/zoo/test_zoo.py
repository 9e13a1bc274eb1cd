"""Every architecture gives vanilla's tokens, and is sped up or not as docs/zoo.md says.

`HFSPEC_ZOO_PART=2/6` runs the second of six parts.
"""

import os

import pytest
import torch
import transformers

from tests.zoo.page import line_of, read
from tests.zoo.tiny import all_species
from tests.zoo.verdict import MODES, WRONG, Result, examine

_PART, _PARTS = map(int, os.environ.get("HFSPEC_ZOO_PART", "1/1").split("/"))
_VERSION, _LINES = read()
_FEWER_MODES = [mode for mode in MODES if mode.draft == "good" and mode.is_sampled == (mode.batch > 1)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("species", all_species()[_PART - 1 :: _PARTS], ids=lambda species: species.name)
def test_same_tokens_and_the_verdict_on_the_page(species):
    """No call gives other tokens; on the page's own release the verdict is the page's.

    Other releases are tried in fewer ways, to save time; `python -m tests.zoo` tries all.
    """
    row = examine(species, MODES if transformers.__version__ == _VERSION else _FEWER_MODES)
    assert not row.one.startswith(WRONG), row.one
    assert not row.three.startswith(WRONG), row.three
    if transformers.__version__ == _VERSION:
        assert line_of(row) == _LINES[species.name], "python -m tests.zoo --write docs/zoo.md"


@pytest.mark.skipif(transformers.__version__ != _VERSION, reason="the page is of another release")
def test_the_page_has_every_architecture():
    """All rows of the release's tables are on the page, and no others."""
    assert set(_LINES) == {species.name for species in all_species()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"tokens": torch.tensor([[1, 2, 4]])}, "other tokens"),
        ({"random_state": torch.tensor([1], dtype=torch.uint8)}, "another random state"),
        ({"warned": frozenset({"careful"})}, "new warnings: ['careful']"),
    ],
)
def test_a_difference_is_seen(change, words):
    """The control: other tokens, another random state and new warnings are each called wrong."""
    plain = {"tokens": torch.tensor([[1, 2, 3]]), "random_state": torch.tensor([0], dtype=torch.uint8)}
    assert (
        Result(**plain, warned=frozenset()).differences(Result(**({"warned": frozenset()} | plain | change))) == words
    )
