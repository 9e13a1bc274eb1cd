"""`hfspec check` says yes or no, and why, from configs alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, T5Config, WhisperConfig, XLMConfig
from typer.testing import CliRunner

from hfspec.cli.check import forecast
from hfspec.cli.main import app


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HFSPEC_CACHE", str(tmp_path / "cache"))


def llama(hidden_size: int = 64, **options: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    }
    return LlamaConfig(**(sizes | options))


def t5(num_layers: int = 1, num_encoder_layers: int = 1) -> T5Config:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 2, "vocab_size": 64}
    return T5Config(num_layers=num_encoder_layers, num_decoder_layers=num_layers, **sizes)


def saved(config: PretrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def check(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["check", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_a_llama_can_be_sped_up(tmp_path: Path):
    exit_code, report = check(saved(llama(), tmp_path / "target"))
    assert exit_code == 0
    assert report["possible"]
    assert report["problem"] is None
    assert report["command"].startswith("hfspec")


def test_an_encoder_decoder_can_be_sped_up(tmp_path: Path):
    exit_code, report = check(saved(t5(), tmp_path / "target"))
    assert exit_code == 0
    assert report["possible"]


def test_a_model_that_cannot_be_sped_up_has_a_reason(tmp_path: Path):
    config = XLMConfig(emb_dim=16, n_layers=1, n_heads=2, n_words=64)
    exit_code, report = check(saved(config, tmp_path / "target"))
    assert exit_code == 1
    assert not report["possible"]
    assert "mask token" in report["problem"]


def test_a_pair_has_sizes_ratio_and_forecasts(tmp_path: Path):
    target, draft = saved(llama(256), tmp_path / "target"), saved(llama(32), tmp_path / "draft")
    exit_code, report = check(target, "--draft", draft)
    assert exit_code == 0
    assert 0 < report["cost_ratio"] < 0.1
    speedups = [item["speedup"] for item in report["forecasts"]]
    assert speedups == sorted(speedups)
    assert speedups[0] > 1


def test_an_input_embedding_counts_only_if_it_is_also_the_head(tmp_path: Path):
    _, untied = check(saved(llama(tie_word_embeddings=False), tmp_path / "untied"))
    _, tied = check(saved(llama(tie_word_embeddings=True), tmp_path / "tied"))
    assert untied["target_parameters"] == tied["target_parameters"]


def test_an_encoder_is_read_once_and_does_not_count(tmp_path: Path):
    _, small = check(saved(t5(), tmp_path / "small"))
    _, wide = check(saved(t5(num_encoder_layers=4), tmp_path / "wide"))
    _, deep = check(saved(t5(num_layers=4), tmp_path / "deep"))
    assert small["target_parameters"] == wide["target_parameters"] < deep["target_parameters"]


def test_speech_has_forecasts(tmp_path: Path):
    sizes: dict[str, Any] = {"encoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 64, "pad_token_id": 0}
    target = saved(WhisperConfig(decoder_layers=8, **sizes), tmp_path / "target")
    draft = saved(WhisperConfig(decoder_layers=1, **sizes), tmp_path / "draft")
    _, report = check(target, "--draft", draft)
    assert 0 < report["cost_ratio"] < 1
    assert len(report["forecasts"]) == 3


def test_a_draft_with_an_encoder_cannot_draft_for_a_decoder(tmp_path: Path):
    target, draft = saved(llama(256, vocab_size=64), tmp_path / "target"), saved(t5(), tmp_path / "draft")
    exit_code, report = check(target, "--draft", draft)
    assert exit_code == 1
    assert "it has an encoder" in report["problem"]


def test_other_vocabularies_do_not_fit(tmp_path: Path):
    target, draft = (
        saved(llama(256), tmp_path / "target"),
        saved(llama(32, vocab_size=99), tmp_path / "draft"),
    )
    exit_code, report = check(target, "--draft", draft)
    assert exit_code == 1
    assert "vocabulary" in report["problem"]


def test_a_draft_as_large_as_the_target_cannot_pay(tmp_path: Path):
    target = saved(llama(), tmp_path / "target")
    exit_code, report = check(target, "--draft", target)
    assert exit_code == 1
    assert "costs 1.00 of the target" in report["problem"]


def test_the_tables_are_printed(tmp_path: Path):
    target = saved(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64), tmp_path / "target")
    result = CliRunner().invoke(app, ["check", target])
    assert result.exit_code == 0
    assert "can be sped up" in result.stdout


def test_a_folder_without_config_ends_in_a_panel(tmp_path: Path):
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "CheckError" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("rate", "ratio", "tokens"), [(0.6, 1.0, 0), (0.8, 0.3, 3), (0.9, 0.0, 16)])
def test_the_forecast_takes_the_best_length(rate: float, ratio: float, tokens: int):
    assert forecast(rate, ratio).draft_tokens == tokens


def test_a_free_draft_that_is_always_right_saves_all_its_tokens():
    assert forecast(1.0, 0.0, max_tokens=4).speedup == 5


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "{folder}"),
        ("check", "{folder}/none", "--draft", "{folder}"),
        ("check",),
        ("bench", "--target", "{folder}"),
        ("bench", "--target", "{folder}/none"),
        ("bench", "--output", "{folder}"),
        ("bench", "--limit", "much"),
        ("demo", "--draft", "{folder}", "--target", "{folder}"),
    ],
    ids=" ".join,
)
def test_every_command_ends_an_error_in_the_same_way(arguments: tuple[str, ...], tmp_path: Path):
    """Exit code 2, without a traceback: a panel on standard error, or JSON alone on standard output."""
    words = [word.format(folder=tmp_path) for word in arguments]
    for_people, as_json = CliRunner().invoke(app, words), CliRunner().invoke(app, [*words, "--json"])
    assert (for_people.exit_code, as_json.exit_code) == (2, 2)
    assert for_people.stdout == ""
    assert "Error" in for_people.stderr
    assert "Traceback" not in for_people.stderr
    told = json.loads(as_json.stdout)
    assert told["error"].endswith(("Error", "Parameter"))
    assert told["message"]


def test_importing_the_library_imports_nothing_of_the_command_line():
    """`import hfspec` is for programs: tables are drawn by who asks for them."""
    code = "import sys, hfspec; print(sorted({'rich', 'typer', 'hfspec.cli', 'hfspec.bench'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
