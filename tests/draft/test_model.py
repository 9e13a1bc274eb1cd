"""A small model as draft source, driven by hand."""

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hfspec import CallView, Context, DraftError, RoundBudget
from hfspec.draft.model import ModelDraft
from hfspec.rounds import Outcomes
from hfspec.sampling.noise import BatchNoise
from tests.models import SUPPORTED, VOCAB, build, plain_text, prompt, rows, shared
from tests.rounds import outcome, uneven

TEXT_MODELS = (*SUPPORTED, "mistral")


def context(selection="greedy", **more):
    return Context(VOCAB, torch.device("cpu"), selection, **more)


def session(model, *args, **kwargs):
    return ModelDraft(model).start(context(*args, **kwargs))


def propose(drafting, ids, num_tokens):
    """A row's draft, or those of several rows' texts."""
    with torch.no_grad():
        if isinstance(ids, torch.Tensor):
            return drafting.propose(ids, RoundBudget(num_tokens))
        draft = drafting.propose(uneven(ids), RoundBudget(num_tokens))
    return [draft.of_row(row) for row in range(draft.num_rows)]


def observe(drafting, *counts):
    """Tell rows of their verdicts; the texts come with the next draft."""
    drafting.read(None, Outcomes(tuple(outcome(*each) for each in counts)))


def caught_up(drafting):
    return drafting._session.caught_up


@pytest.mark.parametrize("arch", TEXT_MODELS)
def test_it_proposes_what_it_would_write(arch):
    """A greedy draft is the draft model's own greedy text."""
    text = plain_text(shared(arch), prompt(), max_new_tokens=6)
    draft = propose(session(shared(arch)), prompt(), 6)
    assert torch.equal(draft.token_ids, text[:, 7:])
    assert draft.probs is None


@pytest.mark.parametrize("num_accepted", range(5))
def test_it_goes_on_from_the_committed_text(num_accepted):
    """After any verdict the next draft is that of a fresh session over the committed text."""
    drafting, ids = session(shared()), prompt()
    drafted = propose(drafting, ids, 4).token_ids
    ids = torch.cat([ids, drafted[:, :num_accepted], rows(11)], dim=-1)
    drafting.observe(outcome(min(num_accepted + 1, 4), num_accepted, num_accepted + 1))
    draft = propose(drafting, ids, 4)
    assert torch.equal(draft.token_ids, propose(session(shared()), ids, 4).token_ids)
    assert caught_up(drafting) == 0


def test_it_catches_up_after_plain_rounds():
    """Tokens committed while it was not asked are read first, and counted."""
    drafting, ids = session(shared()), prompt()
    propose(drafting, ids, 2)
    assert caught_up(drafting) == 5
    drafting.observe(outcome(1, 0, 1))
    ids = torch.cat([ids, prompt(6, seed=4)], dim=-1)
    draft = propose(drafting, ids, 2)
    assert caught_up(drafting) == 4
    assert torch.equal(draft.token_ids, propose(session(shared()), ids, 2).token_ids)


def test_padding_is_not_read():
    """A left-padded prompt drafts what the bare prompt drafts."""
    padded = torch.cat([rows(0, 0, 0), prompt()], dim=-1)
    mask = (padded != 0).long()
    drafted = propose(session(shared(), prompt_mask=mask), padded, 5).token_ids
    assert torch.equal(drafted, propose(session(shared()), prompt(), 5).token_ids)


@pytest.mark.parametrize("top_k", [None, 8])
def test_a_drawn_draft_hands_over_the_law_it_was_drawn_from(top_k):
    """Under rejection, the law of each token is the processed one, at full width, and gave the token."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(2.0)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    draft = propose(session(shared(), "rejection", processors=processors), prompt(), 3)
    prefix = prompt()
    for index in range(3):
        with torch.no_grad():
            logits = shared()(input_ids=prefix).logits[:, -1].float()
        torch.testing.assert_close(draft.probs[0, index], processors(prefix, logits).softmax(-1)[0])
        prefix = torch.cat([prefix, draft.token_ids[:, index : index + 1]], dim=-1)
        assert draft.probs[0, index, prefix[0, -1]] > 0


def test_a_seeded_draft_foretells_the_draws():
    """With the target's law it proposes what `torch.multinomial` will draw, and draws nothing itself."""
    noise = BatchNoise(1).share()
    state = torch.get_rng_state()
    draft = propose(session(shared(), "seeded", noise=noise), prompt(), 4)
    assert torch.equal(torch.get_rng_state(), state)
    prefix = prompt()
    for token in draft.token_ids[0]:
        with torch.no_grad():
            probs = shared()(input_ids=prefix).logits[:, -1].float().softmax(-1)
        assert torch.equal(torch.multinomial(probs, 1)[0, 0], token)
        prefix = torch.cat([prefix, token.view(1, 1)], dim=-1)


