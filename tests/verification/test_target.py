"""The target's forwards, by themselves."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, StaticCache, StoppingCriteriaList

from hfspec.cache.ledger import SpeculativeCache
from hfspec.draft.shape import joined
from hfspec.drafts import Draft
from hfspec.host import releases
from hfspec.host.prepared import Prepared
from hfspec.rounds import Outcomes
from hfspec.verification.ragged import RaggedTarget
from hfspec.verification.target import Target
from tests.models import PAD, assert_same_cache, prompt, shared
from tests.rounds import outcome, uneven


def _target(
    kind: type[Target] = Target, ids: torch.Tensor | None = None, cache: Any = None, arch: str = "llama", **more: Any
) -> Target:
    model = shared(arch, attn="sdpa")
    kwargs: dict[str, Any] = {"use_cache": True} | more
    if kwargs.get("attention_mask") is not None and releases.ADVANCES_POSITIONS:  # as `generate()` prepares them there
        kwargs["position_ids"] = (kwargs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    ids = prompt() if ids is None else ids
    criteria = StoppingCriteriaList()
    prepared = Prepared(model, ids, LogitsProcessorList(), criteria, model.generation_config, kwargs)
    return kind(prepared, SpeculativeCache() if cache is None else cache)


def _outcomes(*num_committed: int) -> Outcomes:
    return Outcomes(tuple(outcome(number - 1, number - 1, number) for number in num_committed))


@torch.no_grad()
def _whole(ids: torch.Tensor, num_last: int, arch: str = "llama") -> torch.Tensor:
    """The logits of a text's last tokens, from one forward over the whole of it."""
    return shared(arch, attn="sdpa")(input_ids=ids).logits[:, -num_last:]


def test_the_prompts_logits_are_not_kept():
    """After the prompt only the last position's logits are alive, however the model returned them."""
    kept: list[weakref.ref[torch.Tensor]] = []
    hook = shared("llama", attn="sdpa").register_forward_hook(
        lambda model, args, outputs: kept.append(weakref.ref(outputs.logits))
    )
    try:
        with torch.no_grad():
            verified = _target().prefill(prompt())
    finally:
        hook.remove()
    gc.collect()
    assert kept[0]() is None
    assert verified.logits.shape[:2] == (1, 1)


def test_a_verified_draft_has_the_logits_of_the_text_at_once():
    """Logits at index i are those after i draft tokens, and rolling back leaves the cache level with the text."""
    target, ids, draft = _target(), prompt(), torch.tensor([[5, 9, 4]])
    with torch.no_grad():
        first = target.prefill(ids).logits[:, 0].argmax(dim=-1, keepdim=True)
        text = torch.cat([ids, first], dim=-1)
        verified = target.verify(uneven([text]), Draft(draft))
    torch.testing.assert_close(verified.logits, _whole(torch.cat([text, draft], dim=-1), 4))
    target.keep(_outcomes(2))
    assert target.num_unread == 1
    assert target.cache_for_user().get_seq_length() == ids.shape[1] + 2


