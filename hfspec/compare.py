"""`hfspec.verify`: run a call both ways and say whether the tokens are the same, and if not, why.

Two vanilla forwards over the same text (token by token, or at once) already differ by rounding. A
difference in the output is a near-tie if the two tokens' scores lie closer together than such forwards do;
where these differ by more than rounding can, that excuses nothing.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hfspec.config import CALL_OPTIONS
from hfspec.errors import ConfigError
from hfspec.host import releases
from hfspec.host.trial import arithmetic, difference, rounding
from hfspec.lookalike import call_options
from hfspec.patch import is_patched, options_of
from hfspec.sampling.devices import unmoved
from hfspec.sampling.noise import BatchNoise

#: Arguments that a run may change.
_LEFT_CHANGED = (*releases.CACHE_KEYS, "logits_processor", "stopping_criteria", "encoder_outputs")


@dataclass(frozen=True)
class Verdict:
    """The comparison of two outputs of one call.

    Attributes:
        identical: every token is the same.
        first_difference: index of the first new token that differs.
        row: the row of the batch that this is about; of several that differ, the one with the worst verdict.
        margin: by how much plain decoding preferred its token there, in processed log-scores (noise
            included when sampling).
        tolerance: how far two vanilla forwards over that text are apart, but no more than rounding can explain in
            numbers of the model's dtype; times two (either token may move).
        near_tie: whether the margin is within the tolerance; `None` if it could not be worked out.
    """

    identical: bool
    first_difference: int | None = None
    margin: float | None = None
    tolerance: float | None = None
    near_tie: bool | None = None
    row: int = 0

    def summary(self) -> str:
        """One line for people."""
        if self.identical:
            return "same tokens"
        row = f"row {self.row}, " if self.row else ""
        where = f"{row}first difference at new token {self.first_difference}"
        if self.near_tie is None or self.margin is None or self.tolerance is None:
            return f"{where}; not explained"
        verdict = "a near-tie" if self.near_tie else "NOT a near-tie"
        return f"{where}: {verdict} (margin {self.margin:.3g}, rounding {self.tolerance:.3g})"


def verify(model: PreTrainedModel, inputs: Any, *, seed: int = 0, **generate_kwargs: Any) -> Verdict:
    """Run a patched model's call with and without speculation and compare the tokens.

    Args:
        inputs: token ids `[rows, length]`, or a mapping such as a tokenizer returns.
        seed: for sampled calls; the random state is left as it was.
        generate_kwargs: as for `generate()`. A cache, processors and criteria are copied where they can be, so
            that each run begins with the same and yours stay as they are; a streamer is left out.

    Raises:
        PatchError: the model is not patched.
        ConfigError: `acceptance="rejection"` with sampling keeps the distribution of the tokens, not the tokens.
    """
    acceptance = call_options(model, generate_kwargs).get("acceptance", options_of(model).acceptance)
    if acceptance == "rejection" and _is_sampled(model, generate_kwargs):
        raise ConfigError(
            "verify() compares tokens; acceptance='rejection' keeps only their distribution. Use 'seeded'."
        )
    call = _inputs(inputs) | generate_kwargs
    plain_ids = _seeded_generate(model, seed, call | {"speculate": False})
    speculative_ids = _seeded_generate(model, seed, call)
    return explain_difference(
        model, inputs, _sequences(plain_ids), _sequences(speculative_ids), seed=seed, **generate_kwargs
    )


def explain_difference(
    model: PreTrainedModel,
    inputs: Any,
    plain_ids: torch.Tensor,
    other_ids: torch.Tensor,
    *,
    seed: int = 0,
    **generate_kwargs: Any,
) -> Verdict:
    """Compare two outputs `[rows, length]` of one call, and measure the margin at the first difference.

    Args:
        model: patched or not.
        plain_ids: from plain `generate()`, with this `seed` set before if sampled.

    Returns:
        The verdict on the row that is worst off.
    """
    return max(explain_rows(model, inputs, plain_ids, other_ids, seed=seed, **generate_kwargs), key=_badness)


def explain_rows(
    model: PreTrainedModel,
    inputs: Any,
    plain_ids: torch.Tensor,
    other_ids: torch.Tensor,
    *,
    seed: int = 0,
    **generate_kwargs: Any,
) -> list[Verdict]:
    """`explain_difference` for each row of a batch."""
    shortest = min(plain_ids.shape[1], other_ids.shape[1])
    num_prompt = _num_prompt(model, _inputs(inputs))
    unequal = plain_ids[:, :shortest] != other_ids[:, :shortest]
    verdicts = []
    for row, differs in enumerate(unequal):
        if not bool(differs.any()):
            verdicts.append(Verdict(identical=True, row=row))
            continue
        index = int(differs.nonzero()[0])
        margin, tolerance = _evidence(
            model, inputs, plain_ids, row, index, int(other_ids[row, index]), seed, _without_ours(generate_kwargs)
        )
        near_tie = None if margin is None or tolerance is None else margin <= tolerance
        verdicts.append(Verdict(False, index - num_prompt, margin, tolerance, near_tie, row))
    if plain_ids.shape[1] != other_ids.shape[1] and not bool(unequal.any()):
        # One stopped where the other went on: no rounding does that.
        return [Verdict(False, shortest - num_prompt, near_tie=False, row=row) for row in range(len(verdicts))]
    return verdicts


def _badness(verdict: Verdict) -> int:
    return 0 if verdict.identical else {True: 1, None: 2, False: 3}[verdict.near_tie]


def _evidence(
    model: PreTrainedModel,
    inputs: Any,
    plain_ids: torch.Tensor,
    row: int,
    index: int,
    other_id: int,
    seed: int,
    generate_kwargs: dict[str, Any],
) -> tuple[float | None, float | None]:
    """Margin and tolerance at `plain_ids[row, index]`, where the other output has `other_id`."""
    call = _inputs(inputs) | generate_kwargs
    num_prompt = _num_prompt(model, call)
    for name in ("max_length", "max_time"):
        call.pop(name, None)
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = {"speculate": False} if is_patched(model) else {}
    again = _seeded_generate(model, seed, call | details | plain | {"max_new_tokens": index - num_prompt + 1})
    plain_id = int(plain_ids[row, index])
    if int(_sequences(again)[row, index]) != plain_id:  # not reproducible: nothing can be said
        return None, None
    preference = again.scores[-1][row].double()
    temperature = 1.0
    if _is_sampled(model, generate_kwargs):
        with _seeded(model, seed):
            noise = BatchNoise(len(again.scores[-1])).share().peek(again.scores[-1], position=index - num_prompt)
        preference = preference - noise[row].double().log()
        config = generate_kwargs.get("generation_config") or model.generation_config
        temperature = generate_kwargs.get("temperature", config.temperature) or 1.0
    margin = float(preference[plain_id] - preference[other_id])

    prefix = plain_ids[:, :index]
    if model.config.is_encoder_decoder:
        at_once = _inputs(inputs) | {"decoder_input_ids": prefix}
    elif "input_ids" in call:
        at_once = _inputs(inputs) | {"input_ids": prefix, "attention_mask": _extended_mask(call, prefix)}
    else:  # the prompt came as embeddings: nothing can be put behind it
        return margin, None
    whole = _seeded_generate(model, seed, at_once | details | plain | {"max_new_tokens": 1, "do_sample": False})
    at_once, one_by_one = whole.logits[0][row], again.logits[-1][row]
    # What two forwards differ by may be more than rounding: a quantiser's steps, a mistake.
    possible = rounding(one_by_one, arithmetic(model, at_once)[1])
    apart = min(float(difference(at_once, one_by_one)), float(possible))
    return margin, 2 * apart / min(1.0, temperature)


def _num_prompt(model: PreTrainedModel, call: dict[str, Any]) -> int:
    """Tokens of the outputs that were there before the first new one."""
    if model.config.is_encoder_decoder:
        given = call.get("decoder_input_ids")
        return 1 if given is None else int(given.shape[1])
    return int(call["input_ids"].shape[1]) if "input_ids" in call else 0


def _is_sampled(model: PreTrainedModel, generate_kwargs: dict[str, Any]) -> bool:
    config = generate_kwargs.get("generation_config") or model.generation_config
    return bool(generate_kwargs.get("do_sample", config.do_sample))


def _seeded_generate(model: PreTrainedModel, seed: int, call: dict[str, Any]) -> Any:
    """Run the call on copies of what runs leave traces in: caches, processors, criteria. Nothing is streamed."""
    generate: Any = model.generate
    own = {name: _copied(value) if name in _LEFT_CHANGED else value for name, value in call.items()}
    own.pop("streamer", None)
    with _seeded(model, seed):
        return generate(**own)


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return type(value)(_copied(each) for each in value)
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever a processor of somebody else's raises when copied: then it serves all runs
        return value


def _inputs(inputs: Any) -> dict[str, Any]:
    return dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}


def _sequences(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.sequences


def _without_ours(generate_kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in generate_kwargs.items() if name not in CALL_OPTIONS}


def _extended_mask(call: dict[str, Any], prefix: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prefix)
    given = call.get("attention_mask")
    if given is not None:
        mask[:, : given.shape[1]] = given.repeat_interleave(len(mask) // len(given), dim=0)
    return mask


@contextmanager
def _seeded(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Begin with `seed`; afterwards the generators of all the model's devices, of whatever type, are as before."""
    with ExitStack() as stack:
        for device in {each.device for each in model.parameters() if each.device.type not in ("cpu", "meta")}:
            stack.enter_context(unmoved(device))
        stack.enter_context(unmoved(torch.device("cpu")))
        torch.manual_seed(seed)
        yield
