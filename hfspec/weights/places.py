"""Where the models of a name lie on this machine. Nothing is fetched, and nobody is asked."""

import json
import os
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from hfspec.weights.packaged import PACKAGED_MODELS, PackagedModel

#: Raised when a change in `fetch` makes folders that were converted before wrong: they are then made anew.
RECIPE = 1
#: In a converted folder, what it was made from.
PROVENANCE_FILE = "hfspec.json"


def cache_folder() -> Path:
    """Where converted models are kept: `HFSPEC_CACHE`, or `~/.cache/hfspec`."""
    return Path(os.environ.get("HFSPEC_CACHE") or Path.home() / ".cache" / "hfspec").expanduser()


def cached_folder(model: PackagedModel) -> Path | None:
    """The folder of a model that was converted before, by this recipe and from these bytes."""
    folder = cache_folder() / "models" / model.folder_name
    try:
        provenance = json.loads((folder / PROVENANCE_FILE).read_text())
    except (OSError, ValueError):
        return None
    is_current = provenance.get("recipe") == RECIPE and provenance.get("sha256") == model.sha256
    return folder if is_current else None


def locate(name: str) -> Path | str:
    """What `resolve` would return, but nothing is fetched or asked: a name that is in no cache stays a name."""
    return at_hand(name) or name


def at_hand(name: str) -> Path | str | None:
    """Where a name is loaded from without a question: `None` only for a packaged model that is in no cache."""
    if Path(name).is_dir():
        return Path(name)
    model = PACKAGED_MODELS.get(name)
    if model is None or _is_in_hub_cache(name):
        return name
    return cached_folder(model)


def _is_in_hub_cache(name: str) -> bool:
    """Whether the Hugging Face cache holds the model: its config and its weights, whole or as an index."""

    def holds(file: str) -> bool:
        return isinstance(try_to_load_from_cache(name, file), str)

    try:
        return holds("config.json") and (holds("model.safetensors") or holds("model.safetensors.index.json"))
    except HFValidationError:
        return False
