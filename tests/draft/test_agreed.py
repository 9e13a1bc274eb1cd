"""Tensor parallel: all processes make the same forwards, also when the draft fails in one of them."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

import hfspec
from hfspec import Context, Draft, DraftError, Outcomes, RoundBudget, Texts
from hfspec.draft.agreed import Agreed
from hfspec.draft.base import Session
from tests.models import VOCAB, FunctionSource, build, plain_text, prompt, rows

NEW = {"max_new_tokens": 12}


def processes(number: int) -> list[Callable[[bool], bool]]:
    """What `all_reduce` is to processes, for threads: each waits for all the others."""
    flags = [False] * number
    together = threading.Barrier(number, timeout=60)

    def any_of(rank: int, has_happened: bool) -> bool:
        flags[rank] = has_happened
        together.wait()
        result = any(flags)
        together.wait()
        return result

    return [lambda flag, rank=rank: any_of(rank, flag) for rank in range(number)]


class Rubbish(Session):
    """A batched session of somebody's own."""

    def propose(self, texts: Texts, budget: RoundBudget) -> Draft:
        return Draft(torch.full((len(texts.rows), 1), 10**6))

    def read(self, texts: Texts, outcomes: Outcomes) -> None:
        """Nothing to learn."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing to forget."""

    def stop(self) -> None:
        """Nothing to release."""


@pytest.mark.parametrize("failing", ["propose", "observe", "start", "rubbish", "nothing"])
def test_a_failure_in_one_process_ends_drafting_in_all(failing):
    """Both make as many rounds of as many tokens, to the end, and the text is vanilla's."""
    ranks = processes(2)
    models = [build(), build()]
    widths: list[object] = [None, None]
    texts: list[torch.Tensor | None] = [None, None]
    reasons: list[str | None] = [None, None]
    expected = plain_text(build(), prompt(), **NEW)

    class Source(FunctionSource):
        def start(self, context):
            session = super().start(context)
            if failing == "start" and self.rank == 1:
                raise RuntimeError("this rank alone")
            if failing == "observe" and self.rank == 1:
                session.observe = self.fail
            return session

        def start_batch(self, call):
            return Rubbish() if failing == "rubbish" and self.rank == 1 else super().start_batch(call)

        def fail(self, *_):
            raise RuntimeError("this rank alone")

    def work(rank: int) -> None:
        def propose(ids, budget, number):
            if failing == "propose" and rank == 1 and number == 3:
                raise RuntimeError("this rank alone")
            return Draft(rows(5, 6)[:, : budget.num_tokens])

        source = Source(propose)
        source.rank = rank
        model = models[rank]
        model._tp_size = 2
        hfspec.patch(model, Agreed(source, ranks[rank]), draft_budget=2)
        texts[rank] = model.generate(prompt(), **NEW)
        last = hfspec.stats(model).last
        widths[rank] = last.rounds, last.drafted_tokens, last.accepted_tokens
        reasons[rank] = last.fallback_reason

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert widths[0] == widths[1]
    assert widths[0] is not None
    assert all(torch.equal(text, expected) for text in texts)
    if failing == "nothing":
        assert reasons == [None, None]
    else:
        assert "another of the processes" in reasons[0]
        assert ("vocabulary" if failing == "rubbish" else "this rank alone") in reasons[1]


def test_one_row_is_a_batch_of_one():
    """A row that is begun by itself gets what the source inside proposes, and its failure."""
    source = FunctionSource(lambda ids, budget, number: Draft(rows(5, 6)) if number == 1 else None)
    session = Agreed(source, lambda has_happened: has_happened).start(Context(VOCAB, torch.device("cpu")))
    assert session.propose(prompt(), RoundBudget(2)).token_ids.tolist() == [[5, 6]]
    with pytest.raises(DraftError, match="NoneType"):
        session.propose(prompt(), RoundBudget(2))
