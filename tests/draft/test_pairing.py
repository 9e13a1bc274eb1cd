"""Whether token ids mean the same to draft and target."""

import pytest

from hfspec.draft.pairing import pairing_problem
from tests.models import build


class Vocabulary:
    """Stands in for a tokenizer."""

    def __init__(self, tokens, name=""):
        self._vocab = {token: index for index, token in enumerate(tokens)}
        self.name_or_path = name

    def get_vocab(self):
        return self._vocab


WORDS = [f"word{i}" for i in range(100)]


def problem(target, draft, target_size=100, draft_size=100):
    configs = build(vocab_size=target_size).config, build(vocab_size=draft_size).config
    return pairing_problem(*configs, target, draft)


def test_one_tokenizer_is_no_problem():
    """Equal content is fine, whatever the sizes of the embeddings are padded to."""
    assert problem(Vocabulary(WORDS), Vocabulary(WORDS), draft_size=160) is None


def test_a_few_other_special_tokens_are_no_problem():
    """Nine tokens in ten must agree."""
    assert problem(Vocabulary(WORDS), Vocabulary([*WORDS[:95], "<a>", "<b>"])) is None


def test_permuted_ids_are_found():
    """Equal size and equal tokens with other ids are another vocabulary; the message shows a token."""
    reason = problem(Vocabulary(WORDS, "big"), Vocabulary(WORDS[::-1], "small"))
    assert "small" in reason
    assert "big" in reason
    assert "'word99' is 0 in the draft, 99 in the target" in reason


def test_a_token_that_the_target_lacks_is_named():
    """The message says so where the target has no such token."""
    assert "not there in the target" in problem(Vocabulary(WORDS), Vocabulary([f"other{i}" for i in range(100)]))


@pytest.mark.parametrize(
    ("sizes", "fits"), [((100, 100), True), ((1000, 1016), True), ((100, 150), False), ((150, 100), False)]
)
def test_without_tokenizers_the_sizes_decide(sizes, fits):
    """Sizes that padding explains fit; others are another tokenizer."""
    assert (problem(None, None, *sizes) is None) is fits
    assert (problem(Vocabulary(WORDS), None, *sizes) is None) is fits
