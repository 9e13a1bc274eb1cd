"""Peeking at the noise of draws to come: never seen from outside, never wrong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfspec.sampling import noise as noise_module
from hfspec.sampling.noise import BatchNoise


def laws(count, vocab=97, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, vocab, generator=generator).softmax(-1) for _ in range(count)]


def plain_draws(probs, seed=0):
    torch.manual_seed(seed)
    return [torch.multinomial(each, 1).squeeze(1) for each in probs], torch.get_rng_state()


@pytest.mark.parametrize("num_peeked", [0, 1, 3, 9])
def test_draws_after_peeking_are_vanillas(num_peeked):
    """However far was peeked, draws and final state are those of `torch.multinomial`."""
    probs = laws(8)
    expected, state = plain_draws(probs)
    torch.manual_seed(0)
    noise = BatchNoise(1).share()
    drawn = []
    for each in probs:
        for position in range(num_peeked):
            noise.peek(each, position)
        drawn.append(noise.multinomial(each))
    assert all(torch.equal(one, other) for one, other in zip(drawn, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_peeked_is_what_is_drawn():
    """The argmax over peeked noise foretells the draws at each position."""
    probs = laws(6)
    torch.manual_seed(0)
    noise = BatchNoise(1).share()
    foretold = [(each / noise.peek(each, position)).argmax(-1) for position, each in enumerate(probs)]
    drawn = [noise.multinomial(each) for each in probs]
    assert all(torch.equal(one, other) for one, other in zip(drawn, foretold, strict=True))


def test_peeking_moves_nothing():
    """The default generator is where it was."""
    before = torch.get_rng_state()
    BatchNoise(1).share().peek(laws(1)[0], 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_that_went_stale_is_dropped():
    """Other code that draws in between moves the stream, and the next draw is vanilla's from there."""
    probs = laws(3)
    torch.manual_seed(0)
    noise = BatchNoise(1).share()
    noise.peek(probs[0], 2)
    torch.rand(1)
    drawn = [noise.multinomial(each) for each in probs]
    torch.manual_seed(0)
    torch.rand(1)
    assert all(torch.equal(one, torch.multinomial(each, 1)[0]) for one, each in zip(drawn, probs, strict=True))


def test_peeking_again_after_other_draws():
    """A peek after the stream moved shows the new noise, not the remembered."""
    law = laws(1)[0]
    noise = BatchNoise(1).share()
    old = noise.peek(law, 0).clone()
    torch.rand(1)
    new = noise.peek(law, 0)
    assert not torch.equal(old, new)
    assert torch.equal((law / new).argmax(-1), torch.multinomial(law, 1)[0])


