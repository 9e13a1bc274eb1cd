"""Peeking at the noise of draws to come: never seen from outside, never wrong."""

import pytest
import torch

from hfspec.sampling.noise import SeededNoise


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
    noise = SeededNoise()
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
    noise = SeededNoise()
    foretold = [(each / noise.peek(each, position)).argmax(-1) for position, each in enumerate(probs)]
    drawn = [noise.multinomial(each) for each in probs]
    assert all(torch.equal(one, other) for one, other in zip(drawn, foretold, strict=True))


def test_peeking_moves_nothing():
    """The default generator is where it was."""
    before = torch.get_rng_state()
    SeededNoise().peek(laws(1)[0], 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_that_went_stale_is_dropped():
    """Other code that draws in between moves the stream, and the next draw is vanilla's from there."""
    probs = laws(3)
    torch.manual_seed(0)
    noise = SeededNoise()
    noise.peek(probs[0], 2)
    torch.rand(1)
    drawn = [noise.multinomial(each) for each in probs]
    torch.manual_seed(0)
    torch.rand(1)
    assert all(torch.equal(one, torch.multinomial(each, 1)[0]) for one, each in zip(drawn, probs, strict=True))


def test_peeking_again_after_other_draws():
    """A peek after the stream moved shows the new noise, not the remembered."""
    law = laws(1)[0]
    noise = SeededNoise()
    old = noise.peek(law, 0).clone()
    torch.rand(1)
    new = noise.peek(law, 0)
    assert not torch.equal(old, new)
    assert torch.equal((law / new).argmax(-1), torch.multinomial(law, 1)[0])


def test_another_shape_is_another_draw():
    """Noise peeked for one vocabulary is not used for another."""
    noise = SeededNoise()
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
    noise = SeededNoise()
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
    noise = SeededNoise()
    noise.peek(law, 1)
    assert torch.equal(noise.multinomial(law), expected)
