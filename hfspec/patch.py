"""Put hfspec on one model and take it off again.

The instance gets a subclass of its own class (see `lookalike`). Nothing is written into the instance, and nothing
else is patched.
"""

import dataclasses
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from transformers import GenerationMixin, PreTrainedModel

from hfspec.config import Acceptance, DraftBudget, OnUnsupported, Options, reject_unknown
from hfspec.draft.registry import DraftLike, find_drafting, wrapped_hint
from hfspec.errors import PatchError
from hfspec.lookalike import PATCH_ATTRIBUTE, Patch, base_class, patched_class
from hfspec.metrics import Stats

Model = TypeVar("Model", bound=PreTrainedModel)

_PATCH_OPTIONS = ("draft", "draft_budget", "acceptance", "on_unsupported", "tokenizer", "draft_tokenizer")

#: Between threads that put patches on and take them off.
_lock = threading.RLock()
#: Of each model within `patched` blocks: what it had before the first, then the blocks' own, the newest last.
_blocks: "weakref.WeakKeyDictionary[PreTrainedModel, list[Patch | None]]" = weakref.WeakKeyDictionary()


def patch(
    model: Model,
    draft: DraftLike | None = None,
    *,
    draft_budget: str | int | DraftBudget = "auto",
    acceptance: Acceptance = "seeded",
    on_unsupported: OnUnsupported = "warn",
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
    **unknown: Any,
) -> Model:
    """Make this model's `generate()` faster; its tokens stay the same.

    Patching a patched model changes its options. Without `draft`, it keeps its draft, its counts and what has been
    measured; with one, it begins anew.

    Args:
        model: the target, a transformers model that can generate.
        draft: a small model that shares the target's tokenizer (loaded, or a name or path to load beside
            the target), or a `DraftSource`.
        draft_budget: draft tokens a round: `"auto"` (measured while running), `"ratio"`, a fixed number,
            or a `DraftBudget`.
        acceptance: for sampled calls, `"seeded"` (the tokens plain sampling gives under the same seed) or
            `"rejection"` (the same distribution, other tokens).
        on_unsupported: `"warn"` once and run plain, or `"raise"`, for calls that cannot be sped up.
        tokenizer, draft_tokenizer: to check that both vocabularies agree; by default looked for, without
            network, where the models were loaded from.

    Returns:
        The same object.

    Raises:
        PatchError: `model` or `draft` is not something that can be patched, or draft.
        DraftError: the draft cannot be loaded by that name, has no weights, or (with `on_unsupported="raise"`)
            cannot draft for this target.
        IncompatibleDraftError: other tokenizer, with `on_unsupported="raise"`.
        UnknownOptionError: a keyword that hfspec does not know (a `TypeError`).
        ConfigError: an option's value cannot work (a `ValueError`).
    """
    reject_unknown(unknown, _PATCH_OPTIONS, "hfspec.patch()")
    _check_target(model)
    options = Options(DraftBudget.parse(draft_budget), acceptance, on_unsupported=on_unsupported)
    if draft is not None:
        new = Patch(find_drafting(model, draft, options, tokenizer, draft_tokenizer), options)
    elif is_patched(model):
        new = dataclasses.replace(_patch_of(model), options=options)
    else:
        raise PatchError("hfspec.patch() needs a draft: pass draft= a small model with the target's tokenizer.")
    _put_on(model, new)
    _warn_of_draft(model, new)
    return model


def unpatch(model: Model) -> Model:
    """Take hfspec off; the model is as before `patch`. A model that is not patched stays as it is.

    Raises:
        PatchError: something has put a class of its own on top, which must come off first.
    """
    with _lock:
        if is_patched(model):
            _check_outermost(model)
            model.__class__ = base_class(model)
    return model


@contextmanager
def patched(model: Model, draft: DraftLike | None = None, **options: Any) -> Iterator[Model]:
    """`patch` for the length of a `with` block; takes `patch`'s arguments.

    At the end the model is as it was before. Where blocks of several threads overlap, it has the options of the
    newest that is still open.
    """
    with _lock:
        before = _patch_of(model) if is_patched(model) else None
        patch(model, draft, **options)
        mine = _patch_of(model)
        _blocks.setdefault(model, [before]).append(mine)
    try:
        yield model
    finally:
        with _lock:
            open_blocks = _blocks[model]
            open_blocks.reverse()
            open_blocks.remove(mine)
            open_blocks.reverse()
            left = open_blocks[-1]
            if len(open_blocks) == 1:
                del _blocks[model]
            if left is None:
                unpatch(model)
            else:
                _put_on(model, left)


def is_patched(model: object) -> bool:
    """Whether hfspec is on this very model."""
    return hasattr(type(model), PATCH_ATTRIBUTE)


def options_of(model: PreTrainedModel) -> Options:
    """The options a model was patched with.

    Raises:
        PatchError: the model is not patched.
    """
    return _patch_of(model).options


def stats(model: PreTrainedModel) -> Stats:
    """What happened in the last call and in all calls since `patch`.

    Raises:
        PatchError: the model is not patched.
    """
    return _patch_of(model).state.stats()


def _patch_of(model: object) -> Patch:
    if not is_patched(model):
        raise PatchError(f"This needs a patched model; call hfspec.patch(model, draft=...) first{wrapped_hint(model)}.")
    found: Patch = getattr(type(model), PATCH_ATTRIBUTE)
    return found


def _put_on(model: PreTrainedModel, new: Patch) -> None:
    with _lock:
        base: Any = type(model)
        if is_patched(model):
            _check_outermost(model)
            base = base_class(model)
        model.__class__ = patched_class(base, new)


def _check_outermost(model: PreTrainedModel) -> None:
    if PATCH_ATTRIBUTE not in vars(type(model)):
        raise PatchError(
            f"{type(model).__module__}.{type(model).__qualname__} was put on top of the patched model; "
            "undo that first, or patch after it."
        )


def _check_target(model: object) -> None:
    if isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin):
        return
    raise PatchError(
        f"hfspec.patch() takes a loaded transformers model that can generate(); "
        f"this is a {type(model).__name__}{wrapped_hint(model)}."
    )


def _warn_of_draft(model: PreTrainedModel, new: Patch) -> None:
    """Say now, once, what every call would come to."""
    if new.drafting.problem is not None:
        new.state.warn_once(new.drafting.problem, "calls of this model run as plain generate(): %s.")
    if new.drafting.given is model:
        reason = "the draft is the target itself, so a draft token costs as much as a plain one and nothing can be won"
        new.state.warn_once(reason, "%s; pass a smaller model with the target's tokenizer.")
