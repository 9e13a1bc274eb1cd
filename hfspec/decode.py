"""What a patched model's `generate()` comes to: decide, then speculate or step aside with a reason.

`patch` brings a call here at the point where Hugging Face has prepared inputs, processors, criteria,
streamer and cache, and would run its own decoding loop.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationConfig

from hfspec import compat, loop
from hfspec.accept.record import Record
from hfspec.accept.rules import Greedy, Rejection, Rule, Seeded
from hfspec.accept.walk import Transcript
from hfspec.budget.controller import Controller
from hfspec.budget.cost import Experience
from hfspec.cache.ledger import SpeculativeCache
from hfspec.cache.support import cache_problem, model_problem
from hfspec.config import Options
from hfspec.draft.base import Context
from hfspec.draft.guard import GuardedSession
from hfspec.drafting import Drafting
from hfspec.errors import UnsupportedCallError
from hfspec.metrics import Metrics
from hfspec.sampling.noise import SeededNoise
from hfspec.target.forward import Target

logger = logging.getLogger("hfspec")

#: Inputs that stand for more than their token ids; a draft model that sees ids alone would draft blindly.
_MEDIA_INPUTS = (
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "mm_encoder_outputs",
)


@dataclass
class PatchState:
    """What is kept for one patched model between calls: counts, measurements, and which warnings were given."""

    last: Metrics = field(default_factory=Metrics)
    total: Metrics = field(default_factory=Metrics)
    warned: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _experience: dict[int, tuple["weakref.ref[Any]", Experience]] = field(default_factory=dict)

    def warn_once(self, reason: str, message: str) -> None:
        """Log `message` about `reason`, unless it was said of this model before."""
        if reason not in self.warned:
            self.warned.add(reason)
            hint = "(Said once; hfspec.stats(model).fallback_reason keeps the reason.)"
            logger.warning(f"hfspec: {message} {hint}", reason)

    def experience_with(self, drafter: object) -> Experience:
        """What is known about the pair with this draft model or source (which need not be hashable)."""
        found = self._experience.get(id(drafter))
        if found is None or found[0]() is not drafter:
            found = self._experience[id(drafter)] = (weakref.ref(drafter), Experience())
        return found[1]

    def finish(self, metrics: Metrics) -> None:
        """Take the counts of a call that is over."""
        with self._lock:
            self.last = metrics
            self.total.add(metrics)


@dataclass
class Call:
    """One `generate()` call on a patched model.

    Attributes:
        has_host_loop: whether the model's class decodes with the host's own `_sample`.
        has_own_cache: whether the user passed a cache, which must then be filled as given.
        was_decoded: whether the host came to one of the decoding loops that hfspec stands in for.
    """

    model: PreTrainedModel
    options: Options
    drafting: Drafting
    experience: Experience
    state: PatchState
    has_host_loop: bool = True
    has_own_cache: bool = False
    was_decoded: bool = False
    metrics: Metrics = field(default_factory=lambda: Metrics(calls=1))

    def note_plain(self, reason: str, may_raise: bool = True) -> None:
        """This call runs plain: count the reason, say it once per model, or raise if told to."""
        wanted = _wanted_plain(self.options)
        self.metrics.fallback_reasons[wanted or reason] += 1
        if wanted is not None:
            return
        if may_raise and self.options.on_unsupported == "raise":
            compat.forget_prepared_cache(self.model)
            raise UnsupportedCallError(
                f"hfspec cannot speed up this call: {reason}. Pass on_unsupported='warn' to run it plain, "
                "or speculate=False to say that this is wanted."
            )
        self.state.warn_once(reason, "this call runs as plain generate(): %s.")


def sample(
    call: Call,
    vanilla: Callable[..., Any],
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Stand in for the host's `_sample`, with its arguments and its result.

    Args:
        vanilla: the host's `_sample`, bound to the model.
        input_ids: `[batch, prompt_length]`.
    """
    problem = _problem(call, input_ids, generation_config, synced_gpus, model_kwargs)
    if problem is not None:
        return run_plain(
            call,
            problem,
            vanilla,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    call.was_decoded = True
    noise = SeededNoise()
    rule = _rule(call.options, generation_config, noise)
    cache = model_kwargs[compat.CACHE_KEY]
    if not call.has_own_cache and cache.get_seq_length() == 0:
        cache = SpeculativeCache()  # the host has just made that one, for nobody else
    target = Target(call.model, generation_config, cache, model_kwargs)
    transcript = Transcript(input_ids, rule, logits_processor, stopping_criteria, streamer, Record(generation_config))
    context = Context(
        vocab_size=_vocab_size(call.model),
        device=input_ids.device,
        selection=rule.name,
        processors=logits_processor,
        noise=noise,
        prompt_mask=_padding_mask(input_ids, model_kwargs),
    )
    drafter = GuardedSession(call.drafting.source, context, on_failure=_failure_counter(call))
    controller = Controller(call.options.budget, call.experience, reads_confidence=input_ids.device.type == "cpu")
    try:
        loop.generate(target, drafter, transcript, controller, call.metrics, _max_length(call.model, stopping_criteria))
    finally:
        drafter.stop()
        target.level_cache(transcript.num_new)
        call.metrics.speculative_calls += call.metrics.rounds > 0
    if streamer is not None:
        streamer.end()
    cache = target.cache_for_user() if generation_config.return_dict_in_generate else None
    return transcript.record.output(transcript.input_ids, cache)


def run_plain(
    call: Call, reason: str, vanilla: Callable[..., Any], input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run one of the host's own decoding loops, having said why, and count its tokens.

    Raises:
        UnsupportedCallError: the user wants an error instead.
    """
    call.was_decoded = True
    call.note_plain(reason)
    started = time.perf_counter()
    try:
        result = vanilla(input_ids, *args, **kwargs)
    finally:
        seconds = time.perf_counter() - started
        call.metrics.plain_seconds += seconds
        call.metrics.total_seconds += seconds
    sequences = getattr(result, "sequences", result)
    if isinstance(sequences, torch.Tensor):
        call.metrics.new_tokens += sequences.shape[0] * (sequences.shape[1] - input_ids.shape[1])
    return result


def _wanted_plain(options: Options) -> str | None:
    if os.environ.get("HFSPEC_DISABLE", "0") not in ("", "0"):
        return "HFSPEC_DISABLE is set"
    if not options.speculate:
        return "speculate=False"
    if options.budget.max_tokens == 0:
        return "the draft budget is 0"
    return None


def _problem(
    call: Call,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why this call cannot be sped up, or `None` if it can."""
    model = call.model
    wanted = _wanted_plain(call.options)
    if wanted is not None:
        return wanted
    problem = call.drafting.problem or model_problem(model.config)
    if problem is not None:
        return problem
    if getattr(generation_config, "is_assistant", False):
        return "the model is at work as another model's assistant"
    if not call.has_host_loop:
        return f"{type(model).__name__} has a decoding loop of its own"
    if input_ids.shape[0] != 1:
        return f"batches are not sped up yet (this one has {input_ids.shape[0]} rows)"
    if model.training and _drops_units(model):
        return "the model is in training mode with random dropout or noise: no two forwards agree"
    exact = compat.max_exact_length(model.config)
    last = generation_config.max_length
    if exact is not None and (last is None or last > exact):
        return f"its position encoding changes beyond {exact} tokens, and this call may get there"
    if synced_gpus:
        return "several processes must make the same forwards (synced_gpus)"
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        return "the prompt came as embeddings, which a draft model cannot read"
    media = [name for name in _MEDIA_INPUTS if _is_given(model_kwargs.get(name))]
    if media:
        return f"inputs other than text are not sped up yet ({', '.join(media)})"
    if not model_kwargs.get("use_cache"):
        return "use_cache=False leaves nothing to continue from"
    return cache_problem(model_kwargs.get(compat.CACHE_KEY))


def _is_given(value: Any) -> bool:
    """Whether an input is there; 5.24 passes dicts that may hold nothing."""
    return any(_is_given(each) for each in value.values()) if isinstance(value, dict) else value is not None


def _drops_units(model: PreTrainedModel) -> bool:
    """Whether some module in training mode has a dropout, jitter or noise above 0, as a layer or a number it keeps."""
    return any(
        value > 0
        for module in model.modules()
        if module.training
        for name, value in vars(module).items()
        if isinstance(value, float)
        and (isinstance(module, torch.nn.Dropout) or any(word in name for word in ("drop", "jitter", "noise")))
    )


def _max_length(model: PreTrainedModel, criteria: StoppingCriteriaList) -> int | None:
    """The length no draft may reach beyond: where the text ends, or the target's positions do."""
    positions = compat.max_positions(model.config)
    limits = [criteria.max_length, None if positions is None else positions + 1]
    return min((limit for limit in limits if limit is not None), default=None)


def _vocab_size(model: PreTrainedModel) -> int:
    """The width of the logits."""
    width = getattr(model.get_output_embeddings(), "out_features", None)
    return width if isinstance(width, int) else int(model.config.get_text_config(decoder=True).vocab_size)


def _rule(options: Options, generation_config: GenerationConfig, noise: SeededNoise) -> Rule:
    if not generation_config.do_sample:
        return Greedy()
    return Seeded(noise) if options.acceptance == "seeded" else Rejection()


def _padding_mask(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The prompt's mask if it hides something of these very ids."""
    mask: torch.Tensor | None = model_kwargs.get("attention_mask")
    if mask is None or mask.shape != input_ids.shape or bool(mask.all()):
        return None
    return mask


def _failure_counter(call: Call) -> Callable[[str], None]:
    def count(reason: str) -> None:
        call.metrics.fallback_reasons[reason] += 1
        call.state.warn_once(reason, "%s. The call goes on without drafts; its output is not affected.")

    return count
