"""`Rows` against a model of Python lists: positions, mask and cache content agree after any operations."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from hfspec.cache.ledger import SpeculativeCache, SpeculativeLayer, SpeculativeSlidingLayer
from hfspec.cache.rows import Rows
from hfspec.drafts import Draft
from hfspec.rounds import Outcome, Outcomes
from tests.models import shared

WINDOW = 5
CPU = torch.device("cpu")
#: What stands in filled-up slots; no row may ever see it.
RUBBISH = -1


class Naive:
    """Rows of one cache, beside lists of the tokens that each has read: every forward writes what the lists say.

    Args:
        prompts: lengths of the rows' prompts, padded at the left to the longest.
        is_read: whether the cache holds the prompts already, as the target's does, or `Rows` is to open the forward.
        first: the positions that the rows begin at.
    """

    def __init__(self, prompts, counts_slots, has_window=False, is_read=True, first=0):
        self.cache = SpeculativeCache()
        self.cache.layers = [SpeculativeLayer()] + [SpeculativeSlidingLayer(WINDOW)] * has_window
        self.counts_slots = counts_slots
        self.next_token = 0
        self.texts = [[] for _ in prompts]
        self.first = first
        tokens = self.new_tokens(prompts)
        if is_read:
            self.write(self.filled(tokens, at_the_end=True))
            mask = torch.tensor([[0] * (max(prompts) - length) + [1] * length for length in prompts])
            positions = [first + length for length in prompts]
            self.rows = Rows(self.cache, positions, CPU, mask, counts_slots)
        else:
            self.rows = Rows(self.cache, [first] * len(prompts), CPU, counts_slots=counts_slots)
            self.open(tokens, to_the_right=True)
        self.add(tokens)
        self.check()

    def new_tokens(self, lengths):
        """Tokens that stand nowhere else, one list a row."""
        tokens = []
        for length in lengths:
            tokens.append(list(range(self.next_token, self.next_token + length)))
            self.next_token += length
        return tokens

    def filled(self, tokens, at_the_end=False):
        width = max(map(len, tokens))
        missing = [[RUBBISH] * (width - len(each)) for each in tokens]
        return [fill + each if at_the_end else each + fill for each, fill in zip(tokens, missing, strict=True)]

    def write(self, ids):
        keys = torch.tensor(ids, dtype=torch.float64)[:, None, :, None].expand(-1, 2, -1, 3)
        return [self.cache.update(keys, -keys, index)[0] for index in range(len(self.cache.layers))]

    def add(self, tokens):
        for text, each in zip(self.texts, tokens, strict=True):
            text += each

    def open(self, tokens, to_the_right=False):
        """Open a forward over these tokens, look at what it is given, and run it."""
        lengths, width = list(map(len, tokens)), max(map(len, tokens))
        before = [self.first + len(text) for text in self.texts]
        num_slots = self.rows.num_slots
        mask, position_ids = self.rows.open(lengths, to_the_right)
        assert position_ids.shape == (len(lengths), width)
        for row, length in enumerate(lengths):
            real = slice(width - length, width) if to_the_right else slice(0, length)
            assert position_ids[row, real].tolist() == list(range(before[row], before[row] + length))
            assert int(position_ids[row].max()) < before[row] + length, "a filling beyond the row's positions"
            if mask is not None:
                assert mask.shape == (len(lengths), num_slots + width)
                new = [0] * width
                new[real] = [1] * length
                assert mask[row, num_slots:].tolist() == new
        assert mask is not None or min(lengths) == width
        self.write(self.filled(tokens, to_the_right))

    def check(self):
        """What the rows may see is what they have read, in order, and nothing else."""
        rows, mask = self.rows, self.rows._mask
        assert rows.positions == [self.first + len(text) for text in self.texts]
        assert all(layer.length == rows.num_slots for layer in self.cache.layers)
        if mask is None:
            mask = torch.ones(len(self.texts), rows.num_slots, dtype=torch.long)
        assert mask.shape == (len(self.texts), rows.num_slots)
        for layer in self.cache.layers:
            visible = layer.first_visible(layer.length)
            assert layer.start <= visible
            for row, text in enumerate(self.texts):
                seen = mask[row].nonzero()[:, 0]
                assert len(seen) == len(text)
                in_view = seen[seen >= visible]
                keys = layer.keys[row, :, in_view - layer.start]
                expected = torch.tensor(text[len(text) - len(in_view) :], dtype=torch.float64)
                assert torch.equal(keys, expected[None, :, None].expand_as(keys))
                assert torch.equal(layer.values[row, :, in_view - layer.start], -keys)
        if self.counts_slots:
            is_contiguous = mask.diff(dim=-1) >= 0
            assert is_contiguous.all(), "a hole between a row's tokens"

    def check_slots_are_few(self):
        longest = max(map(len, self.texts))
        assert self.rows.num_slots - longest <= max(32, self.rows.num_slots // 8)

    def round(self, lengths, kept):
        """A target's: read so many tokens a row and keep the first of them."""
        tokens = self.new_tokens(lengths)
        self.rows.checkpoint()
        self.open(tokens)
        self.rows.close(lengths, kept)
        self.add(each[:count] for each, count in zip(tokens, kept, strict=True))
        self.check()
        self.check_slots_are_few()

    def tree(self, parents, lengths, paths, has_ended):
        """A target's, over trees: read each row's root and nodes, and keep the root and the nodes of a path.

        Args:
            parents: one list a row, of as many nodes.
            lengths: how many of them each row has.
            paths: the nodes that are accepted.
            has_ended: of each row, whether its last accepted node ends the text, which leaves it unread.
        """
        width = 1 + len(parents[0])
        tokens = self.new_tokens([width] * len(parents))
        nodes = torch.tensor([each[1:] for each in tokens], dtype=torch.long).view(len(parents), width - 1)
        draft = Draft(nodes, torch.tensor(parents, dtype=torch.long).view(len(parents), width - 1)).cut(lengths)
        before = [self.first + len(text) for text in self.texts]
        self.rows.checkpoint()
        seen, position_ids = self.rows.open_tree(draft)
        handed_out = self.write(self.filled(tokens))
        for row, text in enumerate(self.texts):
            for state in range(1 + lengths[row]):
                on_path = [tokens[row][0], *(tokens[row][1 + node] for node in _path_to(state - 1, parents[row]))]
                assert position_ids[row, state] == before[row] + len(on_path) - 1
                for layer, keys in zip(self.cache.layers, handed_out, strict=True):
                    visible = seen["sliding_attention" if layer.is_sliding else "full_attention"][row, 0, state]
                    expected = (text + on_path)[-WINDOW:] if layer.is_sliding else text + on_path
                    assert keys[row, 0, visible, 0].tolist() == expected
        outcomes = [
            Outcome(len(path), tuple(path), tuple(range(max(1, len(path) + (not ended)))), ended)
            for path, ended in zip(paths, has_ended, strict=True)
        ]
        self.rows.close_round([width] * len(parents), Outcomes(tuple(outcomes)))
        kept = [
            [row_tokens[0], *(row_tokens[1 + node] for node in outcome.path)][: outcome.num_committed]
            for row_tokens, outcome in zip(tokens, outcomes, strict=True)
        ]
        self.add(kept)
        self.check()
        self.check_slots_are_few()

    def draft(self, unread, num_drafted, forgotten):
        """A draft model's: catch up, read drafted tokens one by one, and forget the last of them."""
        tokens = self.new_tokens(unread)
        self.open(tokens)
        self.rows.close(unread, unread)
        self.add(tokens)
        self.check()
        self.rows.checkpoint()
        for _ in range(num_drafted):
            tokens = self.new_tokens([1] * len(unread))
            self.open(tokens)
            self.rows.close([1] * len(unread), [1] * len(unread))
            self.add(tokens)
        self.check()
        self.rows.forget(forgotten)
        self.texts = [text[: len(text) - count] for text, count in zip(self.texts, forgotten, strict=True)]
        self.check()
        self.check_slots_are_few()

    def select(self, rows):
        self.rows.select(rows)
        self.texts = [self.texts[row] for row in rows]
        self.check()


