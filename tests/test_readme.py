"""What the README says is so: its Python runs, its commands exist, its tables are the measured ones."""

import inspect
import json
import re
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    XLMConfig,
    XLMWithLMHeadModel,
    cache_utils,
)

import hfspec
from hfspec.cli.env import TESTED_TRANSFORMERS
from hfspec.cli.main import app
from hfspec.host import releases
from hfspec.host.verdicts import cache_problem
from hfspec.weights import fetch as weights
from hfspec.weights import places
from tests.bench.conditions import conditions
from tests.models import VOCAB, build, noisy, prompt, shared
from tests.scripts import ROOT, benchmark
from tests.zoo import page

README = ROOT / "README.md"
TARGET, DRAFT = "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"
#: What ends one command and begins the next.
_BETWEEN_COMMANDS = re.compile(r"[;&|]+")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the document its text begins on."""

    language: str
    text: str
    line: int


def blocks_of(text, *languages):
    """The fenced blocks in these languages, in order. The fences may be indented."""
    found = []
    for match in re.finditer(r"^([ \t]*)```(\w+)[^\n]*\n(.*?)^\1```[ \t]*$", text, re.MULTILINE | re.DOTALL):
        indent, language, body = match.groups()
        if language in languages:
            body = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
            found.append(Block(language, body, text.count("\n", 0, match.start()) + 2))
    return found


def commands_of(block):
    """The words of each command; in a block with prompts, only what stands behind a prompt is one."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        command = []
        for word in [*lexer, ";"]:
            if not _BETWEEN_COMMANDS.fullmatch(word):
                command.append(word)
                continue
            while command and re.match(r"\w+=", command[0]):  # variables set for this command
                command.pop(0)
            if command:
                yield command
            command = []


def check_command(words):
    """Raise if a command of ours does not exist or does not take these words; others are not looked at."""
    name, *rest = words
    if Path(name).name == "hfspec":
        group = typer.main.get_command(app)
        if rest and not rest[0].startswith("-"):
            subcommand = group.commands[rest[0]]
            if "--help" not in rest:
                subcommand.make_context(rest[0], rest[1:])  # parses, runs nothing
        else:
            assert set(rest) <= {"--help", "--install-completion", "--show-completion"}, rest
    elif name == "make":
        targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        asked = {word for word in rest if not word.startswith("-") and "=" not in word}
        assert asked <= targets, f"make has no {asked - targets}"
    elif Path(name).name.startswith("python") and rest and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).is_file(), f"there is no {rest[0]}"


@pytest.fixture
def host_loads_stand_ins(stand_ins, monkeypatch):
    """Let transformers find tiny models under every name that is no folder, as hfspec does under packaged ones."""

    def local(name):
        place = places.locate(str(name))
        if not Path(place).is_dir():
            place = places.locate(DRAFT if re.search(r"small|draft|135M|0\.5B", str(name)) else TARGET)
        return place

    for auto in (AutoModelForCausalLM, AutoTokenizer):
        load = auto.from_pretrained

        def from_pretrained(name, *args, load=load, **kwargs):
            return load(local(name), *args, **kwargs)

        monkeypatch.setattr(auto, "from_pretrained", from_pretrained)


@pytest.mark.filterwarnings("ignore:.*(torch.ao.quantization|quantized tensor creation)")  # torch has a successor
@pytest.mark.usefixtures("host_loads_stand_ins")
def test_every_python_block_runs(monkeypatch, tmp_path):
    """In order, in one namespace; a traceback shows the README's own line numbers."""
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(README.read_text(), "python")
    assert blocks, "README.md has no python block"
    model, tokenizer = weights.load(TARGET, torch.float32, progress=False)
    small_model, _ = weights.load(DRAFT, torch.float32, progress=False)
    text = "def mean(values):"
    namespace = {
        "__name__": "readme",
        "model": model,
        "small_model": small_model,
        "tokenizer": tokenizer,
        "tok": tokenizer,
        "text": text,
        "inputs": tokenizer(text, return_tensors="pt"),
        "messages": [{"role": "user", "content": text}],
    }
    for block in blocks:
        exec(compile("\n" * (block.line - 1) + block.text, str(README), "exec"), namespace)


@pytest.mark.parametrize("name", ["README.md", "benchmarks/README.md"])
def test_every_command_exists(name):
    blocks = blocks_of((ROOT / name).read_text(), "console", "bash", "sh", "shell")
    assert blocks, f"{name} has no command"
    for block in blocks:
        for words in commands_of(block):
            try:
                check_command(words)
            except Exception as error:
                pytest.fail(f"{name}, block at line {block.line}: {shlex.join(words)}: {error!r}")


