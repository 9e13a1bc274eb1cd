"""Tiny models made in memory, drafts of every quality, and the oracle: the same call, unpatched.

Weights are float64 with a wide initialisation, so that the likeliest token varies along a text and
no rounding changes it.
"""

import copy
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import Regex, decoders, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import EncoderDecoderCache

import hfspec
from hfspec import Context, Draft, DraftSession, DraftSource, Outcome, RoundBudget
from hfspec.host import architectures, caches, releases
from hfspec.weights import places
from hfspec.weights.packaged import PACKAGED_MODELS

VOCAB = 97
PAD, BOS = 0, 1

_SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": None}
_ROPE_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
}
_GPT2_SIZES = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.5,
}
_T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
}
_MAMBA_SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
_GEMMA3_SIZES = _ROPE_SIZES | {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
_GPT_NEO_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "window_size": 8,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
}
_BLOOM_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.5}
_MAMBA2_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "initializer_range": 0.5,
}
_QWEN3_NEXT_SIZES = _ROPE_SIZES | {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "mlp_only_layers": [0, 1],
}
_BART_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 512,
    "init_std": 0.5,
    "forced_eos_token_id": None,
    "decoder_start_token_id": PAD,
}
_ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig, _ROPE_SIZES),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _ROPE_SIZES),
    "gpt2": (GPT2LMHeadModel, GPT2Config, _GPT2_SIZES),
    "mistral": (MistralForCausalLM, MistralConfig, _ROPE_SIZES | {"sliding_window": 8}),
    "mamba": (MambaForCausalLM, MambaConfig, _MAMBA_SIZES),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, _GEMMA3_SIZES),
    "gpt_neo": (GPTNeoForCausalLM, GPTNeoConfig, _GPT_NEO_SIZES),
    "bloom": (BloomForCausalLM, BloomConfig, _BLOOM_SIZES),
    "mamba2": (Mamba2ForCausalLM, Mamba2Config, _MAMBA2_SIZES),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, _QWEN3_NEXT_SIZES),
    "bart": (BartForConditionalGeneration, BartConfig, _BART_SIZES),
    "t5": (T5ForConditionalGeneration, T5Config, _T5_SIZES | {"decoder_start_token_id": PAD}),
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}: {{ message['content'] }} | {% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
#: Models of one kind each: full attention with rotary and with learned positions; windows, everywhere and in every
#: other layer; attention that counts slots; recurrent and hybrid (where the release can go on from a state);
#: encoder and decoder.
SUPPORTED = ("llama", "qwen2", "gpt2")
WINDOWED = ("mistral", "gemma3")
COUNTING = ("gpt_neo", "bloom")
RECURRENT = tuple(
    arch
    for arch in ("mamba2", "qwen3_next")
    if caches.LINEAR_LAYER and architectures.takes_cache(_ARCHITECTURES[arch][1]())
)
ENCODER_DECODER = ("t5", "bart")
KINDS = (*SUPPORTED, *WINDOWED, *COUNTING, *RECURRENT, *ENCODER_DECODER)


def build(arch: str = "llama", seed: int = 0, dtype: Any = None, attn: str = "eager", **sizes: Any):
    """A new random model, the same for the same arguments; float64, but for BLOOM, whose padded rows are nan in it."""
    dtype = dtype or (torch.float32 if arch == "bloom" else torch.float64)
    model_class, config_class, defaults = _ARCHITECTURES[arch]
    config = config_class(**(_SPECIAL | defaults | sizes))
    if "mamba" not in arch:
        config._attn_implementation = attn
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).to(dtype).eval()
        if arch == "t5":  # its own weights write one token for ever
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        weight.normal_(std=0.7)
        return model


@functools.cache
def shared(arch: str = "llama", seed: int = 0, attn: str = "eager"):
    """A model for tests that leave it as they found it."""
    return build(arch, seed, attn=attn)


