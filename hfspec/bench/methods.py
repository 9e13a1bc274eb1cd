"""The ways to generate that are compared, each as something with a name and a `generate`.

All run the same weights through `generate()` with the same arguments; what differs is in the table below.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

import hfspec
from hfspec.bench.errors import BenchError
from hfspec.bench.models import Pair

PLAIN, HFSPEC, PROMPT_LOOKUP = "plain", "hfspec", "hf-prompt-lookup"

#: Hugging Face assisted generation: what is set on the draft's generation config.
ASSISTED: dict[str, dict[str, Any]] = {
    # As it comes: up to 20 tokens a round, stopped early where the draft is unsure.
    "hf-assisted": {},
    "hf-assisted-constant": {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
    "hf-assisted-heuristic": {
        "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.0,
    },
}

#: The number in Hugging Face's own examples of prompt lookup.
_LOOKUP_TOKENS = 10

NAMES = (PLAIN, *ASSISTED, PROMPT_LOOKUP, HFSPEC)


@dataclass
class Method:
    """One way to generate.

    Attributes:
        model: whose `generate` is called.
        draft: the draft model, whose generation config Hugging Face reads and writes.
        draft_defaults: this method's own copy of it, so that what one method learns stays with it.
        extra: further arguments of `generate`.
    """

    name: str
    model: Any
    draft: Any
    draft_defaults: GenerationConfig
    extra: dict[str, Any] = field(default_factory=dict)

    def generate(self, **arguments: Any) -> torch.Tensor:
        """Call `generate`; returns ids `[1, length]`, prompt included."""
        before = self.draft.generation_config
        self.draft.generation_config = self.draft_defaults
        try:
            ids: torch.Tensor = self.model.generate(**self.extra, **arguments)
            return ids
        finally:
            self.draft.generation_config = before

    @property
    def last_metrics(self) -> hfspec.Metrics | None:
        """What hfspec counted in the last call; `None` for every other method."""
        return hfspec.stats(self.model).last if self.name == HFSPEC else None


def parse_names(text: str) -> list[str]:
    """Read a comma-separated list of methods; plain is always among them, as what the others are compared to.

    Raises:
        BenchError: a name is not known.
    """
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise BenchError(f"--methods: {unknown[0]!r} is not known; choose from {', '.join(NAMES)}.")
    return [name for name in NAMES if name in wanted or name == PLAIN]


def build(names: Sequence[str], pair: Pair, budget: hfspec.DraftBudget) -> list[Method]:
    """Make the methods; plain and Hugging Face's own use the target itself, hfspec a patched twin of it."""
    makers: dict[str, Callable[[Method], None]] = {
        PLAIN: lambda method: None,
        PROMPT_LOOKUP: lambda method: method.extra.update(prompt_lookup_num_tokens=_LOOKUP_TOKENS),
        HFSPEC: lambda method: _patch(method, budget),
    } | dict.fromkeys(ASSISTED, _assist)
    methods = []
    for name in names:
        method = Method(name, pair.target, pair.draft, copy.deepcopy(pair.draft.generation_config))
        makers[name](method)
        methods.append(method)
    return methods


def _assist(method: Method) -> None:
    method.extra["assistant_model"] = method.draft
    for name, value in ASSISTED[method.name].items():
        setattr(method.draft_defaults, name, value)


def _patch(method: Method, budget: hfspec.DraftBudget) -> None:
    # A second object with the same weights: patched, while the first stays plain.
    method.model = hfspec.patch(copy.copy(method.model), draft=method.draft, draft_budget=budget)
