"""Put hfspec on one model and take it off again.

The instance gets a subclass of its own class: same name, module and doc, with `generate` (which takes
hfspec's keywords out) and the host's decoding loops (where `decode` steps in) overridden. Nothing is
written into the instance, and nothing else is patched.
"""

import copy
import dataclasses
import functools
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hfspec import decode
from hfspec.call import Call, PatchState
from hfspec.config import CALL_OPTIONS, Acceptance, DraftBudget, OnUnsupported, Options, reject_misspelt, reject_unknown
from hfspec.draft.registry import Drafting, DraftLike, find_drafting, wrapped_hint
from hfspec.errors import PatchError
from hfspec.host import releases
from hfspec.host.prepared import MEDIA_INPUTS
from hfspec.metrics import Stats

Model = TypeVar("Model", bound=PreTrainedModel)

_PATCH_OPTIONS = ("draft", "draft_budget", "acceptance", "on_unsupported", "tokenizer", "draft_tokenizer")


@dataclass
class _Patch:
    drafting: Drafting
    options: Options
    state: PatchState = field(default_factory=PatchState)
    other_drafts: list[tuple[DraftLike, Drafting]] = field(default_factory=list)


#: Drafts named in calls that are kept for the next call that names them.
_MAX_OTHER_DRAFTS = 4
#: Tensors that a text-only model is given too.
_TEXT_INPUTS = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids")
#: Where the patch is found: on the class that the patched instance got for itself.
_PATCH_ATTRIBUTE = "_hfspec_patch"

