"""What a user passes as `draft=`: made into a draft source, with what stands against it.

Knows nothing of calls.
"""

import os
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
        DraftError: the draft model has no weights in memory.
        IncompatibleDraftError: other tokenizer, where the user wants errors.
    """
    if isinstance(draft, DraftSource):
        return Drafting(draft)
    if isinstance(draft, str | os.PathLike):
        draft = _load_beside(model, draft)
    if not (isinstance(draft, PreTrainedModel) and isinstance(draft, GenerationMixin)):
        raise PatchError(
            f"draft= takes a causal language model, the name or path of one, or an hfspec.DraftSource; "
            f"this is a {type(draft).__name__}."
        )
    if draft.get_input_embeddings().weight.device.type == "meta":
        raise DraftError(
            "The draft model has no weights in memory (device 'meta'); load it with weights, on any device."
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
    return Drafting(ModelDraft(draft), problem)


def _load_beside(model: PreTrainedModel, name: str | os.PathLike[str]) -> PreTrainedModel:
    place = model.get_input_embeddings().weight
    device = place.device if place.device.type != "meta" else torch.device("cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(resolve(os.fspath(name)), dtype=place.dtype)
    draft: PreTrainedModel = loaded.to(device).eval()
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