def test_commands_are_found_and_wrong_ones_noticed():
    text = "$ A=1 hfspec bench --quick && make test  # both\nsome output\n$ python x.py \\\n  --y | cat\n"
    commands = list(commands_of(Block("console", text, 1)))
    assert commands == [["hfspec", "bench", "--quick"], ["make", "test"], ["python", "x.py", "--y"], ["cat"]]
    for words in (["hfspec", "bnech"], ["hfspec", "bench", "--quik"], ["make", "tset"], ["python", "no.py"]):
        with pytest.raises(Exception, match=r".+"):
            check_command(words)
    check_command(["hfspec", "check", "some/model", "--draft", "other"])


def test_blocks_are_found_with_their_lines():
    text = "a\n```python\nb\n```\n- c\n  ```bash\n  d\n    e\n  ```\n```\nf\n```\n"
    assert blocks_of(text, "python", "bash") == [Block("python", "b\n", 3), Block("bash", "d\n  e\n", 7)]


def test_the_tested_releases_of_transformers_are_the_same_everywhere():
    """`hfspec env`, nox, the pins, the README and the zoo's page all name those that the tests run on."""
    *_, newest = TESTED_TRANSFORMERS
    readme = " ".join(README.read_text().split())
    assert re.findall(r'"(\d+\.\d+\.\d+)"', (ROOT / "noxfile.py").read_text()) == list(TESTED_TRANSFORMERS)
    assert f"transformers=={newest}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert f"tested transformers releases: {', '.join(TESTED_TRANSFORMERS)})" in readme
    assert f"every architecture of transformers {newest}, " in readme
    assert page.read()[0] == newest


def test_the_benchmark_tables_are_those_of_the_result_files():
    benchmark("readme_table").main(["--check", str(README)])


def _summary(method, category, speedup, speculation=None, **counts):
    counts = {"num_compared": 0, "num_identical": 0, "num_near_ties": 0} | counts
    return {
        "method": method,
        "category": category,
        "num_prompts": 4,
        "tokens_per_second": 10.04,
        "speedup": speedup,
        "speculation": speculation,
    } | counts


@pytest.fixture
def document(tmp_path):
    """A document with markers beside one result."""
    drafted = {"acceptance_rate": 0.8049, "tokens_per_round": 4.2}
    result = {
        "conditions": conditions(),
        "by_category": [
            _summary("plain", "chat", 1),
            _summary("hfspec", "chat", 0.913, drafted, num_compared=4, num_identical=2, num_near_ties=1),
        ],
        "overall": [
            _summary("plain", None, 1),
            _summary("hfspec", None, 1.5, {"acceptance_rate": None, "tokens_per_round": None}, num_compared=4),
        ],
        "not_run": {"hf-assisted": "refused\nthe pair"},
    }
    (tmp_path / "one.json").write_text(json.dumps(result))
    path = tmp_path / "doc.md"
    path.write_text("a\n<!-- bench:begin -->\n<!-- bench:end -->\nz\n")
    return path


def test_a_table_has_conditions_all_rows_and_what_did_not_run(document):
    made = benchmark("readme_table").tables([document.parent / "one.json"], document.parent)
    assert made.splitlines() == [
        "**Target ← Draft (int8)**, float32, greedy, 4 prompts × 64 tokens, on A CPU, 2 threads of 4 cores, "
        "torch 2.9, transformers 5.0: `hfspec bench --quick` ([results](one.json))",
        "",
        "|  | prompts | plain, tokens/s | hfspec | hf-assisted | acceptance | tokens a round | same tokens |",
        "| :-- | --: | --: | --: | --: | --: | --: | :-- |",
        "| chat | 4 | 10.0 | 0.91× | – | 0.80 | 4.20 | 2 of 4, near-ties: 1, OTHER: 1 |",
        "| **all** (geometric mean) | 4 | 10.0 | **1.50×** | – | – | – | 0 of 4, OTHER: 4 |",
        "",
        "`hf-assisted` could not run: refused the pair",
    ]


def test_what_is_written_is_checked_until_it_is_changed(document):
    script, result = benchmark("readme_table"), str(document.parent / "one.json")
    with pytest.raises(SystemExit, match="names no result file"):
        script.main(["--check", str(document)])
    script.main([result, result, "--write", str(document)])
    script.main(["--check", str(document)])
    script.main([result, result, "--check", str(document)])
    assert document.read_text().count("| chat |") == 2
    with pytest.raises(SystemExit, match="not what their result files give"):
        script.main([result, "--check", str(document)])
    document.write_text(document.read_text().replace("0.91×", "1.91×"))
    with pytest.raises(SystemExit, match="not what their result files give"):
        script.main(["--check", str(document)])
    document.write_text("no markers")
    with pytest.raises(SystemExit, match="needs <!-- bench:begin -->"):
        script.main(["--check", str(document)])