def _path_to(node, parents):
    """The nodes from the root's child to this one; none for the root."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


ways = pytest.mark.parametrize(
    ("counts_slots", "has_window"), [(False, False), (True, False), (True, True)], ids=["blind", "counting", "windows"]
)


@ways
@pytest.mark.parametrize("is_read", [True, False], ids=["target", "draft"])
@given(data=st.data())
def test_any_operations_leave_what_was_read(counts_slots, has_window, is_read, data):
    """Rounds over chains and trees, drafts and rows that leave, in any order and number."""

    def counts(least, most, num_rows):
        return data.draw(st.lists(st.integers(least, most), min_size=num_rows, max_size=num_rows))

    prompts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    naive = Naive(prompts, counts_slots, has_window, is_read, first=data.draw(st.sampled_from([0, 11])))
    for step in data.draw(st.lists(st.sampled_from(["round", "tree", "draft", "select"]), max_size=12)):
        num_rows = len(naive.texts)
        if step == "round":
            lengths = counts(1, 7, num_rows)
            naive.round(
                lengths, [min(each, length) for each, length in zip(counts(1, 7, num_rows), lengths, strict=True)]
            )
        elif step == "tree":
            num_nodes = data.draw(st.integers(1, 9))
            parents = [[data.draw(st.integers(-1, node - 1)) for node in range(num_nodes)] for _ in range(num_rows)]
            lengths = counts(0, num_nodes, num_rows)
            lengths[data.draw(st.integers(0, num_rows - 1))] = num_nodes
            ends = [data.draw(st.integers(-1, length - 1)) for length in lengths]
            paths = [_path_to(end, each) for end, each in zip(ends, parents, strict=True)]
            naive.tree(
                parents, lengths, paths, data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
            )
        elif step == "draft":
            num_drafted = data.draw(st.integers(0, 4))
            naive.draft(counts(1, 3, num_rows), num_drafted, counts(0, num_drafted, num_rows))
        else:
            naive.select(data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, unique=True)))


@ways
@pytest.mark.parametrize("kept", [(1, 1), (6, 1), (1, 6), (3, 4)])
def test_hundreds_of_rounds(counts_slots, has_window, kept):
    """One row that always keeps more than another: the slots stay as few as the longest row needs, or nearly so."""
    naive = Naive([4, 7], counts_slots, has_window)
    for _ in range(150):
        naive.round([6, 6], kept)
    assert naive.rows.num_slots >= 7 + 150 * min(kept)


@ways
@pytest.mark.parametrize("path", [[], [0], [2, 4], [1, 3, 5]], ids=str)
def test_hundreds_of_trees(counts_slots, has_window, path):
    """What each row keeps is its path, wherever its nodes stood; the slots stay as few as the longest row needs."""
    naive = Naive([4, 7], counts_slots, has_window)
    parents = [-1, -1, -1, 1, 2, 3]
    for _ in range(60):
        naive.tree([parents, parents], [6, 6], [path, [2]], [False, False])
    assert naive.rows.num_slots >= 4 + 60 * (1 + len(path))


def test_a_path_that_stands_right_is_not_moved(monkeypatch):
    """The first nodes of a tree are where they belong: nothing is copied for them."""
    moves = []
    honest = SpeculativeCache.move
    monkeypatch.setattr(
        SpeculativeCache, "move", lambda self, *where: (moves.append(len(where[0])), honest(self, *where))
    )
    naive = Naive([3, 3], counts_slots=False)
    naive.tree([[-1, 0, 1], [-1, 0, 0]], [3, 3], [[0, 1, 2], [0, 1]], [False, False])
    assert moves == []
    naive.tree([[-1, 0, 1], [-1, 0, 0]], [3, 3], [[0, 1], [0, 2]], [False, False])
    naive.tree([[-1, -1, 1], [-1, -1, 0]], [3, 3], [[1, 2], [0, 2]], [False, False])
    assert moves == [1, 3]


def test_chains_need_no_trees_mask():
    """A clear error, not a puzzling one."""
    naive = Naive([3], counts_slots=False)
    with pytest.raises(ValueError, match="chains"):
        naive.rows.open_tree(Draft(torch.tensor([[5, 6]])))


def test_rows_at_one_pace_need_no_mask():
    """Prompts of one length that go on alike hide nothing, so no mask is made."""
    naive = Naive([3, 3], counts_slots=True, is_read=False)
    for _ in range(5):
        naive.round([4, 4], [2, 2])
    assert naive.rows.open([1, 1])[0] is None


def test_holes_are_borne_for_a_while_where_slots_do_not_count():
    """Moving rows costs a copy of the cache, so it waits until there are enough holes."""
    naive = Naive([3, 3], counts_slots=False)
    sizes = []
    for index in range(60):
        naive.round([4, 4], [4, 1] if index % 2 else [1, 4])
        sizes.append(naive.rows.num_slots - max(map(len, naive.texts)))
    assert max(sizes) > 20, "they were closed at once"
    assert any(after < before for before, after in pairwise(sizes)), "they were never closed"


def test_the_longest_row_that_leaves_frees_its_slots():
    """When short rows are left, slots that only a long row had needed go in time."""
    naive = Naive([100, 5], counts_slots=False)
    naive.select([1])
    naive.round([2], [2])
    assert naive.rows.num_slots == 7


def test_a_single_row_may_have_a_cache_that_only_goes_back_to_a_checkpoint():
    """The row's positions then say what it has still read; forgetting more than asked is no error."""
    cache = SpeculativeCache(DynamicCache(config=shared("mistral").config))
    cache.layers[0] = DynamicCache(config=shared("mistral").config).layers[0]  # the host's own window
    rows = Rows(cache, [0], CPU, counts_slots=False)

    def read(length):
        rows.open([length])
        for index in range(2):
            keys = torch.randn(1, 2, length, 8)
            cache.update(keys, keys, index)

    read(10)
    rows.checkpoint()
    for _ in range(3):
        read(1)
    assert rows.positions == [13]
    rows.forget([1])
    assert rows.positions == [10]
    assert [layer.get_seq_length() for layer in cache.layers] == [10, 10]
    read(4)
    assert rows.positions == [14]
