"""Options are checked when made, and say what would work."""

import pytest

from hfspec import ConfigError, DraftBudget, UnknownOptionError
from hfspec.config import CALL_OPTIONS, Options, reject_misspelt, reject_unknown


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", DraftBudget()),
        ("measured", DraftBudget()),
        ("ratio", DraftBudget(policy="ratio")),
        (0, DraftBudget(max_tokens=0, policy="fixed")),
        (5, DraftBudget(max_tokens=5, policy="fixed")),
        ("12", DraftBudget(max_tokens=12, policy="fixed")),
        (DraftBudget(2, 3), DraftBudget(2, 3)),
    ],
)
def test_a_budget_is_read(given, expected):
    """A word, a number or a `DraftBudget` says how much to draft."""
    assert DraftBudget.parse(given) == expected


@pytest.mark.parametrize("given", ["fast", "fixed", "", "-1", "2.5", "²", -1, 2.5, True, None, [4]], ids=repr)
def test_a_budget_that_cannot_work_is_refused(given):
    """Everything else raises and names the value."""
    with pytest.raises(ConfigError, match=r"draft_budget|DraftBudget"):
        DraftBudget.parse(given)


@pytest.mark.parametrize(
    "arguments", [{"min_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": True}, {"min_tokens": 4, "max_tokens": 3}]
)
def test_a_budgets_numbers_are_checked(arguments):
    """Numbers of tokens are whole, not negative, and in order."""
    with pytest.raises(ConfigError, match="DraftBudget"):
        DraftBudget(**arguments)


def test_a_budgets_policy_is_checked():
    """An unknown policy names the known ones."""
    with pytest.raises(ConfigError, match="'measured', 'ratio', 'fixed'"):
        DraftBudget(policy="adaptive")


@pytest.mark.parametrize("arguments", [{"acceptance": "block"}, {"on_unsupported": "x"}, {"speculate": 1}])
def test_options_are_checked(arguments):
    """Each option names the value that cannot work."""
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        Options(**arguments)


def test_options_are_frozen():
    """Options of one call cannot be changed by another."""
    with pytest.raises(AttributeError):
        Options().speculate = False


def test_an_unknown_keyword_names_the_nearest_or_all():
    """Close words are suggested; for others all known ones are listed."""
    with pytest.raises(UnknownOptionError, match="did you mean 'draft_budget'"):
        reject_unknown(["draft_bugdet"], CALL_OPTIONS, "here")
    with pytest.raises(UnknownOptionError, match="known are draft, draft_budget"):
        reject_unknown(["zebra"], CALL_OPTIONS, "here")
    reject_unknown([], CALL_OPTIONS, "here")


@pytest.mark.parametrize("word", ["temperature", "assistant_model", "stopping_criteria", "token_type_ids", "streamer"])
def test_words_of_the_host_are_not_taken_for_misspelt(word):
    """Keywords that merely belong to somebody else pass."""
    reject_misspelt([word], CALL_OPTIONS, "here")
