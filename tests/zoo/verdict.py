"""One architecture's verdict: is every call the same with and without hfspec, and was it sped up?"""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hfspec
from hfspec.compare import explain_difference
from hfspec.host.verdicts import model_problem
from tests.models import Scripted
from tests.zoo.overrides import CALLS, ROWS_PER_TEXT, SCRIPTED
from tests.zoo.prompts import inputs
from tests.zoo.tiny import VOCAB, Species, build

EQUAL, PLAIN, VANILLA_FAILS, WRONG = "equal", "plain", "vanilla fails", "WRONG"
_NUM_NEW = 20
#: A text is varied enough to tell right from wrong with this many different tokens, in each row and on average.
_LEAST_DISTINCT, _MEAN_DISTINCT = 3, 7
#: How wide the weights are, and which: the first that gives varied texts is taken.
#: Greatest difference of logits that is rounding, in parts of their spread: float32 gives 1e-5 or less.
_ROUNDING = 1e-3
_ATTEMPTS = [(gain, seed) for seed in range(6) for gain in (2.0, 0.5, 4.0, 1.0)]


@dataclass(frozen=True)
class Mode:
    """One way to call `generate()`: every pair of factors comes together in some mode."""

    batch: int
    is_sampled: bool
    attn: str
    draft: str

    @property
    def is_looked_into(self) -> bool:
        """Whether logits are compared, too."""
        return not self.is_sampled and self.draft == "good"

    def __str__(self) -> str:
        rows = "one text" if self.batch == 1 else f"{self.batch} texts"
        return f"{rows}, {'sampled' if self.is_sampled else 'greedy'}, {self.attn}, {self.draft} draft"


MODES = [
    Mode(batch, is_sampled, attn, draft)
    for batch in (1, 3)
    for is_sampled, attn, draft in [
        (False, "eager", "good"),
        (True, "sdpa", "good"),
        (False, "sdpa", "bad"),
        (True, "eager", "bad"),
    ]
]


@dataclass(frozen=True)
class Row:
    """What the table says of one architecture."""

    species: Species
    one: str
    three: str
    note: str = ""


@dataclass(frozen=True)
class Result:
    """What a call gave: its tokens, the random state it left, what it warned of, and whether its numbers are sound."""

    tokens: torch.Tensor
    random_state: torch.Tensor
    warned: frozenset[str]
    logits: tuple[torch.Tensor, ...] | None = None

    @property
    def is_finite(self) -> bool:
        """Whether no logit is nan."""
        return not any(bool(torch.isnan(each).any()) for each in self.logits or ())

    def differences(self, other: "Result") -> str:
        """What differs in another result, or nothing."""
        found = []
        if not torch.equal(self.tokens, other.tokens):
            found.append("other tokens")
        elif not torch.equal(self.random_state, other.random_state):
            found.append("another random state")
        if self.logits and other.logits and not found and (gap := _gap(self.logits, other.logits)) > _ROUNDING:
            found.append(f"other logits (by {gap:.2g} of their spread)")
        if other.warned - self.warned:
            found.append(f"new warnings: {sorted(other.warned - self.warned)}")
        return ", ".join(found)


def examine(species: Species, modes: Sequence[Mode] = MODES) -> Row:
    """Run every mode unpatched and patched."""
    try:
        zoo = Specimen(species)
    except Exception as error:
        reason = f"{VANILLA_FAILS}: {_said(error)}"
        return Row(species, reason, reason)
    verdicts = {batch: zoo.verdict([mode for mode in modes if mode.batch == batch]) for batch in (1, 3)}
    return Row(species, verdicts[1], verdicts[3], "; ".join(zoo.notes))


