"""What holds for every test: few threads, no network, Hypothesis profiles."""

import os

# Before torch: idle OpenMP threads that spin slow everything else down several times on few cores.
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("HFSPEC_DISABLE", None)

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings

from tests.models import save_stand_ins

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

_SLOW_IS_FINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=25, **_SLOW_IS_FINE)
settings.register_profile("ci", max_examples=200, derandomize=True, **_SLOW_IS_FINE)
settings.register_profile("deep", max_examples=2000, **_SLOW_IS_FINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _stand_ins(tmp_path_factory):
    cache = tmp_path_factory.mktemp("stand_ins")
    save_stand_ins(cache)
    return cache


@pytest.fixture
def stand_ins(_stand_ins, monkeypatch):
    """Tiny models wherever a packaged one is asked for by name."""
    monkeypatch.setenv("HFSPEC_CACHE", str(_stand_ins))
    return _stand_ins
