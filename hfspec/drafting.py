"""What a user passes as `draft=`: made into a draft source, with what stands against it.

Knows nothing of calls.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel

from hfspec.cache.support import model_problem
from hfspec.config import Options
from hfspec.draft.base import DraftSource
from hfspec.draft.model import ModelDraft
from hfspec.draft.pairing import pairing_problem
from hfspec.errors import DraftError, IncompatibleDraftError, PatchError
from hfspec.weights import resolve

#: What `draft=` takes: a loaded model, the name or path of one, or any draft source.
DraftLike: TypeAlias = PreTrainedModel | DraftSource | str | os.PathLike[str]


@dataclass(frozen=True)
class Drafting:
    """A draft source and what stands against using it with this target (`None`: nothing)."""

    source: DraftSource
    problem: str | None = None

    @property
    def drafter(self) -> object:
        """What the user passed: the draft model, or the source."""
        return self.source.model if isinstance(self.source, ModelDraft) else self.source


def find_drafting(
    model: PreTrainedModel,
    draft: DraftLike,
    options: Options,
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
) -> Drafting:
    """Make a draft source of what the user passed, and find what stands against it.

    Raises:
        PatchError: `draft` is nothing that can draft.
        DraftError: the draft model has no weights.
        IncompatibleDraftError: other tokenizer, where the user wants errors.
    """
    if isinstance(draft, DraftSource):
        return Drafting(draft, verifying_problem(model))
    if isinstance(draft, str | os.PathLike):
        draft = _load_beside(model, draft)
    if not (isinstance(draft, PreTrainedModel) and isinstance(draft, GenerationMixin)):
        raise PatchError(
            f"draft= takes a causal language model, the name or path of one, or an hfspec.DraftSource; "
            f"this is a {type(draft).__name__}{wrapped_hint(draft)}."
        )
    if not _has_weights(draft):
        raise DraftError(
            "The draft model has no weights (device 'meta'); load it with weights, on any device or on disk."
        )
    problem = model_problem(draft.config)
    if problem is not None:
        return Drafting(ModelDraft(draft), f"the draft model cannot draft: {problem}")
    problem = pairing_problem(
        model.config,
        draft.config,
        tokenizer if tokenizer is not None else _find_tokenizer(model),
        draft_tokenizer if draft_tokenizer is not None else _find_tokenizer(draft),
    )
    if problem is not None and options.on_unsupported == "raise":
        raise IncompatibleDraftError(f"This draft cannot draft for this target: {problem}.")
    return Drafting(ModelDraft(draft), problem or verifying_problem(model))


def wrapped_hint(thing: object) -> str:
    """The end of an error message about something that is no model but wraps one; nothing if it does not."""
    wrappers = {"_orig_mod": "._orig_mod", "get_base_model": ".get_base_model()", "module": ".module"}
    inner = next((way for name, way in wrappers.items() if hasattr(thing, name)), None)
    return f"; it wraps one: pass that (see its {inner})" if inner else ""


def verifying_problem(model: PreTrainedModel) -> str | None:
    """Why this target's logits depend on how many tokens are fed at once, by more than rounding, or `None`.

    Some quantised layers scale, or split, what they read by the largest numbers of all tokens in the forward: what
    they make of a token then depends on its neighbours, and a draft cannot be verified in one forward.
    """
    for module in model.modules():
        if _splits_by_outliers(module):
            return (
                "its 8-bit layers single out columns by the outliers of all tokens in a forward (LLM.int8), so that a "
                "token's logits depend on its neighbours; loaded with llm_int8_threshold=0.0 it can be sped up"
            )
        if _scales_over_tokens(module):
            return (
                "its quantised layers use one scale for all tokens of a forward, so that a token's logits depend on "
                "its neighbours; with a scale for each token (PerRow in torchao) it can be sped up"
            )
    return None


def _splits_by_outliers(module: torch.nn.Module) -> bool:
    """Whether this is a layer of bitsandbytes' LLM.int8."""
    state: Any = getattr(module, "state", None)
    return _is_a(module, "bitsandbytes.nn", "Linear8bitLt") and bool(state.threshold > 0)


def _scales_over_tokens(module: torch.nn.Module) -> bool:
    """Whether this layer quantises what it reads by one number that it takes from all of it."""
    if _is_a(module, "torch.ao.nn.quantized.dynamic", "Linear"):
        packed: Any = module._packed_params
        return bool(packed.dtype == torch.qint8)
    # torchao: the layer is a common one, its weight is not.
    weight: Any = getattr(module, "weight", None)
    reading = getattr(weight, "act_quant_kwargs", None)
    is_fixed = getattr(weight, "act_quant_scale", None) is not None
    return type(getattr(reading, "granularity", None)).__name__ == "PerTensor" and not is_fixed


def _is_a(module: torch.nn.Module, package: str, name: str) -> bool:
    """Whether `module` is of that class, which is not imported for this: where nobody has, nothing is of it."""
    found = getattr(sys.modules.get(package), name, None)
    return found is not None and isinstance(module, found)


def _has_weights(model: PreTrainedModel) -> bool:
    """Whether a model has weights: in memory, or somewhere that Accelerate brings them from for each forward."""
    embedding: Any = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return embedding.weight.device.type != "meta" or any(getattr(each, "offload", False) for each in hooks)


def _load_beside(model: PreTrainedModel, name: str | os.PathLike[str]) -> PreTrainedModel:
    device = model.get_input_embeddings().weight.device
    # The model's dtype, not the embedding's: those of a packed GGUF are bytes.
    loaded: Any = AutoModelForCausalLM.from_pretrained(resolve(os.fspath(name)), dtype=model.dtype)
    draft: PreTrainedModel = loaded.to(device if device.type != "meta" else "cpu").eval()
    return draft


def _find_tokenizer(model: PreTrainedModel) -> Any:
    """The tokenizer saved where the model came from, or `None`; never asks the network."""
    name = getattr(model.config, "_name_or_path", "")
    if not name or not Path(name).is_dir():
        return None
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, ImportError):
        return None
