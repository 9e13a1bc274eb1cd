"""Models that read pictures. Their texts are vanilla's, and drafted, whether or not the draft sees."""

import copy
import inspect

import pytest
import torch

import hfspec
from hfspec.draft.model import ModelDraft
from hfspec.host import releases
from tests.models import FunctionSource, Scripted, both, rows
from tests.multimodal.tiny import IMAGE, SEEING, VIDEO, language_model, noisy_copy, pictures, seeing, text_only, widened

ARCHS = tuple(SEEING)
NEW = {"max_new_tokens": 20}
SEEDED = {"do_sample": True, "top_k": 12}
#: The calls that differ in what the target reads.
PROMPTS = {
    "a picture": lambda arch: pictures(arch, 4),
    "three prompts with a picture each": lambda arch: pictures(arch, 4, 9, 2),
    "a picture, three texts": lambda arch: pictures(arch, 4) | SEEDED | {"num_return_sequences": 3},
    "text": lambda arch: text_only(7),
    "two texts": lambda arch: text_only(7, 4),
}


def check(arch, draft, call, **options):
    """The same result and random state as vanilla's, from drafts."""
    return both(seeing(arch), draft, None, call, draft_budget=4, **options).assert_same().assert_drafted()


@pytest.mark.parametrize("choice", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_draft_that_reads_text_alone(arch, prompt, choice):
    """Pictures, their positions, and prompts without any: a causal model drafts for all of them."""
    check(arch, language_model(arch), PROMPTS[prompt](arch) | NEW | choice)


@pytest.mark.parametrize("choice", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_draft_that_sees(arch, prompt, choice):
    """A model of the target's kind drafts from the pictures of a single prompt, and else from text."""
    check(arch, noisy_copy(seeing(arch)), PROMPTS[prompt](arch) | NEW | choice)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_accept_count(arch):
    """Rounds of every outcome go on from the right positions, behind a picture and in step for two of them."""
    for inputs, wanted in ((pictures(arch, 4), {0, 1, 2, 3}), (pictures(arch, 4, 9), {0, 1, 2})):
        script = Scripted(seeing(arch).generate(**inputs, **NEW), [0, 3, 1, 4, 2])
        check(arch, script, inputs | NEW)
        assert {outcome.num_accepted for outcome in script.outcomes} >= wanted


def padded(inputs):
    """The same single prompt, with padding at the left, as a caller with fixed lengths passes it."""
    length = inputs["input_ids"].shape[1]
    return {
        name: torch.cat([torch.zeros_like(value[:, :3]), value], dim=1)
        if value.dim() == 2 and value.shape[1] == length
        else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shape", ["bare", "padded", "three texts"])
def test_the_same_weights_are_always_accepted(arch, shape):
    """A draft that sees is given the very prompt: what it drafts is the target's text, from the first token on."""
    inputs = pictures(arch, 4)
    call = {"bare": inputs, "padded": padded(inputs), "three texts": inputs | SEEDED | {"num_return_sequences": 3}}[
        shape
    ]
    pair = check(arch, copy.deepcopy(seeing(arch)), call | NEW)
    assert pair.stats.last.acceptance_rate == 1.0


@pytest.mark.parametrize("arch", ARCHS)
def test_a_draft_that_begins_late_sees_too(arch):
    """Tokens committed before the first draft are read behind the picture."""
    inputs, inner = pictures(arch, 4), ModelDraft(copy.deepcopy(seeing(arch)))
    sessions = []

    class Late(hfspec.DraftSource):
        def start(self, context):
            sessions.append(inner.start(context))
            source = FunctionSource(self.propose)
            return source.start(context)

        def propose(self, input_ids, budget, number):
            wrong = rows((int(text[0, input_ids.shape[1]]) + 1) % 90) if input_ids.shape[1] < text.shape[1] else rows(1)
            return hfspec.Draft(wrong) if number < 4 else sessions[0].propose(input_ids, budget)

    text = seeing(arch).generate(**inputs, **NEW)
    pair = check(arch, Late(), inputs | {"max_new_tokens": 8})
    assert pair.stats.last.accepted_tokens == pair.stats.last.drafted_tokens - 3


def test_a_picture_changes_what_is_drafted():
    """The control of the two tests above: without the picture the same weights draft another text."""
    pair = check("llava", language_model("llava"), pictures("llava", 4) | NEW)
    assert pair.stats.last.acceptance_rate < 0.5


def contexts_of_call(arch, call):
    """What the draft source of a call is told of its rows."""
    told = []

    class Listener(Scripted):
        def start(self, context):
            told.append(context)
            return super().start(context)

    model = seeing(arch)
    with hfspec.patched(model, Listener(model.generate(**call), [2])):
        model.generate(**call)
    return told


@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_source_is_told(arch):
    """The media of one prompt, whole; of several prompts each its own. Places are no text."""
    inputs = pictures(arch, 4)
    (context,) = contexts_of_call(arch, inputs | NEW)
    assert set(context.inputs) == set(inputs) - {"input_ids", "attention_mask"}
    assert all(context.inputs[name] is inputs[name] for name in context.inputs)
    assert torch.equal(context.prompt_mask, inputs["input_ids"] != IMAGE)
    inputs = pictures(arch, 4, 9)
    contexts = contexts_of_call(arch, inputs | NEW)
    for name in set(inputs) - {"input_ids", "attention_mask"}:
        assert torch.equal(torch.cat([context.inputs[name] for context in contexts]), inputs[name])
    (context,) = contexts_of_call(arch, text_only(5) | NEW)
    assert not context.inputs
    assert context.prompt_mask is None


@pytest.mark.parametrize("arch", ["llava", "gemma3"])
def test_a_draft_without_the_placeholder_id(arch):
    """A text model whose vocabulary ends before the placeholder's id never reads one."""
    draft = language_model(arch, vocab_size=IMAGE)
    pair = check(arch, draft, pictures(arch, 4) | NEW)
    assert pair.stats.last.fallback_reason is None


@pytest.mark.parametrize("arch", ARCHS)
def test_two_pictures_in_one_prompt(arch):
    """Every picture finds its place, in the target and in the draft."""
    pair = check(arch, copy.deepcopy(seeing(arch)), pictures(arch, 4, num_pictures=2) | NEW)
    assert pair.stats.last.acceptance_rate == 1.0


@pytest.mark.parametrize("num_pictures", [1, 2])
@pytest.mark.parametrize("arch", SEEING)
def test_each_prompts_pictures_reach_its_draft(arch, num_pictures):
    """A batch, in which a draft that is the target's copy is right in every token."""
    model = seeing(arch)
    call = pictures(arch, 3, 3, num_pictures=num_pictures) | NEW
    pair = both(model, copy.deepcopy(model), None, call, draft_budget=3).assert_same().assert_drafted()
    assert pair.stats.last.acceptance_rate == 1.0
    assert list(pair.stats.last.lockstep_reasons) == ["the prompt is more than text"]


def test_a_video():
    """The same for the other kind of input that has a grid."""
    model = seeing("qwen2_vl")
    inputs = pictures("qwen2_vl", 4)
    ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, VIDEO)
    call = {
        "input_ids": ids,
        "attention_mask": inputs["attention_mask"],
        "pixel_values_videos": inputs["pixel_values"],
        "video_grid_thw": inputs["image_grid_thw"],
    }
    if "mm_token_type_ids" in inputs:
        call["mm_token_type_ids"] = inputs["mm_token_type_ids"] * 2
    for draft, acceptance in ((copy.deepcopy(model), 1.0), (language_model("qwen2_vl"), None)):
        pair = check("qwen2_vl", draft, call | NEW)
        assert acceptance is None or pair.stats.last.acceptance_rate == acceptance


WITH_EMBEDDINGS = [
    arch
    for arch in ARCHS
    if "inputs_embeds" in inspect.signature(seeing(arch).prepare_inputs_for_generation).parameters
]


@pytest.mark.parametrize("has_ids", [False, True])
@pytest.mark.parametrize("arch", WITH_EMBEDDINGS)
def test_embeddings_instead_of_a_prompt(arch, has_ids):
    """With the ids beside them the draft reads those; without, what the target has written."""
    model, ids = seeing(arch), text_only(7)["input_ids"]
    call = {"inputs_embeds": model.get_input_embeddings()(ids).detach()} | ({"input_ids": ids} if has_ids else {})
    pair = check(arch, copy.deepcopy(model), call | NEW)
    assert not has_ids or pair.stats.last.acceptance_rate == 1.0
    check(arch, language_model(arch), call | NEW | SEEDED)


@pytest.mark.parametrize("arch", ARCHS)
def test_everything_that_can_be_returned(arch):
    """Scores, logits, hidden states and cache of a call with a picture are vanilla's."""
    names = ["output_scores", "output_logits", "output_hidden_states"]
    wanted = {"return_dict_in_generate": True} | dict.fromkeys(names, True)
    check(arch, noisy_copy(seeing(arch)), pictures(arch, 4) | NEW | wanted)


@pytest.mark.parametrize("draft", ["sees", "reads text"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_second_turn_about_the_picture(arch, draft):
    """The picture is in the cache alone: its places are left out of what a draft reads, whatever it can see."""
    model = seeing(arch)

    def second_turn():
        first = copy.deepcopy(model).generate(**pictures(arch, 4), max_new_tokens=5, return_dict_in_generate=True)
        if hasattr(model.model, "rope_deltas"):  # the host keeps on the model what the cache's positions are
            model.model.rope_deltas = torch.tensor([[-2]])
        ids = torch.cat([first.sequences, text_only(4, seed=9)["input_ids"]], dim=-1)
        mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask, releases.CACHE_KEY: first[releases.CACHE_KEY]} | NEW

    check(arch, copy.deepcopy(model) if draft == "sees" else language_model(arch, vocab_size=IMAGE), second_turn)


def test_a_second_turn_with_a_picture_of_its_own():
    """The call brings the new picture alone, which is not all that the text has places for: the draft reads text."""
    model, new = seeing("llava"), pictures("llava", 2, seed=5)

    def second_turn():
        first = model.generate(**pictures("llava", 4), max_new_tokens=5, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, new["input_ids"]], dim=-1)
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": new["pixel_values"]}
        return call | {releases.CACHE_KEY: first[releases.CACHE_KEY]} | NEW

    check("llava", copy.deepcopy(model), second_turn)


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2_5_vl"])
def test_the_offset_kept_on_the_model_is_vanillas(arch):
    """M-RoPE: the next call may go on from it."""
    model = seeing(arch)
    model.generate(**pictures(arch, 4), **NEW)
    plain = model.model.rope_deltas.clone()
    check(arch, noisy_copy(model), pictures(arch, 4) | NEW)
    assert torch.equal(model.model.rope_deltas, plain)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_static_cache(arch):
    """The same text, drafted or, where the host would take drafted tokens for a prompt, plain for that reason."""
    call = pictures(arch, 4) | NEW | {"cache_implementation": "static"}
    pair = both(seeing(arch), copy.deepcopy(seeing(arch)), None, call, draft_budget=4).assert_same()
    if pair.stats.last.fallback_reason is None:
        assert pair.assert_drafted().stats.last.acceptance_rate == 1.0
    else:
        assert arch == "gemma3"
        pair.assert_plain("token types", "static cache")


@pytest.mark.skipif("mm_token_type_ids" not in pictures("qwen2_vl", 4), reason="this release asks for no token types")
def test_a_draft_that_cannot_be_given_the_picture():
    """What the draft model lacks is said in its own words, once, and the text is vanilla's."""
    call = pictures("qwen2_vl", 4) | NEW
    del call["mm_token_type_ids"]
    pair = both(seeing("qwen2_vl"), noisy_copy(seeing("qwen2_vl")), None, call, draft_budget=4).assert_same()
    pair.assert_plain("the draft source stopped", "mm_token_type_ids")
    check("qwen2_vl", language_model("qwen2_vl"), call)


def test_the_draft_encodes_a_picture_once():
    """Its first forward reads the picture; later ones go on from its cache."""
    draft, calls = noisy_copy(seeing("llava")), []
    tower = draft.model.vision_tower
    tower.register_forward_hook(lambda *_: calls.append(1))
    check("llava", draft, pictures("llava", 4) | NEW)
    assert len(calls) == 1


def test_beams_stay_plain():
    """Another loop is another loop, pictures or not."""
    call = pictures("llava", 4) | NEW | {"num_beams": 2}
    both(seeing("llava"), noisy_copy(seeing("llava")), None, call).assert_same().assert_plain("beam search")


def test_a_wider_draft_vocabulary():
    """Ids that the target does not have are never proposed."""
    check("llava", widened(language_model("llava")), pictures("llava", 4) | NEW)
