"""What a user can choose, as small frozen dataclasses that are checked when made.

Knows nothing of models or of transformers.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from hfspec.errors import ConfigError, UnknownOptionError

Acceptance = Literal["seeded", "rejection"]
BudgetPolicy = Literal["measured", "ratio", "fixed"]
OnUnsupported = Literal["warn", "raise"]

#: Keywords that hfspec takes out of a `generate()` call before Hugging Face sees it.
CALL_OPTIONS = ("draft", "draft_budget", "acceptance", "speculate", "on_unsupported")

#: Above this many draft tokens a round rarely pays on any hardware.
DEFAULT_MAX_TOKENS = 16
#: No target reads more than this many tokens at the price of a few; a larger budget is a slip.
MAX_TOKENS = 256


def _check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{option}={value!r} is not known; choose one of {known}.")


@dataclass(frozen=True)
class DraftBudget:
    """How many tokens the draft source may propose in one round.

    Args:
        min_tokens: never fewer than this (0 lets a policy switch speculation off).
        max_tokens: never more than this.
        policy: `"measured"` picks what the measured times and acceptance make fastest, 0 included;
            `"ratio"` adds one token after a round with acceptance above 0.8 and takes one away
            below 0.4; `"fixed"` always asks for `max_tokens`.

    Raises:
        ConfigError: if the numbers or the policy cannot work.
    """

    min_tokens: int = 0
    max_tokens: int = DEFAULT_MAX_TOKENS
    policy: BudgetPolicy = "measured"

    def __post_init__(self) -> None:
        _check_choice("policy", self.policy, get_args(BudgetPolicy))
        for name in ("min_tokens", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"DraftBudget({name}={value!r}): a number of tokens is a whole number, 0 or more.")
        if self.max_tokens > MAX_TOKENS:
            raise ConfigError(
                f"DraftBudget(max_tokens={self.max_tokens}): so many draft tokens a round cannot pay; pass at most "
                f"{MAX_TOKENS}, or 'auto', which measures how many do."
            )
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"DraftBudget(min_tokens={self.min_tokens}, max_tokens={self.max_tokens}): "
                "the least is above the most; lower min_tokens or raise max_tokens."
            )

    @classmethod
    def parse(cls, value: "str | int | DraftBudget") -> "DraftBudget":
        """Read what a user may pass as `draft_budget`: `"auto"`, a policy's name, a number, or a `DraftBudget`.

        A number may be written in digits, as command lines have it.
        """
        if isinstance(value, DraftBudget):
            return value
        if value == "auto":
            return cls()
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(max_tokens=value, policy="fixed")
        if isinstance(value, str) and value in get_args(BudgetPolicy) and value != "fixed":
            return cls(policy=cast(BudgetPolicy, value))
        raise ConfigError(
            f"draft_budget={value!r} is not known; pass 'auto', 'ratio', a whole number of tokens a round, "
            "or hfspec.DraftBudget(min_tokens=..., max_tokens=..., policy=...)."
        )


@dataclass(frozen=True)
class Options:
    """How calls are to be sped up: set by `patch()`, changed for one call by `generate()` keywords.

    Args:
        budget: draft tokens a round.
        acceptance: how a sampled call decides on draft tokens. `"seeded"` gives the very tokens that
            plain sampling gives under the same seed; `"rejection"` keeps the distribution of the tokens, not
            the tokens (Leviathan et al. 2022, arXiv 2211.17192). Greedy calls have nothing to choose.
        speculate: `False` runs plain.
        on_unsupported: what to do with a call that cannot be sped up: `"warn"` once and run plain, or `"raise"`.
    """

    budget: DraftBudget = DraftBudget()
    acceptance: Acceptance = "seeded"
    speculate: bool = True
    on_unsupported: OnUnsupported = "warn"

    def __post_init__(self) -> None:
        _check_choice("acceptance", self.acceptance, get_args(Acceptance))
        _check_choice("on_unsupported", self.on_unsupported, get_args(OnUnsupported))
        if not isinstance(self.speculate, bool):
            raise ConfigError(f"speculate={self.speculate!r}: pass True or False.")


def reject_unknown(keywords: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise `UnknownOptionError` for the first of `keywords`, naming the nearest of `known`."""
    known = tuple(known)
    for keyword in keywords:
        raise UnknownOptionError(f"{where} got an unknown keyword {keyword!r}; {_nearest(keyword, known)}.")


def reject_misspelt(keywords: Iterable[str], known: Iterable[str], where: str) -> None:
    """Like `reject_unknown`, but only for keywords that look like one of `known` spelt wrongly."""
    known = tuple(known)
    reject_unknown(
        (word for word in keywords if difflib.get_close_matches(word, known, n=1, cutoff=0.75)), known, where
    )


def _nearest(keyword: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(keyword, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
