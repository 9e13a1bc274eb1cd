"""Whether a forward over several tokens of this very model, as it stands, is known to give what forwards over one give.

Nothing about a model is believed: `verification.proving` makes both kinds of forward, and what came of it is kept
here until the model is another (`Fingerprint`), the text twice as long, or the forward much wider than was proved.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfspec.host import caches
from hfspec.host.modules import all_modules
from hfspec.host.prepared import Prepared
from hfspec.proof import Proof

#: Models as they stood that are remembered, for one patched model: adapters that take turns, kinds of cache.
_MAX_PROOFS = 64
#: Epsilons of the arithmetic by which the largest logit may be off, see `rounding`.
_EPSILONS = {torch.float32: 1024.0, torch.bfloat16: 16.0, torch.float16: 32.0}
#: Arithmetic of float32 numbers that are multiplied as TF32: its epsilon, ten bits.
_TF32_EPSILON = 2.0**-10
#: Logits as large as this are a mask's, and tell nothing of the scale.
_MASKED = 1e4
#: Hooks that see the forwards of every module.
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
#: What a module says of its adapters.
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")


class Fingerprint:
    """A model as it stands, in one kind of call: equal as long as nothing that a proof depends on was changed.

    Args:
        parts: plain values, and identities of objects.
        owners: weak references to those objects: once one is gone, another may get its identity.
    """

    def __init__(self, parts: tuple[Any, ...], owners: Sequence[weakref.ref[Any]]) -> None:
        self._parts = parts
        self._owners = owners
        self._hash = hash(parts)

    @property
    def for_trees(self) -> "Fingerprint":
        """The same for drafts that are trees, which come with masks and positions of another kind."""
        return Fingerprint((*self._parts, "tree"), self._owners)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fingerprint)
            and self._parts == other._parts
            and all(owner() is not None for owner in (*self._owners, *other._owners))
        )


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

    def note(self, fingerprint: Fingerprint, proof: Proof) -> Proof:
        """Remember a finding, and return it: what was proved before for greater lengths still holds."""
        with self._lock:
            known = self._proofs.pop(fingerprint, None)
            proof = self._proofs[fingerprint] = proof if known is None else proof.with_reach_of(known)
            while len(self._proofs) > _MAX_PROOFS:
                self._proofs.popitem(last=False)
        return proof


def fingerprint(prepared: Prepared, cache: Any, is_ragged: bool) -> Fingerprint:
    """The model as it stands, and the kind of this call. Looks at no weight's values and waits for no device.

    Args:
        cache: the one that the call will use.
        is_ragged: whether the rows will go on each at its own pace.
    """
    parts: list[Any] = [is_ragged, prepared.num_rows > 1, prepared.has_media]
    parts.append(torch.is_autocast_enabled(prepared.device.type))
    parts.append(frozenset(name for name, value in prepared.model_kwargs.items() if value is not None))
    owners: list[weakref.ref[Any]] = []
    parts += _of_cache(cache, owners)
    parts += _of_configs(prepared.model, owners)
    parts += _of_modules(prepared.model, owners)
    return Fingerprint(tuple(parts), owners)


def _of_cache(cache: Any, owners: list[weakref.ref[Any]]) -> Iterator[Any]:
    for kind in dict.fromkeys((type(cache), *map(type, caches.text_layers(cache)))):
        yield kind
        yield from _identities([getattr(kind, "update", None)], owners)


def _of_configs(model: PreTrainedModel, owners: list[weakref.ref[Any]]) -> Iterator[Any]:
    """Settings that are plain values, and the attention functions that go by the names among them."""
    text_config = model.config.get_text_config(decoder=True)
    for config in {id(each): each for each in (model.config, text_config)}.values():
        yield tuple((name, value) for name, value in vars(config).items() if isinstance(value, int | float | str))
        name = getattr(config, "_attn_implementation", None)
        tables = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
        yield from _identities([table.get(name) for table in tables], owners)


def _of_modules(model: PreTrainedModel, owners: list[weakref.ref[Any]]) -> Iterator[Any]:
    for name in _GLOBAL_HOOKS:
        yield from _identities(getattr(torch.nn.modules.module, name).values(), owners)
    yield from _identities([model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation], owners)
    kinds = set()
    for module in all_modules(model):
        kind, inside = type(module), vars(module)
        yield (kind, inside["training"])
        if kind not in kinds:
            kinds.add(kind)
            yield from _identities([kind.forward], owners)
        forward, compiled = inside.get("forward"), inside.get("_compiled_call_impl")
        if forward is not None or compiled is not None:
            # A recurrent layer that steps in another thread just now is as it was otherwise.
            yield from _identities([getattr(forward, "was_on_instance", forward), compiled], owners)
        for hooks in (inside["_forward_pre_hooks"], inside["_forward_hooks"]):
            if hooks:
                yield from _identities(hooks.values(), owners)
        if any(name in inside for name in _ADAPTERS):
            yield str([inside.get(name) for name in _ADAPTERS])
        for weight in inside["_parameters"].values():
            if weight is not None:
                yield (type(weight), weight.dtype, weight.shape, weight.device.type)


def _identities(objects: Iterable[Any], owners: list[weakref.ref[Any]]) -> Iterator[int]:
    for each in objects:
        # A bound method is made anew whenever it is looked up: it is its function and its object.
        for part in (getattr(each, "__func__", each), getattr(each, "__self__", None)):
            if part is not None:
                yield id(part)
                with suppress(TypeError):  # builtin functions cannot be referred to, and do not go away
                    owners.append(weakref.ref(part))


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
    found.update(each for each in map(_compute_dtype, all_modules(model)) if each in _EPSILONS)
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

    `share` of the largest logit there. The share, from `arithmetic`, is a number of epsilons of the dtype: a logit
    is a sum of sums, each rounded, so that its error goes with the size of them all, not with its own.

    The bounds leave room above what was seen with Qwen2.5-Coder-0.5B (24 layers, forwards over 2, 5 and 9 tokens
    against single ones, behind 9 to 200 tokens of text), and with the tiny random models of the tests:

    - float32, 1,024 epsilons (0.00012 of the largest logit): 34 were seen, 6 in the tests. The same for float64, whose
      norms, rotary angles and softmax the host rounds through float32.
    - bfloat16, 16 epsilons (0.125): 1 to 2 were seen at most places, 7 at the worst. Kernels for one row and for
      several round otherwise in the first layer already, and each layer rounds its output to 8 bits.
    - float16, 32 epsilons (0.03): 3 were seen.

    What is to be found is larger. A mistake moves logits by the order of their spread. Activations quantised to 8 bits,
    where rounding decides between two steps, moved that model's float32 logits by 0.05 to 0.17 of the largest.
    """
    return share * _largest(logits)


def difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The largest difference at each position of two logits `[..., vocab]`: `[...]`, infinite where only one is finite.

    Positions of nothing but NaN, as vanilla has where all is masked, do not differ.
    """
    one, other = one.double(), other.double()
    # Infinities of one sign are equal, and so are two NaN.
    is_same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(is_same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return apart.amax(dim=-1)


def _largest(logits: torch.Tensor) -> torch.Tensor:
    sizes = logits.double().abs()
    return sizes.masked_fill(~(sizes < _MASKED), 0.0).amax(dim=-1)