def test_another_shape_is_another_draw():
    """Noise peeked for one vocabulary is not used for another."""
    noise = BatchNoise(1).share()
    noise.peek(laws(1, vocab=50)[0], 0)
    law = laws(1)[0]
    state = torch.get_rng_state()
    drawn = noise.multinomial(law)
    torch.set_rng_state(state)
    assert torch.equal(drawn, torch.multinomial(law, 1)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("peeks", [False, True])
def test_probabilities_that_are_none_raise_vanillas_error(bad, peeks):
    """nan and inf give the error that `torch.multinomial` gives, peeked or not."""
    law = laws(1)[0]
    law[0, 3] = bad
    with pytest.raises(RuntimeError) as vanillas:
        torch.multinomial(law, 1)
    noise = BatchNoise(1).share()
    if peeks:
        noise.peek(law, 2)
    with pytest.raises(RuntimeError) as ours:
        noise.multinomial(law)
    assert str(ours.value) == str(vanillas.value)


def test_several_rows_are_drawn_at_once():
    """`[batch, vocab]` noise is one draw, as vanilla's."""
    law = torch.randn(3, 97).softmax(-1)
    torch.manual_seed(3)
    expected = torch.multinomial(law, 1).squeeze(1)
    torch.manual_seed(3)
    noise = BatchNoise(3).share()
    noise.peek(law, 1)
    assert torch.equal(noise.multinomial(law), expected)


# Rows of a batch


def shares(noise, num_rows):
    """The noise of each row by itself."""
    return [noise.share([row]) for row in range(num_rows)]


def batch_draws(probs, num_draws, seed=0):
    """What vanilla draws for a whole batch `[rows, vocab]`, draw after draw: `[rows, num_draws]`, and its end state."""
    torch.manual_seed(seed)
    columns = [torch.multinomial(each, 1) for each in probs[:num_draws]]
    return torch.cat(columns, dim=1).tolist(), torch.get_rng_state()


def batch_laws(num_draws, num_rows, vocab=31):
    return torch.randn(num_draws, num_rows, vocab, generator=torch.Generator().manual_seed(5)).softmax(-1)


@pytest.fixture(params=["kept", "dropped"])
def memory(request, monkeypatch):
    """Noise that is kept as long as it is needed, and noise that must be drawn again most of the time."""
    if request.param == "dropped":
        allow(monkeypatch, 1)


def allow(monkeypatch, num_bytes):
    """Let a call keep no more noise than that."""
    monkeypatch.setattr(noise_module, "_LEAST_BYTES", num_bytes)
    monkeypatch.setattr(noise_module, "spare_bytes", lambda device: 0)


@pytest.mark.parametrize("order", ["one after the other", "in turns", "the last first", "far ahead, then back"])
def test_rows_at_their_own_paces_draw_what_the_batch_draws(memory, order):
    """Whichever row draws first and how far ahead, each gets its share of vanilla's draws for all."""
    num_rows, num_draws = 3, 12
    probs = batch_laws(num_draws, num_rows)
    expected, state = batch_draws(probs, num_draws)
    turns = {
        "one after the other": [row for row in range(3) for _ in range(num_draws)],
        "in turns": list(range(3)) * num_draws,
        "the last first": [row for row in (2, 1, 0) for _ in range(num_draws)],
        "far ahead, then back": [0] * 9 + [1] * 2 + [2] * 12 + [1] * 10 + [0] * 3,
    }[order]
    torch.manual_seed(0)
    noise = BatchNoise(num_rows)
    rows = shares(noise, num_rows)
    drawn = [[], [], []]
    for row in turns:
        law = probs[len(drawn[row]), row : row + 1]
        drawn[row].append(int(rows[row].multinomial(law)))
    assert drawn == expected
    assert torch.equal(torch.get_rng_state(), state)


@given(data=st.data())
def test_any_paces_peeks_and_ends(data):
    """Rows that peek, draw and end where they like: their draws are vanilla's, and so is the state at the end."""
    num_rows = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=num_rows, max_size=num_rows))
    probs = batch_laws(16, num_rows)
    expected, state = batch_draws(probs, max(lengths))
    most = data.draw(st.sampled_from([1, 1 << 20]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        allow(monkeypatch, most)
        torch.manual_seed(0)
        noise = BatchNoise(num_rows)
        rows = shares(noise, num_rows)
        drawn = [[] for _ in range(num_rows)]
        while unfinished := [row for row in range(num_rows) if len(drawn[row]) < lengths[row]]:
            row = data.draw(st.sampled_from(unfinished))
            at = len(drawn[row])
            ahead = data.draw(st.integers(0, 4))
            foretold = (probs[at + ahead, row : row + 1] / rows[row].peek(probs[0, row : row + 1], ahead)).argmax(-1)
            if at + ahead < lengths[row]:
                assert int(foretold) == expected[row][at + ahead]
            drawn[row].append(int(rows[row].multinomial(probs[at, row : row + 1])))
    assert drawn == [each[:length] for each, length in zip(expected, lengths, strict=True)]
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_in_step_peek_at_what_the_batch_draws(memory):
    """Where the whole batch draws at once its rows only look ahead, and see what it will draw."""
    probs = batch_laws(6, 3)
    expected, state = batch_draws(probs, 6)
    torch.manual_seed(0)
    noise = BatchNoise(3)
    rows = shares(noise, 3)
    drawn = []
    for step in range(6):
        for ahead in range(min(3, 6 - step)):
            for row, each in enumerate(rows):
                law = probs[step + ahead, row : row + 1]
                assert int((law / each.peek(law, ahead)).argmax()) == expected[row][step + ahead]
        drawn.append(noise.share().multinomial(probs[step]).tolist())
    assert [list(row) for row in zip(*drawn, strict=True)] == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_a_rows_bad_law_raises_vanillas_error():
    """nan in one row is the error that it is in vanilla."""
    law = batch_laws(1, 1)[0]
    law[0, 3] = float("nan")
    with pytest.raises(RuntimeError, match="inf"):
        BatchNoise(2).share([0]).multinomial(law)


def test_the_generator_moves_with_the_row_that_is_furthest():
    """After each draw the state is vanilla's after as many, and peeking ahead moves nothing."""
    probs = batch_laws(6, 2)
    torch.manual_seed(0)
    noise = BatchNoise(2)
    first, second = shares(noise, 2)
    for number in range(1, 5):
        first.peek(probs[0, :1], 3)
        first.multinomial(probs[number, :1])
        assert torch.equal(torch.get_rng_state(), _state_after(probs, number))
    second.multinomial(probs[0, 1:])
    assert torch.equal(torch.get_rng_state(), _state_after(probs, 4))


def _state_after(probs, num_draws):
    now = torch.get_rng_state()
    state = batch_draws(probs, num_draws)[1]
    torch.set_rng_state(now)
    return state


def test_rows_go_on_where_others_have_drawn():
    """Draws of other code in between make what was seen ahead stale; what was drawn for all rows stays."""
    probs = batch_laws(6, 2)
    torch.manual_seed(0)
    noise = BatchNoise(2)
    first, second = shares(noise, 2)
    drawn = [int(first.multinomial(probs[number, :1])) for number in range(3)]
    torch.rand(1)
    state = torch.get_rng_state()
    rest = int(first.multinomial(probs[3, :1]))
    assert [int(second.multinomial(probs[number, 1:])) for number in range(3)] == batch_draws(probs, 3)[0][1]
    assert drawn == batch_draws(probs, 3)[0][0]
    torch.set_rng_state(state)
    assert rest == int(torch.multinomial(probs[3], 1)[0])


def test_what_was_drawn_is_let_go():
    """Noise and states of draws that are made serve nobody any more: a long text keeps no more than a short one."""
    noise, kept = BatchNoise(1), []
    for law in laws(300):
        noise.peek([0], 2, law)
        noise.multinomial(law, [0])
        kept.append((noise._num_kept, len(noise._states)))
    assert kept[-1] == kept[9]


def test_memory_of_noise_is_bounded(monkeypatch):
    """However far a row runs ahead, no more noise is kept than allowed; what is drawn again is the same."""
    law = batch_laws(1, 2)[0]
    allow(monkeypatch, 5 * law.nbytes)
    noise = BatchNoise(2)
    first = noise.peek([0, 1], 0, law).clone()
    noise.peek([0, 1], 200, law)
    assert noise._num_kept <= 5 * 2
    assert torch.equal(noise.peek([0, 1], 0, law), first)


def test_what_all_rows_have_passed_is_not_kept():
    """However long the text: states and noise are kept from the slowest row at work to the fastest."""
    noise = BatchNoise(3)
    fast, slow, short = shares(noise, 3)
    law = torch.full((1, 11), 1 / 11)
    short.multinomial(law)
    short.end()
    for _ in range(200):
        fast.multinomial(law)
        slow.multinomial(law)
    assert len(noise._states) <= 3
    for _ in range(10):
        fast.multinomial(law)
    assert len(noise._states) <= 13
    assert noise._num_kept <= 12


# Many positions at once


def draw_ahead(noise, probs, rows, made, counts):
    """What `ahead` foretells of each row's next draws: a list of ids a row."""
    ahead = noise.ahead(rows, counts, probs[0])
    num = [counts] * len(rows) if isinstance(counts, int) else counts
    return [
        [int((probs[made[row] + i, row] / ahead[index, i]).argmax()) for i in range(num[index])]
        for index, row in enumerate(rows)
    ]


@given(data=st.data())
def test_what_is_shown_ahead_is_what_the_batch_draws(data):
    """Any rows, any counts, any paces, any bound on memory: draws are vanilla's, and so is the state after them."""
    num_rows, num_draws = data.draw(st.integers(1, 4)), 8
    probs = batch_laws(num_draws + 4, num_rows)
    expected, state = batch_draws(probs, num_draws)
    with pytest.MonkeyPatch.context() as monkeypatch:
        allow(monkeypatch, data.draw(st.sampled_from([1, 9 * 31 * 4, 1 << 20])))
        torch.manual_seed(0)
        noise, made = BatchNoise(num_rows), [0] * num_rows
        while rows := [row for row in range(num_rows) if made[row] < num_draws]:
            counts = data.draw(st.sampled_from([1, 3, [1 + row % 3 for row in rows]]))
            each = [counts] * len(rows) if isinstance(counts, int) else counts
            if data.draw(st.booleans()):
                position = data.draw(st.integers(0, 3))
                seen = noise.peek(rows, position, probs[0])
                for index, row in enumerate(rows):
                    if made[row] + position < num_draws:
                        law = probs[made[row] + position, row]
                        assert int((law / seen[index]).argmax()) == expected[row][made[row] + position]
            foretold = draw_ahead(noise, probs, rows, made, counts)
            nums = [
                min(data.draw(st.integers(1, num)), num_draws - made[row]) for row, num in zip(rows, each, strict=True)
            ]
            for row, ids, num in zip(rows, foretold, nums, strict=True):
                assert ids[:num] == expected[row][made[row] : made[row] + num]
                made[row] += num
            assert noise.advance(rows, nums)
            for row in rows:
                if made[row] == num_draws:
                    noise.end(row)
    assert torch.equal(torch.get_rng_state(), state)
    assert (noise._num_kept, sum(map(len, noise._kept))) == (0, 0)


def test_noise_ahead_is_as_wide_as_the_longest_count():
    """Rows that ask for less get ones behind what they asked for: `[rows, most, vocab]`."""
    ahead = BatchNoise(3).ahead([0, 2], [1, 3], torch.empty(1, 31))
    assert ahead.shape == (2, 3, 31)
    assert bool((ahead[0, 1:] == 1).all())
    assert bool((ahead[1] != 1).any(dim=-1).all())


def test_a_draw_of_others_between_look_and_choice_is_told():
    """What another thread has drawn meanwhile is not used twice: `advance` refuses, and `ahead` shows new noise."""
    noise, like = BatchNoise(2), torch.empty(2, 31)
    old = noise.ahead([0, 1], 3, like)
    torch.rand(1)
    state = torch.get_rng_state()
    assert not noise.advance([0, 1], [2, 1])
    assert torch.equal(torch.get_rng_state(), state)
    new = noise.ahead([0, 1], 3, like)
    assert not torch.equal(old, new)
    assert noise.advance([0, 1], [2, 1])
    assert torch.equal(noise.ahead([1], 1, like)[0, 0], new[1, 1])


def test_the_generator_is_read_once_a_look(monkeypatch):
    """A round reads the generator for its first peek, its look ahead and its advance, however many rows and tokens."""
    reads = []
    read = noise_module.generator_state
    monkeypatch.setattr(noise_module, "generator_state", lambda device: reads.append(0) or read(device))
    noise, like, rows = BatchNoise(8), torch.empty(8, 31), list(range(8))
    for _ in range(4):
        for position in range(4):
            noise.peek(rows, position, like)
        noise.ahead(rows, 5, like)
        noise.advance(rows, [1, 2, 3, 4, 5, 5, 5, 5])
    assert len(reads) <= 3 * 4


# What is drawn and kept, counted


@pytest.fixture
def rows_drawn(monkeypatch):
    """The sizes of the noise that was drawn, in rows."""
    sizes = []
    draw = torch.Tensor.exponential_
    monkeypatch.setattr(
        torch.Tensor,
        "exponential_",
        lambda self, *args, **kwargs: (sizes.append(len(self)), draw(self, *args, **kwargs))[1],
    )
    return sizes


def drift(noise, num_draws, like, num_rows=16, count=5):
    """Rows that accept more or fewer tokens a round, so that the fastest ends when the slowest is at two fifths."""
    made, most_apart = [0] * num_rows, 0
    owed = [0.0] * num_rows
    while rows := [row for row in range(num_rows) if made[row] < num_draws]:
        noise.ahead(rows, count, like)
        nums = []
        for row in rows:
            owed[row] += 2 + 3 * row / (num_rows - 1)
            nums.append(min(int(owed[row]), num_draws - made[row]))
            owed[row] -= int(owed[row])
            made[row] += nums[-1]
        assert noise.advance(rows, nums)
        for row in rows:
            if made[row] == num_draws:
                noise.end(row)
        most_apart = max(most_apart, max(made) - min(made))
    return most_apart


@pytest.mark.parametrize(
    ("num_bytes", "most"), [(1 << 30, 1.1), (256 << 20, 1.5)], ids=["memory to spare", "no memory to spare"]
)
def test_rows_that_drift_apart_draw_little_more_than_vanilla(monkeypatch, rows_drawn, num_bytes, most):
    """16 rows, a vocabulary of 150,000 (a thousandth of it here, and of the memory): counted in rows of noise."""
    allow(monkeypatch, num_bytes // 1000)
    num_draws = 100
    assert drift(BatchNoise(16), num_draws, torch.empty(16, 150)) > num_draws // 2
    assert sum(rows_drawn) <= most * 16 * num_draws


def test_rows_let_go_as_they_pass():
    """However far rows are apart, what is kept is at most twice what rows have still to come to."""
    noise, like = BatchNoise(16), torch.empty(16, 11)
    made = [0] * 16
    for _ in range(60):
        rows = list(range(16))
        noise.ahead(rows, 4, like)
        nums = [1 + row // 4 for row in rows]
        noise.advance(rows, nums)
        made = [each + num for each, num in zip(made, nums, strict=True)]
        owed = sum(noise._num_seen - each for each in made)
        assert noise._num_kept <= 2 * owed
