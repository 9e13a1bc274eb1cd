"""The target's forwards, by themselves."""

import gc
import weakref

import torch

from hfspec.cache.ledger import SpeculativeCache
from hfspec.target.forward import Target
from tests.models import prompt, shared


def _target() -> Target:
    model = shared()
    config = model.generation_config
    return Target(model, config, SpeculativeCache(), {"use_cache": True, "attention_mask": None})


def test_the_prompts_logits_are_not_kept():
    """After the prompt only the last position's logits are alive, however the model returned them."""
    kept: list[weakref.ref[torch.Tensor]] = []
    hook = shared().register_forward_hook(lambda model, args, outputs: kept.append(weakref.ref(outputs.logits)))
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
        verified = target.verify(text, draft)
        whole = shared()(torch.cat([text, draft], dim=-1)).logits[:, ids.shape[1] :]
    torch.testing.assert_close(verified.logits, whole)
    target.keep(num_new=2, num_committed=1)
    assert target.cache_for_user().get_seq_length() == ids.shape[1] + 1
