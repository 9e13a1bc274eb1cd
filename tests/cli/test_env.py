"""`hfspec env` says what is here, without network and without loading a model."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from hfspec.cli import env
from hfspec.cli.main import app


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HFSPEC_CACHE", str(tmp_path))
    return tmp_path


def test_json_has_versions_devices_and_cache(cache: Path):
    result = CliRunner().invoke(app, ["env", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["command"].startswith("hfspec")
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["transformers"] == transformers.__version__
    assert facts["devices"]["threads"] == torch.get_num_threads()
    assert facts["cache"] == {"folder": str(cache), "models": {}}


def test_converted_models_are_listed_with_their_size(cache: Path):
    folder = cache / "models" / "somebody--tiny"
    folder.mkdir(parents=True)
    (folder / "hfspec.json").write_text('{"hub_id": "somebody/tiny"}')
    (folder / "model.safetensors").write_bytes(bytes(20_000_000))
    assert env.environment()["cache"]["models"] == {"somebody/tiny": "0.02 GB"}


def test_a_version_out_of_range_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env.importlib.metadata, "requires", lambda name: ["transformers>=99", "rich>=1"])
    monkeypatch.setattr(env.importlib.metadata, "version", lambda name: "13.0")
    facts = env.environment()
    assert facts["in_range"] == {"transformers": False, "rich": True}
    assert env._version_lines(facts)["transformers"].startswith("13.0 (OUT OF RANGE)")


def test_the_tables_name_every_package():
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("hfspec", "torch", "transformers", "bitsandbytes"))