# What it does not do


def _call(model=None, draft=None, ids=None, **call):
    return model or shared(), draft or noisy(), prompt() if ids is None else ids, {"max_new_tokens": 8} | call


def _dropout():
    model = build(attention_dropout=0.1)
    return _call(model.train())


def _hooked():
    model = build()
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + (output.shape[1] == 1))
    return _call(model)


def _own_preparation():
    model = build()
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: prepare(*args, **kwargs)
    return _call(model)


def _int8():
    model = build(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces a successor
        torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    return _call(model, draft=build(dtype=torch.float32, seed=1))


class _OwnCache(DynamicCache):
    """Of the user's own making."""


def _quantized():
    """A cache with a layer such as the host's, whose packages need not be here."""
    members = {"_quantize": None, "_dequantize": None, "__module__": cache_utils.__name__}
    cache = DynamicCache()
    cache.layers = [object.__new__(type("QuantoQuantizedLayer", (cache_utils.QuantizedLayer,), members))]
    return cache


#: For each row of the table a call that it is about.
NOT_SPED_UP = {
    "beams": lambda: _call(num_beams=2),
    "`assistant_model=`, `prompt_lookup_num_tokens=`": lambda: _call(assistant_model=build(seed=1)),
    "`custom_generate=`": lambda: _call(custom_generate=lambda model, input_ids, **kwargs: input_ids),
    "a quantised cache": lambda: _call(**{releases.CACHE_KEY: _quantized()}),
    "a cache class of your own": lambda: _call(**{releases.CACHE_KEY: _OwnCache()}),
    "a draft with another tokenizer": lambda: _call(draft=build(vocab_size=200)),
    "training mode with dropout": _dropout,
    "gradients through `generate()`": lambda: _call(build(), through_gradients=True),
    "a hook, a wrapped block, an attention function … that makes something else of several tokens than of one": _hooked,
    "a target whose inputs others prepare: PEFT's virtual tokens, old remote code": _own_preparation,
    "LLM.int8 with outliers, dynamic int8 layers in the target": _int8,
    "dynamic or long RoPE beyond the original length": lambda: _call(
        build(rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, max_position_embeddings=12)
    ),
    "sparse attention beyond what it picks": lambda: _call(_with(build(), index_topk=4)),
    "attention weights over windowed or static caches": lambda: _call(
        build("mistral"), return_dict_in_generate=True, output_attentions=True
    ),
    "`use_cache=False` with a cache of your own": lambda: _call(
        use_cache=False, **{releases.CACHE_KEY: DynamicCache(config=shared().config)}
    ),
    "hidden states without a cache": lambda: _call(
        use_cache=False, return_dict_in_generate=True, output_hidden_states=True
    ),
    "models such as BLT, CPM-Ant, XLM (see the zoo)": lambda: _call(
        XLMWithLMHeadModel(XLMConfig(n_words=VOCAB, emb_dim=16, n_layers=1, n_heads=2)).eval()
    ),
}


def _with(model, **settings):
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


def _table():
    """The rows of the table in the README: what is called, and the words of the reason."""
    text = README.read_text()
    lines = text[text.index("<!-- plain:begin -->") : text.index("<!-- plain:end -->")].splitlines()[3:]
    return {call.strip(): reason.strip() for _, call, reason, _ in (line.split("|") for line in lines)}


def test_the_table_has_a_call_for_every_row():
    """Nothing is said there that is not tried here."""
    assert list(_table()) == list(NOT_SPED_UP)


@pytest.mark.parametrize("name", NOT_SPED_UP)
def test_what_is_not_sped_up_says_why(name, monkeypatch):
    """The call drafts nothing, for the reason that the table gives."""
    model, draft, ids, call = NOT_SPED_UP[name]()
    if "quantised cache" in name:  # its content is the host's affair: only the decision is looked at
        assert _table()[name] in cache_problem(call[releases.CACHE_KEY])
        return
    with hfspec.patched(model, draft):
        # Its decorator is what switches gradients off.
        wrapped = inspect.unwrap if call.pop("through_gradients", False) else lambda function: function
        wrapped(type(model).generate)(model, ids, **call)
        stats = hfspec.stats(model)
    assert stats.drafted_tokens == 0
    assert _table()[name] in stats.fallback_reason
