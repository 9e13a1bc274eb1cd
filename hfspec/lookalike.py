"""The class that a patched model gets: a subclass of its own that looks the same and decodes through hfspec.

    LlamaForCausalLM  →  LlamaForCausalLM(LlamaForCausalLM), for this one instance

`generate` takes hfspec's keywords out; the host's decoding loops give way to `decode`. Made, copied or pickled
from it, other models are of the plain class.
"""

import copy
import dataclasses
import functools
import inspect
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hfspec import decode
from hfspec.call import Call, PatchState
from hfspec.config import CALL_OPTIONS, DraftBudget, Options, reject_misspelt
from hfspec.draft.registry import Drafting, DraftLike, find_drafting
from hfspec.host import releases
from hfspec.host.prepared import MEDIA_INPUTS

#: Where the patch is found: on the class that the patched instance got for itself.
PATCH_ATTRIBUTE = "_hfspec_patch"
#: Drafts named in calls that are kept for the next call that names them.
_MAX_OTHER_DRAFTS = 4
#: Tensors that a text-only model is given too.
_TEXT_INPUTS = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids")
_ELSEWHERE = "custom_generate, paged batching and models within models are decoded in a way that hfspec does not see"

_current_call: ContextVar[Call | None] = ContextVar("hfspec_call", default=None)


@dataclass
class Patch:
    """What was put on one model."""

    drafting: Drafting
    options: Options
    state: PatchState = field(default_factory=PatchState)
    other_drafts: list[tuple[DraftLike, Drafting]] = field(default_factory=list)


def base_class(model: PreTrainedModel) -> Any:
    """The class the model had when it was patched; others may have been put on top since."""
    layers = type(model).__mro__
    return next(base for patched, base in pairwise(layers) if PATCH_ATTRIBUTE in vars(patched))


def patched_class(base: Any, mine: Patch) -> Any:
    """A subclass of `base`, for one instance, that looks like it and decodes through hfspec."""
    members = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {PATCH_ATTRIBUTE: mine} | _decoding(base, mine) | _copying(base, mine)
    metaclass: Any = type(base)
    return _lookalike_of(metaclass)(base.__name__, (base,), members)


