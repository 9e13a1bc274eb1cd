"""How much a target with its layers on disk gains: plain generate() and hfspec by turns, in one process.

Every forward of such a target reads all of its weights again, for one token as for eight, so that a round's
verification costs no more than a plain token. The draft is in memory. Where the machine has memory to spare
its file cache keeps the weights after the first forward; `--cold` makes it forget them before every forward,
as on a machine that is too small for the model. What hfspec learns stays with it from prompt to prompt.

    OMP_WAIT_POLICY=passive python benchmarks/offload.py --output benchmarks/out/offload.json
"""

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as host_logging

import hfspec
from hfspec.bench.machine import describe
from hfspec.bench.models import quantize
from hfspec.bench.prompts import Prompt, built_in, encode, spread
from hfspec.compare import explain_difference
from hfspec.host import caches, releases
from hfspec.weights.fetch import load, resolve
from hfspec.weights.packaged import DEFAULT_DRAFT, DEFAULT_TARGET

WARM_UP_TOKENS = 6


def load_on_disk(name: str, dtype: torch.dtype, folder: str) -> tuple[Any, list[Path]]:
    """Load a model whose layers stay on disk, and say in which files they are.

    Accelerate reads a safetensors file in place where it can, and writes to `folder` what it cannot; where
    the file has another dtype, every forward converts all of it.
    """
    source = resolve(name)
    places: dict[str, Any] = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
        "model.layers": "disk",
    }
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=places, offload_folder=folder)
    if not all(weight.device.type == "meta" for weight in model.model.layers.parameters()):
        raise RuntimeError("some layers are in memory; this would not measure offloading")
    files = [*Path(source).glob("*.safetensors"), *Path(folder).iterdir()]
    return model.eval(), files


def forget(files: list[Path]) -> None:
    """Make the machine drop what it has cached of these files."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def forward_seconds(model: Any, width: int, forget_all: Callable[[], None], repeats: int = 3) -> float:
    """The least time of a forward over `width` tokens behind a prompt of 64."""
    ids = torch.randint(model.config.vocab_size, (1, 64 + width), generator=torch.Generator().manual_seed(0))
    times = []
    with torch.no_grad():
        cache = caches.empty_cache_for(model.config)
        model(input_ids=ids[:, :64], use_cache=True, **{releases.CACHE_KEY: cache})
        for _ in range(repeats):
            forget_all()
            started = time.perf_counter()
            model(input_ids=ids[:, 64:], use_cache=True, **{releases.CACHE_KEY: cache}, logits_to_keep=width)
            times.append(time.perf_counter() - started)
    return min(times)


def compare(
    methods: dict[str, Any], tokenizer: Any, prompts: list[Prompt], num_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Run every prompt by both methods, in turn; one entry a prompt, with medians in seconds a token."""
    call = {"max_new_tokens": num_tokens, "do_sample": False}
    for model in methods.values():
        model.generate(**encode(tokenizer, prompts[:1], "cpu"), **(call | {"max_new_tokens": WARM_UP_TOKENS}))
    entries = []
    for prompt in prompts:
        inputs = encode(tokenizer, [prompt], "cpu")
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        texts: dict[str, torch.Tensor] = {}
        counted: list[dict[str, Any]] = []
        for _ in range(repeats):
            for name, model in methods.items():
                started = time.perf_counter()
                texts[name] = model.generate(**inputs, **call)
                elapsed = time.perf_counter() - started
                seconds[name].append(elapsed / (texts[name].shape[1] - inputs["input_ids"].shape[1]))
            counted.append(hfspec.stats(methods["hfspec"]).last.to_dict())
        verdict = explain_difference(methods["plain"], inputs, texts["plain"], texts["hfspec"], **call)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        entry = {
            "prompt": prompt.id,
            "seconds_per_token": medians,
            "speedup": medians["plain"] / medians["hfspec"],
            "same_tokens": verdict.identical,
            "verdict": verdict.summary(),
            "hfspec": counted,
        }
        print(
            f"{prompt.id:20} plain {medians['plain']:.2f} s a token, hfspec {medians['hfspec']:.2f}: "
            f"{entry['speedup']:.2f}×   acceptance {counted[-1]['acceptance_rate'] or 0:.2f}, "
            f"{counted[-1]['tokens_per_round'] or 1:.2f} tokens a round   {verdict.summary()}",
            flush=True,
        )
        entries.append(entry)
    return entries


def before_each(layer: Any, act: Callable[[], None]) -> None:
    """Do something before each forward of a layer."""
    forward = layer.forward

    @functools.wraps(forward)
    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return forward(*args, **kwargs)

    layer.forward = acting


def main() -> None:
    """Measure forwards by width, then the prompts; print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="Plain and speculative decoding of a disk-offloaded target.")
    parser.add_argument("--target", default=DEFAULT_TARGET, help="one whose layers are at model.layers")
    parser.add_argument("--draft", default=DEFAULT_DRAFT)
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the target and the draft"
    )
    parser.add_argument("--draft-int8", action="store_true", help="quantise the draft's linear layers to int8")
    parser.add_argument("--draft-budget", default="auto", help="auto, ratio or a number")
    parser.add_argument("--cold", action="store_true", help="empty the machine's file cache before every forward")
    parser.add_argument("--limit", type=int, default=6, help="prompts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write what is measured here, as JSON")
    options = parser.parse_args()
    conditions = describe("python benchmarks/offload.py")
    host: Any = host_logging
    host.set_verbosity_error()
    host.disable_progress_bar()
    dtype: torch.dtype = getattr(torch, options.dtype)

    draft, _ = load(options.draft, torch.float32 if options.draft_int8 else dtype)
    if options.draft_int8:
        quantize(draft)
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve(options.target))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        # Two targets, so that plain is a model that hfspec has never touched. Their layers are not in memory.
        plain, files = load_on_disk(options.target, dtype, one)
        patched, more_files = load_on_disk(options.target, dtype, other)

        def forget_all() -> None:
            if options.cold:
                forget([*files, *more_files])

        for model in (plain, patched):  # not by hooks: a target with hooks runs plain
            before_each(model.model.layers[0], forget_all)
        by_width = {width: forward_seconds(plain, width, forget_all) for width in (1, 2, 4, 8)}
        draft_token = forward_seconds(draft, 1, lambda: None)
        widths = ", ".join(f"{width}: {seconds:.2f}" for width, seconds in by_width.items())
        print(
            f"seconds a forward of the target over so many tokens: {widths}; of the draft over one: {draft_token:.3f}"
        )

        hfspec.patch(patched, draft, draft_budget=options.draft_budget)
        methods = {"plain": plain, "hfspec": patched}
        prompts = spread(built_in(), options.limit)
        entries = compare(methods, tokenizer, prompts, options.tokens, options.repeats)

    speedups = [entry["speedup"] for entry in entries]
    overall = statistics.geometric_mean(speedups)
    print(f"{'all':20} {overall:.2f}× (geometric mean), worst {min(speedups):.2f}×, best {max(speedups):.2f}×")
    if options.output:
        result = {
            "conditions": conditions,
            "options": {name: str(value) for name, value in vars(options).items()},
            "target_forward_seconds": by_width,
            "draft_forward_seconds": draft_token,
            "prompts": entries,
            "speedup": {"geometric_mean": overall, "worst": min(speedups), "best": max(speedups)},
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