class StopsAfter(RoundBudget):
    """Ends a draft after so many tokens."""

    def __init__(self, num_tokens, stop):
        super().__init__(num_tokens, reads_confidence=True)
        self.stop, self.seen = stop, []

    def allows_another(self, confidence):
        self.seen.append(confidence)
        return len(self.seen) < self.stop


def test_it_asks_the_budget_after_each_token():
    """The token just drafted stays in the draft; its confidence is between 0 and 1."""
    budget = StopsAfter(8, stop=3)
    with torch.no_grad():
        draft = session(shared()).propose(prompt(), budget)
    assert draft.num_tokens == 3
    assert draft.confidences[0].tolist() == pytest.approx(budget.seen)
    assert all(0 <= each <= 1 for each in budget.seen)


def test_its_context_has_an_end():
    """Near its last position it proposes fewer tokens, beyond it raises."""
    model = build("gpt2", n_positions=12)
    assert propose(session(model), prompt(10), 8).num_tokens == 3
    assert propose(session(model), prompt(12), 8).num_tokens == 1
    with pytest.raises(DraftError, match="context of 12"):
        propose(session(model), prompt(13), 8)


@pytest.mark.parametrize("vocab", [96, 97, 120])
def test_ids_are_the_targets(vocab):
    """A draft with more ids proposes none of them; with fewer, its laws are as wide as the target's."""
    model = build(vocab_size=vocab)
    draft = propose(session(model, "rejection"), prompt() % 90, 12)
    assert int(draft.token_ids.max()) < VOCAB
    assert draft.probs.shape == (1, 12, VOCAB)
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(1, 12))


def test_sessions_are_apart():
    """Two calls at once on one source do not meet."""
    source = ModelDraft(shared())
    one, other = source.start(context()), source.start(context())
    drafts = [propose(each, ids, 3) for each, ids in ((one, prompt()), (other, prompt(9, seed=5)))]
    one.observe(outcome(3, 3, 4))
    other.observe(outcome(1, 0, 1))
    ids = torch.cat([prompt(), drafts[0].token_ids, rows(7)], dim=-1)
    assert torch.equal(propose(one, ids, 3).token_ids, propose(session(shared()), ids, 3).token_ids)


# Several rows


def batch_of(model, num_rows, selection="greedy", **more):
    return started(model, [context(selection, row=row, **more) for row in range(num_rows)])


def started(model, contexts):
    return ModelDraft(model).start_batch(CallView(contexts, BatchNoise(len(contexts))))


def alone(model, text, num_tokens):
    return propose(session(model), text, num_tokens).token_ids


@pytest.mark.parametrize("arch", TEXT_MODELS)
def test_rows_are_drafted_for_as_if_each_were_alone(arch):
    """Texts and verdicts of any lengths, rows that leave: each row's draft is that of a session of its own."""
    model = shared(arch, attn="sdpa")
    texts = [prompt(length, seed=length) for length in (3, 9, 6)]
    drafting = batch_of(model, 3)
    for turn in range(30):
        if turn == 20:
            drafting.select([2, 0])
            texts = [texts[2], texts[0]]
        num_tokens = 1 + turn % 4
        drafts = propose(drafting, texts, num_tokens)
        for text, draft in zip(texts, drafts, strict=True):
            assert torch.equal(draft.token_ids, alone(model, text, num_tokens))
        accepted = [(turn * (row + 1)) % (num_tokens + 1) for row in range(len(texts))]
        observe(drafting, *((min(each + 1, num_tokens), each, each + 1) for each in accepted))
        texts = [
            torch.cat([text, draft.token_ids[:, :each], rows(3 + turn)], dim=-1)
            for text, draft, each in zip(texts, drafts, accepted, strict=True)
        ]


@pytest.mark.parametrize("num_plain", [1, 5, 40])
def test_rows_catch_up_after_plain_rounds(num_plain):
    """However much was committed while nobody asked, the drafts are those of the whole texts."""
    model = shared(attn="sdpa")
    texts = [prompt(length, seed=length) for length in (3, 9)]
    drafting = batch_of(model, 2)
    first = propose(drafting, texts, 3)
    observe(drafting, (1, 0, 1), (3, 2, 3))
    texts = [
        torch.cat([text, draft.token_ids[:, : 2 * row], prompt(num_plain + row, seed=20 + row)], dim=-1)
        for row, (text, draft) in enumerate(zip(texts, first, strict=True))
    ]
    for text, draft in zip(texts, propose(drafting, texts, 3), strict=True):
        assert torch.equal(draft.token_ids, alone(model, text, 3))


