"""The pair that is measured: loaded, quantised or randomised as asked, and stripped of sampling defaults."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from hfspec.bench.errors import BenchError
from hfspec.weights.fetch import load, resolve

#: Special ids, and how Hugging Face drafts: kept as the model's generation config has them.
_KEPT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, the same for every method; a temperature of `None` means greedily."""

    temperature: float | None = None
    seed: int = 0

    def config_of(self, model: Any) -> GenerationConfig:
        """A generation config with the model's special ids and no logits processor but the temperature."""
        make_config: Any = GenerationConfig
        own = model.generation_config
        kept = {name: getattr(own, name) for name in _KEPT if getattr(own, name, None) is not None}
        if "pad_token_id" not in kept and "eos_token_id" in kept:
            eos = kept["eos_token_id"]
            kept["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
        chosen: dict[str, Any] = {"do_sample": False}
        if self.temperature is not None:
            chosen = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        config: GenerationConfig = make_config(**chosen, **kept)
        return config


@dataclass(frozen=True)
class Pair:
    """A target, its draft, and the target's tokenizer."""

    target: Any
    draft: Any
    tokenizer: Any
    device: str = "cpu"

    @contextmanager
    def choosing_by(self, sampling: Sampling) -> Iterator[None]:
        """Let both models decode by `sampling` alone, whatever their own generation configs say."""
        before = self.target.generation_config, self.draft.generation_config
        self.target.generation_config = sampling.config_of(self.target)
        self.draft.generation_config = sampling.config_of(self.draft)
        try:
            yield
        finally:
            self.target.generation_config, self.draft.generation_config = before


def load_pair(
    target: str, draft: str, dtype: torch.dtype, *, is_draft_int8: bool = False, is_draft_random: bool = False
) -> Pair:
    """Load both models by name or folder.

    Args:
        target: a name that `hfspec.weights.fetch` knows, a hub name, or a folder.
        draft: likewise.
        dtype: of both.
        is_draft_int8: the draft is loaded in float32 and its linear layers are quantised dynamically.
        is_draft_random: the draft has its config, and random weights: no draft could be worse.

    Raises:
        BenchError: a model cannot be loaded, or int8 was asked for where there is a GPU to use.
        WeightsError: weights could not be fetched.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if is_draft_int8 and device != "cpu":
        raise BenchError("--draft-int8 quantises for CPUs, and this machine would run on its GPU; leave it out.")
    draft_dtype = torch.float32 if is_draft_int8 else dtype
    with _named("target", target):
        target_model, tokenizer = load(target, dtype)
    with _named("draft", draft):
        draft_model = _random(draft, draft_dtype) if is_draft_random else load(draft, draft_dtype)[0]
    if is_draft_int8:
        quantize(draft_model)
    return Pair(target_model.to(device), draft_model.to(device), tokenizer, device)


@contextmanager
def _named(option: str, name: str) -> Iterator[None]:
    """Say which model it is that transformers cannot load."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise BenchError(
            f"--{option} {name}: the model cannot be loaded. Give a folder with a model, or a name that the Hugging "
            f"Face hub knows. ({error})"
        ) from error


def quantize(model: Any) -> None:
    """Replace the float32 linear layers by dynamically quantised int8 ones, in place."""
    quantize_dynamic: Any = torch.ao.quantization.quantize_dynamic
    with warnings.catch_warnings():
        # torch announces a successor in another package; this one ships with torch and runs on every CPU.
        warnings.simplefilter("ignore")
        quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)


def _random(name: str, dtype: torch.dtype) -> Any:
    """A model of that config with random weights, the same ones every time."""
    auto_model: Any = AutoModelForCausalLM
    config = AutoConfig.from_pretrained(resolve(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return auto_model.from_config(config, dtype=dtype).eval()
