"""The log: processors, criteria and streamer see vanilla's calls, in vanilla's order, with vanilla's arguments."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hfspec
from hfspec import Context, DraftSession
from tests.models import CountingProcessor, Scripted, both, noisy, plain_text, prompt, shared

GREEDY = {"max_new_tokens": 24}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 1.3, "top_k": 40}


class Log:
    """Keeps every call; `kit` makes objects that write into it."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def add(self, *entry: Any) -> None:
        self.entries.append(entry)

    def kit(self, ends_at: int | None = None) -> dict[str, Any]:
        """`generate()`'s keywords, all objects new."""
        return {
            "logits_processor": [LoggedProcessor(self, "first"), CountingProcessor(), LoggedProcessor(self, "last")],
            "stopping_criteria": [LoggedCriterion(self, None), LoggedCriterion(self, ends_at)],
            "streamer": LoggedStreamer(self),
        }


class LoggedProcessor(LogitsProcessor):
    def __init__(self, log: Log, name: str) -> None:
        self._log, self._name = log, name

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = (tuple(input_ids[0].tolist()), tuple(input_ids.shape), input_ids.dtype)
        values = (tuple(scores.shape), scores.dtype, int(scores.argmax()), int(scores.isinf().sum()))
        self._log.add(self._name, *ids, *values)
        return scores


class LoggedCriterion(StoppingCriteria):
    """Ends the text at a length, with one bool a row."""

    def __init__(self, log: Log, ends_at: int | None) -> None:
        self._log, self._ends_at = log, ends_at

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        num_scores = None if scores is None else len(scores)
        self._log.add("criterion", tuple(input_ids[0].tolist()), num_scores, tuple(kwargs))
        return torch.tensor([self._ends_at is not None and input_ids.shape[1] >= self._ends_at])


class LoggedStreamer(BaseStreamer):
    def __init__(self, log: Log) -> None:
        self._log = log

    def put(self, value: torch.Tensor) -> None:
        self._log.add("put", tuple(value.shape), value.dtype, value.device, tuple(value.flatten().tolist()))

    def end(self) -> None:
        self._log.add("end")


class AnnouncedScript(Scripted):
    """Writes into the log when it is started."""

    def __init__(self, log: Log, text: torch.Tensor) -> None:
        super().__init__(text, [0, 3, 5])
        self._log = log

    def start(self, context: Context) -> DraftSession:
        self._log.add("the draft starts")
        return super().start(context)


def logs(call: dict[str, Any], ends_at: int | None = None, draft: Any = None) -> tuple[Log, Log]:
    """The logs of one call, unpatched and patched."""
    both_logs: list[Log] = []

    def make() -> dict[str, Any]:
        both_logs.append(Log())
        return call | both_logs[-1].kit(ends_at)

    both(shared(), draft or noisy(), prompt(6), make, draft_budget=5).assert_same().assert_drafted()
    return both_logs[0], both_logs[1]


@pytest.mark.parametrize("call", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_object_sees_vanillas_calls(call):
    """Cases 13, 18, 28, 30: the whole log of a call equals vanilla's, stateful objects included."""
    plain, fast = logs(call)
    assert plain.entries == fast.entries
    assert len(plain.entries) == 24 * (2 + 2 + 1) + 2


@pytest.mark.parametrize("new_tokens", range(2, 9))
def test_a_criterion_ends_the_call_at_every_point_of_a_block(new_tokens):
    """A custom criterion that fires in mid-block is the last thing that sees the text."""
    text = plain_text(shared(), prompt(6), logits_processor=[CountingProcessor()], **GREEDY)
    plain, fast = logs(GREEDY, ends_at=6 + new_tokens, draft=Scripted(text, [9]))
    assert plain.entries == fast.entries
    assert sum(entry[0] == "put" for entry in fast.entries) == 1 + new_tokens


def test_criteria_see_the_scores_so_far():
    """A criterion gets all scores up to its token when the call keeps scores, as vanilla's does."""
    plain, fast = logs(GREEDY | {"return_dict_in_generate": True, "output_scores": True})
    assert plain.entries == fast.entries
    counts = [entry[2] for entry in fast.entries if entry[0] == "criterion"]
    assert counts == [1 + index // 2 for index in range(48)]


def test_a_streamer_gets_the_prompt_then_one_token_at_a_time_then_the_end():
    """`put` takes the prompt `[1, length]`, then each token `[1]` on the CPU, and `end` comes once."""
    _, fast = logs(GREEDY)
    puts = [entry for entry in fast.entries if entry[0] == "put"]
    assert [entry[1] for entry in puts] == [(1, 6)] + 24 * [(1,)]
    assert all(entry[3] == torch.device("cpu") for entry in puts)
    assert [entry[0] for entry in fast.entries].count("end") == 1
    assert fast.entries[-1] == ("end",)


def test_processors_see_the_prefix_grow_by_one_token():
    """Cases 28, 30: scores come as `[1, vocab]` float32, and each prefix is the one before plus one token."""
    _, fast = logs(SAMPLED)
    calls = [entry for entry in fast.entries if entry[0] == "first"]
    assert all(entry[4] == (1, 97) and entry[5] == torch.float32 for entry in calls)
    for before, after in pairwise(calls):
        assert after[1][:-1] == before[1]


def test_the_first_token_is_streamed_before_the_draft_is_started():
    """Time to first token is vanilla's: no draft work comes before it."""
    log = Log()
    draft = AnnouncedScript(log, plain_text(shared(), prompt(6), **GREEDY))
    with hfspec.patched(shared(), draft, draft_budget=5):
        shared().generate(prompt(6), streamer=LoggedStreamer(log), **GREEDY)
    assert [entry[0] for entry in log.entries[:4]] == ["put", "put", "the draft starts", "put"]


def test_a_processor_that_draws_random_numbers_keeps_vanillas_stream():
    """Random numbers drawn by user code between two tokens make peeked noise stale, not the text wrong."""

    class Shaking(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + 0.5 * torch.randn(scores.shape)

    both(
        shared(), noisy(), prompt(6), SAMPLED | {"logits_processor": [Shaking()]}, draft_budget=5
    ).assert_same().assert_drafted()


def test_a_processor_that_writes_into_its_scores_changes_nothing_else():
    """Raw logits handed back are as vanilla's also where a processor works in place."""

    class InPlace(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, 10:20] = -torch.inf
            return scores

    call = GREEDY | {
        "logits_processor": [InPlace()],
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
    }
    both(shared(), noisy(), prompt(6), call, draft_budget=5).assert_same().assert_drafted()


@pytest.mark.parametrize("answer", [bool, lambda done: torch.tensor([done])], ids=["bool", "tensor"])
def test_a_criterion_may_answer_with_one_bool(answer):
    """Criteria that return a plain bool (lm-eval's) or a tensor end the call alike."""

    class AtLength(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            return answer(input_ids.shape[1] >= 15)

    call = GREEDY | {"stopping_criteria": [AtLength()]}
    pair = both(shared(), noisy(), prompt(6), call, draft_budget=5).assert_same().assert_drafted()
    assert pair.fast.shape == (1, 15)
