"""Whether a forward over several tokens of this very model, as it stands, is known to give what forwards over one give.

Nothing about a model is believed: `verification.proving` makes both kinds of forward, and what came of it is kept
here until the model is another (`Fingerprint`), or the text or the draft is more than twice as long as was proved.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfspec.host import caches
from hfspec.host.prepared import Prepared
from hfspec.metrics import Proof

#: Models as they stood that are remembered, for one patched model: adapters that take turns, kinds of cache.
_MAX_PROOFS = 64
#: Epsilons of the arithmetic by which the largest logit may be off, see `rounding`.
_EPSILONS = {torch.float32: 4096.0, torch.bfloat16: 8.0, torch.float16: 32.0}
#: Arithmetic of float32 numbers that are multiplied as TF32: its epsilon, ten bits.
_TF32_EPSILON = 2.0**-10
#: Logits as large as this are a mask's, and tell nothing of the scale.
_MASKED = 1e4
#: Hooks that see the forwards of every module.
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
#: What a module says of its adapters.
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")


@dataclass(frozen=True)
class Fingerprint:
    """A model as it stands, in one kind of call: equal as long as nothing that a proof depends on was changed.

    Attributes:
        parts: identities and plain values.
        kept: the objects whose identities are in `parts`, so that no other object gets one of them.
    """

    parts: tuple[Any, ...]
    kept: tuple[Any, ...] = field(default=(), compare=False, repr=False)


class Trial:
    """What has been proved, or disproved, of one patched model."""

    def __init__(self) -> None:
        self._proofs: OrderedDict[Fingerprint, Proof] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def last(self) -> Proof | None:
        """The latest finding."""
        with self._lock:
            return next(reversed(self._proofs.values()), None)

    def of(self, fingerprint: Fingerprint) -> Proof | None:
        """What is known of the model as it stands."""
        with self._lock:
            return self._proofs.get(fingerprint)

    def problem(self, fingerprint: Fingerprint) -> str | None:
        """Why the model as it stands cannot be verified in one forward, if that was seen."""
        proof = self.of(fingerprint)
        return None if proof is None else proof.problem

    def is_needed(self, fingerprint: Fingerprint, length: int, width: int) -> bool:
        """Whether a forward over `width` tokens that ends a text of `length` is still to be proved.

        A proof holds for texts and drafts of less than twice its length and width.
        """
        proof = self.of(fingerprint)
        return proof is None or length >= 2 * proof.length or width >= 2 * proof.width

    def note(self, fingerprint: Fingerprint, proof: Proof) -> None:
        """Remember a finding; what was proved before for greater lengths still holds."""
        with self._lock:
            known = self._proofs.pop(fingerprint, None)
            self._proofs[fingerprint] = proof if known is None else proof.with_reach_of(known)
            while len(self._proofs) > _MAX_PROOFS:
                self._proofs.popitem(last=False)


def fingerprint(prepared: Prepared, cache: Any, is_ragged: bool) -> Fingerprint:
    """The model as it stands, and the kind of this call. Looks at no weight's values and waits for no device.

    Args:
        cache: the one that the call will use.
        is_ragged: whether the rows will go on each at its own pace.
    """
    model = prepared.model
    kept: list[Any] = []
    parts: list[Any] = [
        is_ragged,
        prepared.num_rows > 1,
        prepared.has_media,
        torch.is_autocast_enabled(prepared.device.type),
    ]
    parts.append(frozenset(name for name, value in prepared.model_kwargs.items() if value is not None))
    parts += _of_cache(cache, kept)
    parts += _of_configs(model, kept)
    parts += _of_modules(model, kept)
    return Fingerprint(tuple(parts), tuple(kept))


def _of_cache(cache: Any, kept: list[Any]) -> Iterator[Any]:
    yield type(cache)
    kinds = {type(layer): None for layer in caches.text_layers(cache)}
    for kind in (type(cache), *kinds):
        update = getattr(kind, "update", None)
        kept.append(update)
        yield from (kind, id(update))


def _of_configs(model: PreTrainedModel, kept: list[Any]) -> Iterator[Any]:
    """Settings that are plain values, and the attention functions that go by the names among them."""
    text_config = model.config.get_text_config(decoder=True)
    for config in {id(each): each for each in (model.config, text_config)}.values():
        yield tuple(
            (name, value) for name, value in vars(config).items() if isinstance(value, bool | int | float | str)
        )
        name = getattr(config, "_attn_implementation", None)
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            function = functions.get(name)
            kept.append(function)
            yield id(function)


def _of_modules(model: PreTrainedModel, kept: list[Any]) -> Iterator[Any]:
    for name in _GLOBAL_HOOKS:
        yield from _identities(getattr(torch.nn.modules.module, name).values(), kept)
    generation = (model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation)
    yield from _identities([getattr(each, "__func__", each) for each in generation], kept)
    # By hand: `modules()` takes several times as long.
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        kind, inside = type(module), vars(module)
        yield from (kind, id(kind.forward), inside["training"])
        kept.append(kind.forward)
        replaced = [inside[name] for name in ("forward", "_compiled_call_impl") if inside.get(name) is not None]
        # A recurrent layer that steps in another thread just now is as it was otherwise.
        replaced = [getattr(each, "was_on_instance", each) for each in replaced]
        hooks = (*inside["_forward_pre_hooks"].values(), *inside["_forward_hooks"].values())
        if replaced or hooks:
            yield from _identities([*(each for each in replaced if each is not None), *hooks], kept)
        for name in _ADAPTERS:
            if name in inside:
                yield str(inside[name])
        for weight in inside["_parameters"].values():
            if weight is not None:
                yield from (type(weight), weight.dtype, weight.shape, weight.device.type)
        waiting += inside["_modules"].values()


def _identities(objects: Any, kept: list[Any]) -> Iterator[int]:
    for each in objects:
        # A bound method is made anew whenever it is looked up.
        parts = (getattr(each, "__self__", None), getattr(each, "__func__", each))
        kept += parts
        yield from map(id, parts)


def arithmetic(model: PreTrainedModel, logits: torch.Tensor) -> tuple[str, float]:
    """The name of the coarsest numbers that the model's forwards are made of, and their epsilon.

    Those are the weights', unless numbers are made coarser on the way: by autocast, here or within the model (then
    the logits are such numbers, in whatever dtype they come), or by matrix products of lower precision.
    """
    found = {weight.dtype for weight in model.parameters() if weight.dtype in _EPSILONS}
    if torch.is_autocast_enabled(logits.device.type):
        found.add(torch.get_autocast_dtype(logits.device.type))
    found.update(
        kind
        for kind in (torch.bfloat16, torch.float16)
        if logits.dtype == kind or torch.equal(logits, logits.to(kind).to(logits.dtype))
    )
    found.update(each for each in map(_compute_dtype, model.modules()) if each in _EPSILONS)
    precision = torch.get_float32_matmul_precision()
    if precision == "medium" or torch.bfloat16 in found:
        found.add(torch.bfloat16)
    coarsest = max(found, key=lambda kind: torch.finfo(kind).eps * _EPSILONS[kind], default=torch.float32)
    if coarsest == torch.float32 and precision == "high" and logits.device.type != "cpu":
        return "TF32", _TF32_EPSILON * _EPSILONS[torch.float16]
    return str(coarsest).removeprefix("torch."), torch.finfo(coarsest).eps * _EPSILONS[coarsest]


def _compute_dtype(module: torch.nn.Module) -> Any:
    return vars(module).get("compute_dtype")


def rounding(logits: torch.Tensor, share: float) -> torch.Tensor:
    """By how much rounding may move each position's logits `[..., vocab]`: `[...]`.

    `share` of the largest logit there. The share, from `arithmetic`, is a number of epsilons of the dtype: a token's
    logits are sums of sums, each rounded, so that their error goes with their size, not with each logit's own.

    - float32, and float64, whose norms, rotary angles and softmax the host rounds through float32: 4,096 epsilons,
      0.0005 of the largest logit. Real models of any depth stay below 100; the widest seen are random models whose
      weights are drawn so wide that each layer magnifies what the one before was off by.
    - bfloat16: 8 epsilons, 0.06. A forward rounds each layer's output to 8 bits, and different kernels for one
      and for several rows round otherwise in the first layer already.
    - float16: 32 epsilons, 0.03: the same, with three bits more.

    A mistake moves logits by the order of their spread; a quantiser of activations, whose steps rounding decides,
    by a tenth of it. Both are far beyond float32's bound.
    """
    return share * _largest(logits)


def difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The largest difference at each position of two logits `[..., vocab]`: `[...]`, infinite where only one is finite.

    Positions of nothing but NaN, as vanilla has where all is masked, do not differ.
    """
    one, other = one.double(), other.double()
    # Infinities of one sign are equal, and so are two NaN.
    is_same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(is_same, 0.0).nan_to_num(nan=torch.inf)
    return apart.amax(dim=-1)


def _largest(logits: torch.Tensor) -> torch.Tensor:
    sizes = logits.double().abs()
    return sizes.masked_fill(~(sizes < _MASKED), 0.0).amax(dim=-1)
