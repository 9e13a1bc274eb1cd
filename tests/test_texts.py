"""`Texts` is what lists of ids would be, whatever is done to it."""

from itertools import count
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

import hfspec.texts
from hfspec import Outcome, Texts
from hfspec.rounds import Outcomes

PAD = -7
#: What stands in a row's place where it has committed fewer tokens than another.
ANYTHING = -9
STEPS = ("all", "one", "grow", "grow", "select", "write")


class Lists:
    """The same in plain Python, every row of the batch from the beginning; and what is done to both."""

    def __init__(self, num_rows: int, num_prompt: int) -> None:
        self.new_ids = count(1)
        self.num_prompt = num_prompt
        self.ids = [[next(self.new_ids) for _ in range(num_prompt)] for _ in range(num_rows)]
        self.rows = list(range(num_rows))
        self.has_ended = [False] * num_rows
        self.texts = Texts(torch.tensor(self.ids))

    @property
    def at_work(self) -> list[list[int]]:
        return [self.ids[row] for row in self.rows]

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.at_work]

    def append_to_all(self) -> None:
        new = [next(self.new_ids) for _ in self.rows]
        for ids, token in zip(self.at_work, new, strict=True):
            ids.append(token)
        self.texts.append(torch.tensor(new))

    def append_to(self, row: int) -> None:
        token = next(self.new_ids)
        self.at_work[row].append(token)
        self.texts.append(torch.tensor([token]), row)

    def grow(self, counts: list[int], ended: list[bool], num_spare: int, is_on_device: bool) -> None:
        tokens = torch.full((len(counts), max(counts) + num_spare), ANYTHING)
        outcomes = []
        for row, (number, has_ended) in enumerate(zip(counts, ended, strict=True)):
            new = [next(self.new_ids) for _ in range(number)]
            self.at_work[row].extend(new)
            tokens[row, :number] = torch.tensor(new)
            outcomes.append(Outcome(number - 1, tuple(range(number - 1)), tuple(new), has_ended))
            self.has_ended[row] |= has_ended
        self.texts.grow(tokens, Outcomes(tuple(outcomes), torch.tensor(counts) if is_on_device else None))

    def select(self, kept: list[int]) -> None:
        self.rows = [self.rows[row] for row in kept]
        self.has_ended = [self.has_ended[row] for row in kept]
        self.texts.select(kept)

    def write(self, row: int, at: int) -> None:
        token = next(self.new_ids)
        self.at_work[row][at] = token
        lent = self.texts.together()
        lent[row, at] = token
        self.texts.put_back(lent)

    def assert_same(self, counts: list[int]) -> None:
        """Every view of the texts, the last `counts` ids of each row among them."""
        texts, lengths = self.texts, self.lengths
        assert (texts.rows, texts.lengths, texts.has_ended) == (self.rows, lengths, self.has_ended)
        assert texts.ends(torch.device("cpu")).tolist() == lengths
        assert texts.are_even == (len(set(lengths)) == 1)
        assert texts.num_prompt == self.num_prompt
        assert (texts.num_new, texts.num_committed) == (max(lengths) - self.num_prompt, min(lengths) - self.num_prompt)
        for row, ids in enumerate(self.at_work):
            assert texts.of(row).tolist() == [ids]
            assert texts.ids(row, self.num_prompt) == ids[self.num_prompt :]
        if texts.are_even:
            assert texts.together().tolist() == self.at_work
        for on_device in (None, torch.tensor(counts)):
            last = texts.last(counts, on_device)
            assert last.shape == (len(counts), max(counts))
            for row, number in enumerate(counts):
                assert last[row, :number].tolist() == self.at_work[row][lengths[row] - number :]
        assert texts.all_lengths() == [len(ids) for ids in self.ids]
        longest = max(map(len, self.ids))
        assert texts.whole(PAD).tolist() == [ids + [PAD] * (longest - len(ids)) for ids in self.ids]


@given(data=st.data())
def test_texts_are_lists_of_ids(data):
    """Tokens for one row or all, rounds of uneven gains, rows that leave, ids that somebody writes over."""
    with mock.patch.object(hfspec.texts, "_MIN_ROOM", data.draw(st.integers(1, 3))):  # so that the buffer must grow
        lists = Lists(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)))
        for step in data.draw(
            st.lists(st.sampled_from(["all", "one", "grow", "grow", "select", "write"]), max_size=12)
        ):
            num_rows, is_even = len(lists.rows), len(set(lists.lengths)) == 1
            row = data.draw(st.integers(0, num_rows - 1))
            if step == "one":
                lists.append_to(row)
            elif step == "grow":
                counts = data.draw(st.lists(st.integers(1, 5), min_size=num_rows, max_size=num_rows))
                ended = data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
                lists.grow(counts, ended, data.draw(st.integers(0, 3)), data.draw(st.booleans()))
            elif step == "select":
                lists.select(sorted(data.draw(st.sets(st.integers(0, num_rows - 1), min_size=1))))
            elif step == "all" and is_even:
                lists.append_to_all()
            elif step == "write" and is_even:
                lists.write(row, data.draw(st.integers(0, lists.lengths[0] - 1)))
            counts = [data.draw(st.integers(0, length)) for length in lists.lengths]
            lists.assert_same(counts)


def test_the_prompt_is_left_alone():
    """The caller's ids are copied, once; what is written goes into the copy."""
    ids = torch.tensor([[1, 2], [3, 4]])
    texts = Texts(ids)
    texts.append(torch.tensor([5, 6]))
    texts.of(0)[0, 0] = 9
    assert ids.tolist() == [[1, 2], [3, 4]]
    assert texts.whole(PAD).tolist() == [[9, 2, 5], [3, 4, 6]]


def test_a_row_that_has_left_keeps_its_text():
    """Whatever is written behind it in its old place."""
    texts = Texts(torch.tensor([[1], [2]]))
    left = texts.of(0)
    texts.select([1])
    left.fill_(ANYTHING)
    texts.append(torch.tensor([3]))
    assert texts.whole(PAD).tolist() == [[1, PAD], [2, 3]]


def test_tokens_are_committed_without_a_copy_of_the_text():
    """The buffer is copied a few times in a thousand tokens, not for each."""
    texts, buffers = Texts(torch.tensor([[1]])), set()
    for token in range(1000):
        texts.append(torch.tensor([token]))
        buffers.add(texts.of(0).data_ptr())
    assert len(buffers) <= 5