def test_padding_and_what_is_no_text_is_not_read_in_a_batch():
    """Each row's prompt mask takes out what the draft must not read."""
    model = shared(attn="sdpa")
    texts = [prompt(6, seed=1), prompt(6, seed=2)]
    masks = [None, torch.tensor([[0, 0, 1, 1, 0, 1]])]
    contexts = [context(row=row, prompt_mask=mask) for row, mask in enumerate(masks)]
    drafts = propose(started(model, contexts), texts, 4)
    assert torch.equal(drafts[0].token_ids, alone(model, texts[0], 4))
    assert torch.equal(drafts[1].token_ids, alone(model, texts[1][:, [2, 3, 5]], 4))


def test_rows_share_their_forwards():
    """Three rows cost as many forwards as one."""
    model, num_forwards = build(attn="sdpa"), [0]
    model.register_forward_pre_hook(lambda *args: num_forwards.__setitem__(0, num_forwards[0] + 1))
    propose(batch_of(model, 3), [prompt(length, seed=length) for length in (3, 9, 6)], 4)
    assert num_forwards == [4]


def test_rows_that_cannot_share_are_drafted_for_in_turn():
    """A draft whose cache holds one length for all rows gives each row a session of its own."""
    encoder_input = torch.tensor([[5, 6, 7]])
    model = shared("t5")
    with torch.no_grad():
        outputs = model.get_encoder()(input_ids=encoder_input, return_dict=True)
    contexts = [
        context(row=row, inputs={"input_ids": encoder_input}, encoder_outputs=outputs, encoder=model.get_encoder())
        for row in range(2)
    ]
    texts = [rows(0, 4), rows(0, 9, 8, 7)]
    drafts = propose(started(model, contexts), texts, 4)
    for text, draft in zip(texts, drafts, strict=True):
        written = plain_text(model, encoder_input, decoder_input_ids=text, max_new_tokens=4)
        assert torch.equal(draft.token_ids, written[:, -4:])


def test_an_encoder_decoder_draft_reads_the_encoders_input():
    """With an encoder of its own it makes its own states; without an input it cannot draft, and says so."""
    model, encoder_input = shared("t5"), torch.tensor([[5, 6, 7, 8]])
    written = plain_text(model, encoder_input, max_new_tokens=6)
    other = shared("t5", seed=3).get_encoder()
    drafting = ModelDraft(model).start(context(inputs={"input_ids": encoder_input}, encoder=other))
    assert torch.equal(propose(drafting, written[:, :2], 5).token_ids, written[:, 2:])
    with pytest.raises(DraftError, match="encoder"), torch.no_grad():
        ModelDraft(model).start(context()).propose(written[:, :2], RoundBudget(2))


class SeesRows(RoundBudget):
    """Notes the confidences it is told, one a row each time."""

    def __init__(self, num_tokens):
        super().__init__(num_tokens, reads_confidence=True)
        self.seen = []

    def allows_another(self, *confidences):
        self.seen.append(confidences)
        return True


def test_the_budget_is_told_of_all_rows_at_once():
    """Rows that share forwards stop together, so the budget sees all their confidences."""
    budget = SeesRows(3)
    with torch.no_grad():
        draft = batch_of(shared(attn="sdpa"), 2).propose(uneven([prompt(5), prompt(7, seed=1)]), budget)
    torch.testing.assert_close(draft.confidences, torch.tensor(budget.seen).T)


def test_rows_of_a_drawn_draft_have_their_own_laws():
    """Under rejection each row's tokens come with the laws that they were drawn from."""
    model = shared(attn="sdpa")
    texts = [prompt(4, seed=1), prompt(8, seed=2)]
    for text, draft in zip(texts, propose(batch_of(model, 2, "rejection"), texts, 3), strict=True):
        for index in range(3):
            prefix = torch.cat([text, draft.token_ids[:, :index]], dim=-1)
            with torch.no_grad():
                law = model(input_ids=prefix).logits[0, -1].float().softmax(-1)
            torch.testing.assert_close(draft.probs[0, index], law, rtol=1e-4, atol=1e-5)