_current_call: ContextVar[Call | None] = ContextVar("hfspec_call", default=None)


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
        DraftError: the draft cannot be loaded by that name, or has no weights.
        IncompatibleDraftError: other tokenizer, with `on_unsupported="raise"`.
        UnknownOptionError: a keyword that hfspec does not know (a `TypeError`).
        ConfigError: an option's value cannot work (a `ValueError`).
    """
    reject_unknown(unknown, _PATCH_OPTIONS, "hfspec.patch()")
    _check_target(model)
    options = Options(DraftBudget.parse(draft_budget), acceptance, on_unsupported=on_unsupported)
    if draft is not None:
        new = _Patch(find_drafting(model, draft, options, tokenizer, draft_tokenizer), options)
    elif is_patched(model):
        new = dataclasses.replace(_patch_of(model), options=options)
    else:
        raise PatchError("hfspec.patch() needs a draft: pass draft= a small model with the target's tokenizer.")
    _put_on(model, new)
    return model


def unpatch(model: Model) -> Model:
    """Take hfspec off; the model is as before `patch`. A model that is not patched stays as it is.

    Raises:
        PatchError: something has put a class of its own on top, which must come off first.
    """
    if is_patched(model):
        _check_outermost(model)
        model.__class__ = _base_class(model)
    return model


@contextmanager
def patched(model: Model, draft: DraftLike | None = None, **options: Any) -> Iterator[Model]:
    """`patch` for the length of a `with` block; takes `patch`'s arguments.

    A model that was already patched gets its earlier options back at the end.
    """
    before = _patch_of(model) if is_patched(model) else None
    patch(model, draft, **options)
    try:
        yield model
    finally:
        if before is None:
            unpatch(model)
        else:
            _put_on(model, before)


def is_patched(model: object) -> bool:
    """Whether hfspec is on this very model."""
    return hasattr(type(model), _PATCH_ATTRIBUTE)


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


def _patch_of(model: object) -> _Patch:
    if not is_patched(model):
        raise PatchError("This needs a patched model; call hfspec.patch(model, draft=...) first.")
    found: _Patch = getattr(type(model), _PATCH_ATTRIBUTE)
    return found


def _put_on(model: PreTrainedModel, new: _Patch) -> None:
    base: Any = type(model)
    if is_patched(model):
        _check_outermost(model)
        base = _base_class(model)
    model.__class__ = _patched_class(base, new)


def _check_outermost(model: PreTrainedModel) -> None:
    if _PATCH_ATTRIBUTE not in vars(type(model)):
        raise PatchError(
            f"{type(model).__module__}.{type(model).__qualname__} was put on top of the patched model; "
            "undo that first, or patch after it."
        )


def _check_target(model: object) -> None:
    if isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin):
        return
    raise PatchError(
        f"hfspec.patch() takes a transformers model that can generate(); "
        f"this is a {type(model).__name__}{wrapped_hint(model)}."
    )


def _base_class(model: PreTrainedModel) -> Any:
    """The class the model had when it was patched; others may have been put on top since."""
    layers = type(model).__mro__
    return next(base for patched, base in pairwise(layers) if _PATCH_ATTRIBUTE in vars(patched))


def _patched_class(base: Any, new: _Patch) -> Any:
    """A subclass of `base`, for one instance, that looks like it and decodes through hfspec."""

    def plain(method: str, mode: str) -> Any:
        vanilla = getattr(base, method)

        @functools.wraps(vanilla)
        def decoding_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _call_on(self) as call:
                reason = f"{mode} is not sped up yet"
                return decode.run_plain(call, reason, functools.partial(vanilla, self), *args, **kwargs)

        return decoding_loop

    @functools.wraps(base.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _counted(_new_call(self, kwargs)) as call:
            call.encoder_inputs = _media_of(self, kwargs)
            # A loop of the user's own may look into the cache that it hands to ours.
            call.has_own_cache |= kwargs.get("custom_generate") is not None
            elsewhere = (
                "custom_generate, paged batching and models within models are decoded in a way that hfspec does not see"
            )
            if kwargs.get("custom_generate") is not None and call.options.on_unsupported == "raise":
                call.note_plain(elsewhere)
            result = base.generate(self, *args, **kwargs)
            if not call.was_decoded:
                call.note_plain(elsewhere, may_raise=False)
            return result

    @functools.wraps(base._sample)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _call_on(self) as call:
            return decode.sample(call, functools.partial(base._sample, self), *args, **kwargs)

    encode = getattr(base, releases.ENCODER_METHOD)

    @functools.wraps(encode)
    def prepare_encoder(
        self: Any, inputs_tensor: Any, model_kwargs: Any, model_input_name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # The decoding loop sees what the encoder made of its input; a draft with an encoder needs the input.
        with _call_on(self) as call:
            accepted = inspect.signature(self.get_encoder().forward).parameters
            given = {name: value for name, value in model_kwargs.items() if name in accepted and value is not None}
            call.encoder_inputs = given | {model_input_name or self.main_input_name: inputs_tensor}
            return encode(self, inputs_tensor, model_kwargs, model_input_name, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        # Pickled, it is the plain model: the patch belongs to this process.
        make, arguments, *rest = base.__reduce_ex__(self, max(protocol, 2))
        is_usual = getattr(make, "__name__", "") == "__newobj__"
        return (_blank, (base, *arguments[1:]), *rest) if is_usual else (make, arguments, *rest)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if hasattr(base, "__deepcopy__"):
            clone = base.__deepcopy__(self, memo)
        else:
            make, arguments, state = self.__reduce_ex__(4)[:3]
            clone = memo[id(self)] = make(*arguments)
            clone.__setstate__(copy.deepcopy(state, memo))
        mine = _patch_of(self)
        _put_on(clone, _Patch(mine.drafting, mine.options))
        return clone

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Made from `type(model)`, another model is a plain one: the patch is this instance's alone.
        return base(*args, **kwargs)

    members = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {_PATCH_ATTRIBUTE: new, "generate": generate, releases.SAMPLE_METHOD: _sample}
    members[releases.ENCODER_METHOD] = prepare_encoder
    members |= {"__reduce_ex__": __reduce_ex__, "__deepcopy__": __deepcopy__, "__new__": __new__}
    members |= {
        name: plain(name, mode) for name, mode in releases.OTHER_DECODING_METHODS.items() if hasattr(base, name)
    }
    return type(base)(base.__name__, (base,), members)


def _blank(cls: Any, *arguments: Any) -> Any:
    """An empty instance for unpickling to fill."""
    return cls.__new__(cls, *arguments)


def _new_call(model: PreTrainedModel, kwargs: dict[str, Any]) -> Call:
    """Take hfspec's keywords out of `kwargs` and join them with the patch's options."""
    reject_misspelt((word for word in kwargs if word not in _host_keywords()), CALL_OPTIONS, "generate()")
    mine = _patch_of(model)
    given = {name: kwargs.pop(name) for name in CALL_OPTIONS if name in kwargs}
    draft = given.pop("draft", None)
    if "draft_budget" in given:
        given["budget"] = DraftBudget.parse(given.pop("draft_budget"))
    options = dataclasses.replace(mine.options, **given)
    drafting = mine.drafting if draft is None else _remembered(mine, model, draft, options)
    has_own_cache = any(kwargs.get(name) is not None for name in releases.CACHE_KEYS)
    has_host_loop = _base_class(model)._sample is GenerationMixin._sample
    return Call(model, options, drafting, mine.state, has_host_loop, has_own_cache)


def _remembered(mine: _Patch, model: PreTrainedModel, draft: DraftLike, options: Options) -> Drafting:
    """The `Drafting` for one call's `draft=`: loaded and checked the first time it is named."""
    for known, drafting in mine.other_drafts:
        if known is draft or (isinstance(draft, str | os.PathLike) and known == draft):
            return drafting
    drafting = find_drafting(model, draft, options)
    mine.other_drafts = [*mine.other_drafts[1 - _MAX_OTHER_DRAFTS :], (draft, drafting)]
    return drafting


def _media_of(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call that bring images or sounds into a text, and those that tell how.

    The host encodes them before it decodes; a draft that sees has an encoder of its own.
    """
    if model.config.is_encoder_decoder or not any(kwargs.get(name) is not None for name in MEDIA_INPUTS):
        return {}
    others = _host_keywords().union(_TEXT_INPUTS)
    return {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name not in others}


@functools.cache
def _host_keywords() -> frozenset[str]:
    return frozenset(vars(GenerationConfig())) | set(CALL_OPTIONS)


@contextmanager
def _counted(call: Call) -> Iterator[Call]:
    """Make `call` the current one for the body, and count it at the end, however it ends."""
    token = _current_call.set(call)
    try:
        yield call
    finally:
        _current_call.reset(token)
        call.state.finish(call.metrics)


@contextmanager
def _call_on(model: PreTrainedModel) -> Iterator[Call]:
    """The call this model is in; a decoding loop called by itself is a call of its own."""
    call = _current_call.get()
    if call is not None and call.model is model:
        yield call
    else:
        with _counted(_new_call(model, {})) as new:
            new.has_own_cache = True  # whoever calls the loop made it
            yield new