def _decoding(base: Any, mine: Patch) -> dict[str, Any]:
    """`generate` and the host's decoding loops."""

    def plain(method: str, mode: str) -> Any:
        vanilla = getattr(base, method)

        @functools.wraps(vanilla)
        def decoding_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _call_on(self, base, mine) as call:
                reason = f"{mode} is not sped up yet"
                return decode.run_plain(call, reason, functools.partial(vanilla, self), *args, **kwargs)

        return decoding_loop

    @functools.wraps(base.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _counted(_new_call(self, base, mine, kwargs)) as call:
            call.encoder_inputs = _media_of(self, kwargs)
            # A loop of the user's own may look into the cache that it hands to ours.
            call.has_own_cache |= kwargs.get("custom_generate") is not None
            if kwargs.get("custom_generate") is not None and call.options.on_unsupported == "raise":
                call.note_plain(_ELSEWHERE)
            result = base.generate(self, *args, **kwargs)
            if not call.was_decoded:
                call.note_plain(_ELSEWHERE, may_raise=False)
            return result

    @functools.wraps(base._sample)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _call_on(self, base, mine) as call:
            return decode.sample(call, functools.partial(base._sample, self), *args, **kwargs)

    encode = getattr(base, releases.ENCODER_METHOD)

    @functools.wraps(encode)
    def prepare_encoder(
        self: Any, inputs_tensor: Any, model_kwargs: Any, model_input_name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # The decoding loop sees what the encoder made of its input; a draft with an encoder needs the input.
        with _call_on(self, base, mine) as call:
            accepted = inspect.signature(self.get_encoder().forward).parameters
            given = {name: value for name, value in model_kwargs.items() if name in accepted and value is not None}
            call.encoder_inputs = given | {model_input_name or self.main_input_name: inputs_tensor}
            return encode(self, inputs_tensor, model_kwargs, model_input_name, *args, **kwargs)

    members = {"generate": generate, releases.SAMPLE_METHOD: _sample, releases.ENCODER_METHOD: prepare_encoder}
    return members | {
        name: plain(name, mode) for name, mode in releases.OTHER_DECODING_METHODS.items() if hasattr(base, name)
    }


def _copying(base: Any, mine: Patch) -> dict[str, Any]:
    """What makes other objects of the patched one: plain ones, but for deep copies."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Byte for byte the plain model: the file needs no hfspec, and a fingerprint of it stays the same.
        pickling = _Pickling(self)
        make, arguments, *rest = base.__reduce_ex__(self, protocol)
        arguments = tuple(base if each is type(self) else each for each in arguments)
        if make.__name__.startswith("__newobj") and (len(rest) < 2 or rest[1] is None):
            rest = [*rest[:1], *([None] if not rest else []), pickling, *rest[2:]]
        return (make, arguments, *rest)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if hasattr(base, "__deepcopy__"):
            clone = base.__deepcopy__(self, memo)
        else:
            make, arguments, state = self.__reduce_ex__(4)[:3]
            clone = memo[id(self)] = make(*arguments)
            clone.__setstate__(copy.deepcopy(state, memo))
        clone.__class__ = patched_class(base, Patch(mine.drafting, mine.options))
        return clone

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # `cls.__new__(cls)`, as `DataParallel` makes its replicas, gives an empty plain one: the patch is not theirs.
        return base.__new__(base, *args, **kwargs)

    def get_class(self: Any) -> Any:
        return base if getattr(_pickling_here, "model", None) is self else type(self)

    def set_class(self: Any, new: Any) -> None:
        vars(object)["__class__"].__set__(self, new)

    return {
        "__reduce_ex__": __reduce_ex__,
        "__deepcopy__": __deepcopy__,
        "__new__": __new__,
        "__class__": property(get_class, set_class),
    }


@functools.cache
def _lookalike_of(metaclass: Any) -> Any:
    """A metaclass whose classes make instances of their base, and have its signature."""

    class Lookalike(metaclass):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            is_ours = PATCH_ATTRIBUTE in vars(cls)
            return cls.__mro__[1](*args, **kwargs) if is_ours else super().__call__(*args, **kwargs)

        @property
        def __signature__(cls) -> inspect.Signature:  # noqa: N805
            return inspect.signature(next(base for base in cls.__mro__ if not isinstance(base, Lookalike)))

    return Lookalike


_pickling_here = threading.local()


class _Pickling:
    """From its making until it is iterated over, `model.__class__` is the plain class, in this thread.

    A pickler compares the class that it writes with the object's. Then it asks for list items, of which there are
    none, before it comes to the state.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        _pickling_here.model = model

    def __iter__(self) -> "_Pickling":
        return self

    def __next__(self) -> Any:
        _pickling_here.model = None
        raise StopIteration

    def __del__(self) -> None:
        _pickling_here.model = None


def _new_call(model: PreTrainedModel, base: Any, mine: Patch, kwargs: dict[str, Any]) -> Call:
    """Take hfspec's keywords out of `kwargs` and join them with the patch's options."""
    reject_misspelt((word for word in kwargs if word not in _host_keywords()), CALL_OPTIONS, "generate()")
    given = call_options(model, kwargs)
    for name in CALL_OPTIONS:
        kwargs.pop(name, None)
    draft = given.pop("draft", None)
    if "draft_budget" in given:
        given["budget"] = DraftBudget.parse(given.pop("draft_budget"))
    options = dataclasses.replace(mine.options, **given)
    drafting = mine.drafting if draft is None else _remembered(mine, model, draft, options)
    has_own_cache = any(kwargs.get(name) is not None for name in releases.CACHE_KEYS)
    return Call(model, options, drafting, mine.state, base._sample is GenerationMixin._sample, has_own_cache)


def call_options(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's hfspec options in one call: by keyword, else in its `GenerationConfig`, else in the model's own."""
    given: dict[str, Any] = {}
    for config in (model.generation_config, kwargs.get("generation_config")):
        values = {name: getattr(config, name, None) for name in CALL_OPTIONS}
        given |= {name: value for name, value in values.items() if value is not None}
    return given | {name: kwargs[name] for name in CALL_OPTIONS if name in kwargs}


def _remembered(mine: Patch, model: PreTrainedModel, draft: DraftLike, options: Options) -> Drafting:
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
        call.finish()


@contextmanager
def _call_on(model: PreTrainedModel, base: Any, mine: Patch) -> Iterator[Call]:
    """The call this model is in; a decoding loop called by itself is a call of its own."""
    call = _current_call.get()
    if call is not None and call.model is model:
        yield call
    else:
        with _counted(_new_call(model, base, mine, {})) as new:
            new.has_own_cache = True  # whoever calls the loop made it
            yield new
