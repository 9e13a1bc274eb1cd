"""Every architecture that is said to take trees gives vanilla's tokens, and vanilla's logits, behind random trees.

`HFSPEC_ZOO_PART=2/6` runs the second of six parts.
"""

import os

import pytest
import torch

import hfspec
from tests.trees import ScriptedTrees
from tests.zoo.overrides import CALLS
from tests.zoo.prompts import inputs
from tests.zoo.tiny import VOCAB, all_species
from tests.zoo.verdict import Result, Specimen, run, set_attention

_PART, _PARTS = map(int, os.environ.get("HFSPEC_ZOO_PART", "1/1").split("/"))
_CAUSAL = [species for species in all_species() if species.kind == "causal"]
#: Tokens below this are neither images nor sounds to any of them.
_TEXT_IDS = VOCAB - 18


@pytest.mark.slow
@pytest.mark.parametrize("species", _CAUSAL[_PART - 1 :: _PARTS], ids=lambda species: species.name)
def test_trees_leave_vanillas_text(species):
    """With one text and with three of different lengths; where trees are not taken, the text is vanilla's as well."""
    try:
        zoo = Specimen(species)
    except Exception as error:
        pytest.skip(f"vanilla fails: {error}")
    for batch in (1, 3):
        for attn in ("eager", "sdpa"):
            problem = difference(zoo, batch, attn)
            assert not problem, f"{batch} texts, {attn}: {problem}"


def difference(zoo: Specimen, batch: int, attn: str) -> str:
    """What differs from vanilla's call, or nothing."""
    plain, call = vanilla(zoo, batch, attn)
    if plain is None:
        return ""
    source = ScriptedTrees(plain.tokens, [3, 0, 2, 5, 1], has_duplicates=True, vocab=_TEXT_IDS)
    with hfspec.patched(zoo.model, source, draft_budget=16):
        fast = run(zoo.model, call, wants_logits=batch == 1)
        last = hfspec.stats(zoo.model).last
    if not (last.fallback_reason or last.chain_reasons or any(source.allowed)):
        return "trees are neither taken nor refused with a reason"
    return plain.differences(fast)


def vanilla(zoo: Specimen, batch: int, attn: str) -> tuple[Result | None, dict]:
    """What the unpatched model gives, in the first dtype in which its numbers are sound."""
    for dtype in (torch.float64, torch.float32):
        zoo.model.to(dtype)
        set_attention(zoo.model, attn)
        call = inputs(zoo.species, batch, dtype) | zoo.species.override(CALLS, {})
        call |= {"max_new_tokens": 20, "do_sample": False}
        try:
            plain = run(zoo.model, call, wants_logits=True)
        except Exception:
            continue
        if plain.is_finite:
            return plain, call
    return None, {}
