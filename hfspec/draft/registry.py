"""What a user passes as `draft=`: made into a draft source, with what stands against it.

Knows nothing of calls.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from transformers import AutoConfig, AutoTokenizer, GenerationMixin, PreTrainedModel

from hfspec.config import Options
from hfspec.draft.base import DraftSource
from hfspec.draft.model import ModelDraft
from hfspec.draft.pairing import pairing_problem
from hfspec.errors import DraftError, IncompatibleDraftError, PatchError
from hfspec.host import architectures
from hfspec.host.verdicts import draft_problem
from hfspec.weights.places import locate

#: What `draft=` takes: a loaded model, the name or path of one, or any draft source.
DraftLike: TypeAlias = PreTrainedModel | DraftSource | str | os.PathLike[str]


@dataclass(frozen=True)
class Drafting:
    """A draft source and what stands against using it with this target (`None`: nothing)."""

    source: DraftSource
    problem: str | None = None

    @property
    def given(self) -> object:
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
        return Drafting(draft)
    if isinstance(draft, str | os.PathLike):
        draft = _load_beside(model, os.fspath(draft))
    if not (isinstance(draft, PreTrainedModel) and isinstance(draft, GenerationMixin)):
        raise PatchError(
            f"draft= takes a causal language model, the name or path of one, or an hfspec.DraftSource; "
            f"this is a {type(draft).__name__}{wrapped_hint(draft)}."
        )
    if not _has_weights(draft):
        raise DraftError(
            "The draft model has no weights (device 'meta'); load it with weights, on any device or on disk."
        )
    problem = draft_problem(draft.config, model.config)
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
    return Drafting(ModelDraft(draft), problem)


def wrapped_hint(thing: object) -> str:
    """The end of an error message about something that is no model but leads to one; nothing if it does not."""
    if isinstance(thing, str | os.PathLike):
        return "; load it first: model = AutoModelForCausalLM.from_pretrained(...)"
    wrappers = {"_orig_mod": "._orig_mod", "get_base_model": ".get_base_model()", "module": ".module"}
    inner = next((way for name, way in wrappers.items() if hasattr(thing, name)), None)
    if inner is None and isinstance(getattr(thing, "model", None), PreTrainedModel):
        inner = ".model"  # a pipeline's, a trainer's
    return f"; it wraps one: pass that (see its {inner})" if inner else ""


def _has_weights(model: PreTrainedModel) -> bool:
    """Whether a model has weights: in memory, or somewhere that Accelerate brings them from for each forward."""
    if architectures.input_device(model).type != "meta":
        return True
    hooks = [getattr(module, "_hf_hook", None) for module in model.modules()]
    return any(getattr(each, "offload", False) for hook in hooks for each in getattr(hook, "hooks", (hook,)))


def _load_beside(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Load a draft by name, in the target's dtype, where the target's inputs are.

    Raises:
        DraftError: transformers cannot load it.
    """
    device = architectures.input_device(model)
    source = locate(name)
    try:
        loader = architectures.auto_class(AutoConfig.from_pretrained(source))
        # The model's dtype, not the embedding's: those of a packed GGUF are bytes.
        loaded: Any = loader.from_pretrained(source, dtype=model.dtype)
    except (OSError, ValueError) as error:
        raise DraftError(
            f"draft={name!r} cannot be loaded: {error} Pass a folder or a hub name, or load the model yourself."
        ) from error
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