CACHES: dict[str, Callable[[], Any]] = {
    "ours": SpeculativeCache,
    "dynamic": DynamicCache,
    "static": lambda: StaticCache(config=shared().config, max_cache_len=64),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_rounds_over_any_cache(cache, num_rows):
    """Round after round the logits are the text's, whatever was rejected, and the cache ends up as vanilla's."""
    ids = torch.cat([prompt(seed=seed) for seed in range(num_rows)])
    mine, vanillas = CACHES[cache](), CACHES["dynamic" if cache == "ours" else cache]()
    target, vanilla = _target(ids=ids, cache=mine), _target(ids=ids, cache=vanillas)
    texts = torch.cat([ids, torch.full((num_rows, 1), 5)], dim=-1)
    with torch.no_grad():
        target.prefill(ids)
        vanilla.prefill(ids)
        for seed, (num_drafted, num_kept) in enumerate([(3, 1), (2, 3), (0, 1), (4, 2), (1, 1), (1, 2)]):
            drafts = [prompt(num_drafted, seed=10 * seed + row) for row in range(num_rows)]
            whole = torch.cat([texts, torch.cat(drafts)], dim=-1)
            verified = target.verify(uneven(texts.split(1)), Draft(torch.cat(drafts)))
            torch.testing.assert_close(verified.logits, _whole(whole, num_drafted + 1), rtol=1e-5, atol=1e-5)
            before = texts.shape[1]
            texts = torch.cat([whole[:, : before + num_kept - 1], torch.full((num_rows, 1), 6 + seed)], dim=-1)
            target.keep(_outcomes(*[num_kept] * num_rows))
            for end in range(before, before + num_kept):
                vanilla.verify(uneven(texts[:, :end].split(1)), Draft.empty(num_rows, texts.device))
                vanilla.keep(_outcomes(*[1] * num_rows))
        target.catch_up(texts)
    assert_same_cache(vanilla.cache_for_user(), target.cache_for_user())


def test_the_cache_can_be_levelled_before_anything_was_read():
    """An error in the prompt's own forward leaves nothing to bring back."""
    target = _target()
    target.level_cache(0)
    assert target.cache_for_user().get_seq_length() == 0


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["alike", "padded"])
def test_rows_at_their_own_paces_have_the_logits_of_rows_by_themselves(arch, is_padded):
    """Drafts and verdicts of any lengths, rows that leave: each row's logits are those of its own text alone."""
    lengths = (4, 7, 5) if is_padded else (6, 6, 6)
    texts = [prompt(length, seed=length + row) for row, length in enumerate(lengths)]
    ids = torch.cat([torch.nn.functional.pad(text, (max(lengths) - text.shape[1], 0), value=PAD) for text in texts])
    mask = (ids != PAD).long()
    cache = SpeculativeCache(DynamicCache(config=shared(arch).config))
    target = _target(RaggedTarget, ids, cache, arch, **({"attention_mask": mask} if is_padded else {}))
    with torch.no_grad():
        first = target.prefill(ids).logits[:, 0]
        torch.testing.assert_close(
            first, torch.cat([_whole(text, 1, arch)[:, 0] for text in texts]), rtol=1e-5, atol=1e-5
        )
        texts = [torch.cat([text, torch.tensor([[9]])], dim=-1) for text in texts]
        for seed in range(40):
            if seed == 25:
                target.select([2, 0])
                texts = [texts[2], texts[0]]
            drafts = [prompt((seed + 2 * row) % 5, seed=100 * seed + row) for row in range(len(texts))]
            verified = target.verify(uneven(texts), joined([Draft(draft) for draft in drafts]))
            kept = [min(1 + (seed * (row + 1)) % 4, 1 + draft.shape[1]) for row, draft in enumerate(drafts)]
            for row, draft in enumerate(drafts):
                whole = torch.cat([texts[row], draft], dim=-1)
                width = 1 + draft.shape[1]
                torch.testing.assert_close(
                    verified.logits[row : row + 1, :width],
                    _whole(whole, width, arch),
                    rtol=1e-5,
                    atol=1e-5,
                )
                texts[row] = torch.cat(
                    [whole[:, : texts[row].shape[1] + kept[row] - 1], torch.tensor([[3 + seed]])], dim=-1
                )
            target.keep(_outcomes(*kept))
    assert target.num_unread == 1
    assert max(text.shape[1] for text in texts) < 200


def test_rows_need_their_prompt_first():
    """A clear error, not a puzzling one."""
    with pytest.raises(RuntimeError, match="prefill"):
        _target(RaggedTarget).keep(_outcomes(1))


def test_the_cache_goes_by_this_releases_name():
    """The forwards get the cache under the keyword that the release takes."""
    seen: list[set[str]] = []
    model = shared("llama", attn="sdpa")
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(set(kwargs)), with_kwargs=True)
    try:
        with torch.no_grad():
            _target().prefill(prompt())
    finally:
        hook.remove()
    assert releases.CACHE_KEY in seen[0]