class Specimen:
    """A model with its two drafts, and the calls made on them."""

    def __init__(self, species: Species) -> None:
        self.species = species
        self.notes: list[str] = []
        self.accepted = self.drafted = 0
        self._eos: dict[bool, list[int]] = {}
        self.model = self._varied_model()
        self.drafts = {"good": noisy_copy(self.model), "bad": build(species, 1000, torch.float32, self.gain)}

    def verdict(self, modes: Sequence[Mode]) -> str:
        """Of the modes together."""
        ways: dict[str, list[Mode]] = {}
        for mode in modes:
            ways.setdefault(self._try(mode), []).append(mode)
        wrong = [f"{way} [{'; '.join(map(str, those))}]" for way, those in ways.items() if way.startswith(WRONG)]
        if wrong:
            return " / ".join(wrong)
        if len(ways) == 1:
            return next(iter(ways))
        for way, those in ways.items():
            if way != EQUAL:
                self.notes.append(f"{'; '.join(map(str, those))}: {way}")
        return EQUAL if EQUAL in ways else next(way for way in ways if way.startswith(PLAIN))

    def _try(self, mode: Mode) -> str:
        for dtype in (torch.float64, torch.float32):
            for model in (self.model, *self.drafts.values()):
                model.to(dtype)
                set_attention(model, mode.attn)
            try:
                call = self._call(mode, dtype)
                plain = run(self.model, call, wants_logits=True)
                if plain.is_finite:
                    break
                failure = "its numbers are not finite"
            except Exception as error:
                failure = _said(error)
        else:
            return f"{VANILLA_FAILS}: {failure}"
        return self._compare(mode, call, plain)

    def _compare(self, mode: Mode, call: dict[str, Any], plain: Result) -> str:
        try:
            with hfspec.patched(self.model, self._draft(mode, plain), draft_budget=3):
                fast = run(self.model, call, wants_logits=mode.is_looked_into)
                last = hfspec.stats(self.model).last
        except Exception as error:
            return f"{WRONG}: raises {_said(error)}"
        differences = plain.differences(fast)
        if differences:
            return f"{WRONG}: {differences}{self._near_tie(mode, call, plain, fast)}"
        if last.fallback_reason is not None:
            return f"{PLAIN}: {last.fallback_reason}"
        if not last.drafted_tokens:
            return f"{PLAIN}: nothing was drafted, for no reason given"
        self.drafted += last.drafted_tokens
        self.accepted += last.accepted_tokens
        return EQUAL

    def _draft(self, mode: Mode, plain: Result) -> Any:
        """A model of the same kind or, where that cannot draft, a source that knows what vanilla writes."""
        draft = self.drafts[mode.draft]
        if self.species.model_type not in SCRIPTED and model_problem(draft.config) is None:
            return draft
        return Scripted(plain.tokens, [2, 0, 3] if mode.draft == "good" else [0], vocab=VOCAB)

    def _near_tie(self, mode: Mode, call: dict[str, Any], plain: Result, fast: Result) -> str:
        if mode.batch != 1 or "input_ids" not in call or self.model.config.is_encoder_decoder:
            return ""
        more = dict(call)
        ids = {name: more.pop(name) for name in ("input_ids", "attention_mask")}
        return f" ({explain_difference(self.model, ids, plain.tokens, fast.tokens, **more).summary()})"

    def _call(self, mode: Mode, dtype: torch.dtype) -> dict[str, Any]:
        """`generate()`'s keywords; three texts end at different steps."""
        call = inputs(self.species, mode.batch, dtype) | self.species.override(CALLS, {})
        call |= {"max_new_tokens": _NUM_NEW, "do_sample": mode.is_sampled}
        if mode.batch > 1 and self.species.model_type not in ROWS_PER_TEXT:
            if mode.is_sampled not in self._eos:
                self._eos[mode.is_sampled] = _some_ends(run(self.model, call).tokens)
            call["eos_token_id"] = self._eos[mode.is_sampled]
        return call

    def _varied_model(self) -> Any:
        """The first model whose greedy texts do not go in circles, or else the best."""
        best: tuple[float, Any, float] | None = None
        for gain, seed in _ATTEMPTS:
            model = build(self.species, seed, torch.float32, gain)
            variety = min(self._variety(model, batch) for batch in (1, 3))
            if best is None or variety > best[0]:
                best = (variety, model, gain)
            if variety >= 1:
                break
        assert best is not None
        if best[0] < 1:
            self.notes.append("its texts repeat themselves")
        self.gain = best[2]
        return best[1]

    def _variety(self, model: Any, batch: int) -> float:
        call = inputs(self.species, batch, torch.float32) | self.species.override(CALLS, {})
        result = run(model, call | {"max_new_tokens": _NUM_NEW, "do_sample": False})
        counts = [len(set(map(str, row[-_NUM_NEW:].tolist()))) for row in result.tokens]
        return min(min(counts) / _LEAST_DISTINCT, sum(counts) / len(counts) / _MEAN_DISTINCT)


def run(model: Any, call: dict[str, Any], wants_logits: bool = False) -> Result:
    settings = copy.deepcopy(model.generation_config)  # some classes write a call's keywords into it
    try:
        return _result(model, call, wants_logits)
    finally:
        model.generation_config = settings


def _result(model: Any, call: dict[str, Any], wants_logits: bool) -> Result:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens = model.generate(**copy.copy(call))
    state = torch.get_rng_state()
    logits = None
    if wants_logits:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            full = model.generate(**copy.copy(call), return_dict_in_generate=True, output_logits=True)
        logits = getattr(full, "logits", None)
    return Result(_ids(tokens), state, frozenset(str(each.message) for each in caught), logits)


def _gap(logits: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The greatest difference between logits, in parts of their spread: tiny models' tokens may hide it."""
    one, other = torch.stack(list(logits)), torch.stack(list(others))
    return float((one - other).abs().max() / one.std())


def _ids(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.sequences


def _some_ends(tokens: torch.Tensor) -> list[int]:
    """Two tokens that end the first two rows, at different steps."""
    ends = []
    for row, step in zip(tokens[:2, -_NUM_NEW:].tolist(), (5, 11), strict=True):
        fresh = [index for index in range(step, _NUM_NEW) if row[index] not in row[:index]]
        ends.append(row[fresh[0] if fresh else step])
    return ends


def set_attention(model: Any, attn: str) -> None:
    """Where an architecture, or a part of it, has but one kind of attention, that one stays."""
    try:
        model.set_attn_implementation(attn)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise


def noisy_copy(model: Any, scale: float = 0.02) -> Any:
    """A good draft: some of its tokens are the model's own, others not."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1000)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1 and weight.numel():
                weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    return draft


def _said(error: Exception) -> str:
    """The error's first line, short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