@functools.cache
def noisy(arch: str = "llama", seed: int = 0, attn: str = "eager", scale: float = 0.02):
    """A good draft: the shared model with a little noise on its weights."""
    model = copy.deepcopy(shared(arch, seed, attn))
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight += scale * noise
    return model


def prompt(length: int = 7, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """Random ids `[1, length]` without special tokens."""
    return torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


def prompts(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of those lengths, padded at the left: `input_ids` and `attention_mask`, `[rows, longest]`."""
    longest = max(lengths)
    input_ids = torch.full((len(lengths), longest), PAD)
    for row, length in enumerate(lengths):
        input_ids[row, longest - length :] = prompt(length, seed=seed + row)[0]
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long()}


def deep_and_shallow(num_layers: int = 12):
    """A float32 target and a draft that agree on every token: the target's further layers only take time."""
    draft = build("qwen2", dtype=torch.float32, num_hidden_layers=1, max_position_embeddings=4096)
    target = build("qwen2", dtype=torch.float32, num_hidden_layers=num_layers, max_position_embeddings=4096)
    with torch.no_grad():
        target.load_state_dict(draft.state_dict(), strict=False)
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target, draft


def save_stand_ins(cache: Path) -> None:
    """Fill a model cache (`HFSPEC_CACHE`) with tiny models under the names of the packaged ones.

    They write printable characters, chat, and never end a text; the one that has another tokenizer has one here, too.
    """
    target, draft = deep_and_shallow()
    stand_ins = {
        "Qwen/Qwen2.5-Coder-1.5B-Instruct": (target, char_tokenizer()),
        "Qwen/Qwen2.5-Coder-0.5B-Instruct": (draft, char_tokenizer()),
        "HuggingFaceTB/SmolLM2-135M-Instruct": (build("llama", vocab_size=258, dtype=torch.float32), byte_tokenizer()),
    }
    for name, (model, tokenizer) in stand_ins.items():
        packaged = PACKAGED_MODELS[name]
        folder = cache / "models" / packaged.folder_name
        model.generation_config.suppress_tokens = [PAD, BOS]
        model.save_pretrained(folder)
        chatting = copy.deepcopy(tokenizer)
        chatting.chat_template = _CHAT_TEMPLATE
        chatting.save_pretrained(folder)
        provenance = {"hub_id": name, "recipe": places.RECIPE, "sha256": packaged.sha256}
        (folder / "hfspec.json").write_text(json.dumps(provenance))


@functools.cache
def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, `VOCAB` in all."""
    vocab = {"<pad>": PAD, "<s>": BOS} | {chr(32 + i): 2 + i for i in range(VOCAB - 2)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return _wrapped(inner)


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that a character can take several; ids 0 and 1 are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": PAD, "<s>": BOS} | {token: 2 + i for i, token in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return _wrapped(inner)


def _wrapped(inner: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # 4.57 would add token types, which no model here takes
    )


class Scripted(DraftSource):
    """Forces accept counts: knows what vanilla will write, and proposes so many right tokens, then a wrong one.

    Args:
        text: vanilla's whole output `[rows, length]`, prompt included.
        accepts: right tokens in each round, over and over; more than the budget means all right. Each row begins at
            another point of them.
    """

    def __init__(self, text: torch.Tensor, accepts: Sequence[int], vocab: int = VOCAB) -> None:
        self.text = text.tolist()
        self.accepts = tuple(accepts)
        self.vocab = vocab
        self.num_starts = 0
        self.drafts: list[list[int]] = []
        self.outcomes: list[Outcome] = []

    def start(self, context: Context) -> DraftSession:
        self.num_starts += 1
        return _ScriptedSession(self, context)


class _ScriptedSession(DraftSession):
    def __init__(self, source: Scripted, context: Context) -> None:
        self._source = source
        self._context = context
        self._num_drafts = context.row

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Draft:
        source, start, text = self._source, input_ids.shape[1], self._source.text[self._context.row]
        num_right = source.accepts[self._num_drafts % len(source.accepts)]
        self._num_drafts += 1
        ids = []
        for index in range(min(budget.num_tokens, num_right + 1)):
            at = start + index
            right = text[at] if at < len(text) else 0
            ids.append(right if index < num_right else (right + 1) % source.vocab)
        source.drafts.append(ids)
        return Draft(torch.tensor([ids], dtype=torch.long, device=self._context.device))

    def observe(self, outcome: Outcome) -> None:
        self._source.outcomes.append(outcome)


class FunctionSource(DraftSource):
    """A source whose `propose` is a plain function of `input_ids`, budget and round number (1, 2, …)."""

    def __init__(self, propose: Callable[[torch.Tensor, RoundBudget, int], Any]) -> None:
        self._propose = propose

    def start(self, context: Context) -> DraftSession:
        session = _FunctionSession()
        session.function = self._propose
        return session


class _FunctionSession(DraftSession):
    num_rounds = 0
    function: Callable[..., Any]

    def propose(self, input_ids: torch.Tensor, budget: RoundBudget) -> Any:
        self.num_rounds += 1
        return self.function(input_ids, budget, self.num_rounds)


def rows(*ids: int) -> torch.Tensor:
    """Token ids `[1, n]`."""
    return torch.tensor([ids], dtype=torch.long)


class CountingProcessor(LogitsProcessor):
    """Stateful: forbids another token at each call, by the number of calls so far."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        scores = scores.clone()
        scores[:, (self.num_calls * 7) % scores.shape[-1]] = -torch.inf
        return scores


class ForcingProcessor(LogitsProcessor):
    """Allows only the tokens of `text`, one after the other, then anything."""

    def __init__(self, num_prompt: int, text: Sequence[int]) -> None:
        self._num_prompt = num_prompt
        self._text = text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        index = input_ids.shape[1] - self._num_prompt
        if index >= len(self._text):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._text[index]] = 0
        return forced


class OnForward:
    """Calls `before(module, args, kwargs)` and `after(module, args, kwargs)` around each forward of a module.

    As a hook would, but the rows of a batch need not keep in step for it.
    """

    def __init__(self, module: Any, before: Callable[..., None] | None = None, after: Any = None) -> None:
        forward = module.forward
        self._module, self._was_replaced = module, vars(module).get("forward")

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(module, args, kwargs)
            outputs = forward(*args, **kwargs)
            if after is not None:
                after(module, args, kwargs)
            return outputs

        module.forward = watched

    def remove(self) -> None:
        """The module is as it was."""
        del self._module.forward
        if self._was_replaced is not None:
            self._module.forward = self._was_replaced


@dataclass
class Pair:
    """One call, unpatched and patched."""

    plain: Any
    fast: Any
    plain_state: torch.Tensor
    fast_state: torch.Tensor
    stats: hfspec.Stats

    def assert_same(self) -> "Pair":
        """Same result in every part, and the same random numbers used."""
        assert_same(self.plain, self.fast)
        assert torch.equal(self.plain_state, self.fast_state), "the random state differs from vanilla's"
        return self

    def assert_drafted(self) -> "Pair":
        """It was speculation that gave the result."""
        last = self.stats.last
        assert last.drafted_tokens > 0
        assert last.fallback_reason is None, last.fallback_reason
        return self

    def assert_plain(self, *words: str) -> "Pair":
        """It was plain decoding, for a reason that has these words."""
        assert self.stats.last.drafted_tokens == 0
        reason = self.stats.last.fallback_reason
        assert reason is not None
        assert all(word in reason for word in words), reason
        return self


def both(
    model: Any,
    draft: Any,
    ids: torch.Tensor | None,
    call: dict[str, Any] | Callable[[], dict[str, Any]],
    *,
    seed: int = 0,
    **patch_options: Any,
) -> Pair:
    """Run a call on `model` unpatched, then patched.

    Args:
        call: `generate()`'s keywords, or a function that makes them anew (for objects with state).
    """
    make = call if callable(call) else lambda: call
    prompt_ids = {} if ids is None else {"inputs": ids}
    torch.manual_seed(seed)
    plain = model.generate(**prompt_ids, **make())
    plain_state = torch.get_rng_state()
    with hfspec.patched(model, draft, **patch_options):
        torch.manual_seed(seed)
        fast = model.generate(**prompt_ids, **make())
        fast_state = torch.get_rng_state()
        stats = hfspec.stats(model)
    return Pair(plain, fast, plain_state, fast_state, stats)


def plain_text(model: Any, ids: torch.Tensor, seed: int = 0, **call: Any) -> torch.Tensor:
    """Vanilla's output `[1, length]`."""
    torch.manual_seed(seed)
    return model.generate(ids, **call)


def assert_same(plain: Any, fast: Any) -> None:
    """Equal token ids; in a dict, equal shapes and (but for rounding) values of everything, the cache included."""
    assert type(plain) is type(fast)
    if isinstance(plain, torch.Tensor):
        assert torch.equal(plain, fast), f"vanilla wrote {plain.tolist()}, hfspec {fast.tolist()}"
        return
    assert list(plain) == list(fast)
    assert torch.equal(plain.sequences, fast.sequences)
    for name in plain:
        if name == releases.CACHE_KEY and not isinstance(plain[name], tuple):  # 4.57 can make a tuple of it
            assert_same_cache(plain[name], fast[name])
        elif name != "sequences":
            assert_close(plain[name], fast[name], name)


def assert_same_cache(plain: Any, fast: Any) -> None:
    """Same type, same length, same content, layer by layer."""
    assert type(plain) is type(fast)
    if isinstance(plain, EncoderDecoderCache):
        assert plain.is_updated == fast.is_updated
        assert_same_cache(plain.self_attention_cache, fast.self_attention_cache)
        assert_same_cache(plain.cross_attention_cache, fast.cross_attention_cache)
        return
    assert [type(layer) for layer in plain.layers] == [type(layer) for layer in fast.layers]
    for index, (one, other) in enumerate(zip(plain.layers, fast.layers, strict=True)):
        for name, value in vars(one).items():
            if name == "cumulative_length" and hasattr(one, "cumulative_length_int"):
                continue  # the host stops counting there once a static window is full, sooner or later
            _assert_same_part(value, getattr(other, name), f"{name} of cache layer {index}")


def _assert_same_part(plain: Any, fast: Any, where: str) -> None:
    if isinstance(plain, torch.Tensor):
        assert_close(plain, fast, where)
    elif isinstance(plain, dict):
        assert plain.keys() == fast.keys(), where
        for key, value in plain.items():
            _assert_same_part(value, fast[key], f"{where}[{key}]")
    elif isinstance(plain, int | float | bool | str | None):
        assert plain == fast, where


def assert_close(plain: Any, fast: Any, where: str = "") -> None:
    """Nested tuples of tensors: same nesting, shapes and types, values equal but for rounding."""
    if plain is None or fast is None:
        assert plain is fast, where
    elif isinstance(plain, torch.Tensor):
        assert plain.dtype == fast.dtype, where
        # RMSNorm, rotary positions and eager softmax round through float32 even in a float64 model; the delta rule
        # is float32 altogether, and adds up in another order for several tokens at once (4e-5 seen in Qwen3-Next).
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4, equal_nan=True, msg=_at(where))
    else:
        assert len(plain) == len(fast), where
        for index, (one, other) in enumerate(zip(plain, fast, strict=True)):
            assert_close(one, other, f"{where}[{index}]")


def _at(where: str) -> Callable[[str], str]:
    return lambda message: f"{where}: {message}"
