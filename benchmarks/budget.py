"""What the budget's choices bring, without a model or a clock: a real pair's verdicts, replayed at any prices.

`record` runs the pair once: the target writes an answer to each built-in prompt, and one forward of the draft over it
says which tokens it would have drafted and how sure it was. `replay` sends these texts through the controller, at
several prices of a draft token, and sets what it chooses beside fixed lengths. Behind a rejected token, which is not
accepted anyway, a draft is taken to be as sure as it was of the accepted text there.

    python benchmarks/budget.py record benchmarks/out/traces.json
    python benchmarks/budget.py replay benchmarks/results/traces.json
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.table import Table

from hfspec import DraftBudget
from hfspec.bench.machine import describe
from hfspec.bench.models import load_pair
from hfspec.bench.prompts import built_in, encode
from hfspec.budget.controller import Controller
from hfspec.budget.experience import Experience
from hfspec.drafts import Draft
from hfspec.rounds import Outcome, Outcomes, Round, RoundBudget
from hfspec.weights.packaged import DEFAULT_DRAFT, DEFAULT_TARGET

FIXED = (1, 2, 3, 5, 8, 16)
ORDERS = 5
#: Tokens of every prompt.
PROMPT = 200
#: Of a plain round, what the loop itself takes.
OVERHEAD = 0.01


@dataclass(frozen=True)
class Text:
    """One answer: for each token, whether the draft would have proposed it, and how sure it was of its own."""

    id: str
    category: str
    is_drafted: list[bool]
    confidences: list[float]


@dataclass(frozen=True)
class Prices:
    """In target forwards over one token: one draft token, one more token in a forward, the draft reading a prompt.

    A batch's rows share forwards: each makes them wider. Their prompts are read one by one.

    Attributes:
        widths: instead of `wider`, what forwards over some numbers of tokens were measured to cost.
        reads_confidence: whether the host can see it during a round.
    """

    draft: float
    wider: float
    reading: float
    rows: int = 1
    widths: tuple[tuple[int, float], ...] = ()
    reads_confidence: bool = True

    def verify(self, num_tokens: int) -> float:
        """One target forward over so many tokens, those of all rows."""
        if self.widths:
            return float(numpy.interp(num_tokens, *zip(*self.widths, strict=True)))
        return 1 + self.wider * (num_tokens - 1)

    def drafting(self, num_drafted: int, num_rows: int) -> float:
        """So many draft tokens in turn, for so many rows at once."""
        return self.draft * (1 + self.wider * (num_rows - 1)) * num_drafted


PRICES = (
    Prices(draft=0.04, wider=0.002, reading=0.1),
    Prices(draft=0.16, wider=0.005, reading=0.5),
    Prices(draft=0.25, wider=0.03, reading=1.5),
    Prices(draft=0.42, wider=0.03, reading=2.5),
    Prices(draft=0.6, wider=0.05, reading=3.0),
    Prices(draft=0.25, wider=0.06, reading=2.0, rows=4),  # two cores
    Prices(draft=0.25, wider=0.06, reading=2.0, rows=8),
    Prices(draft=0.2, wider=0.005, reading=0.5, rows=8),  # much wider hardware
)

#: Kinds of machine, as measured: forwards that cost in steps, or hardly more the wider they are.
AVX2 = ((1, 1.0), (2, 2.17), (4, 3.67), (5, 3.83), (13, 4.42), (21, 4.33))
AVX512 = ((1, 1.0), (2, 1.07), (3, 1.12), (4, 1.98), (10, 3.66), (17, 2.56))
AMX = ((1, 1.0), (8, 1.05), (16, 1.12), (32, 1.19))
MACHINES = {
    "AVX2": Prices(draft=0.08, wider=0, reading=1.0, widths=AVX2),
    "AVX2, dear draft": Prices(draft=0.35, wider=0, reading=2.0, widths=AVX2),
    "AVX512": Prices(draft=0.16, wider=0, reading=1.0, widths=AVX512),
    "AMX": Prices(draft=0.3, wider=0, reading=0.5, widths=AMX),
    "GPU, captured": Prices(draft=0.25, wider=0, reading=0.1, reads_confidence=False),
    "GPU, eager": Prices(draft=0.9, wider=0, reading=0.5, reads_confidence=False),
}
#: Kinds of draft: which share of the recorded ones is made wrong (below 0: of the wrong ones, right), and whether it is
#: as sure of these as of the others.
DRAFTS = {
    "very good": (-0.8, False),
    "good": (0.0, False),
    "medium": (0.25, False),
    "bad": (0.85, False),
    "bad and sure": (0.85, True),
}


class HuggingFace:
    """What assisted generation does by default: 20 tokens, fewer behind one it is less sure of than 0.4."""

    class _Budget(RoundBudget):
        def allows_another(self, *confidences: float) -> bool:
            return max(confidences) >= 0.4

    def next_round(self, lengths: Sequence[int], max_length: int) -> RoundBudget:
        """As `Controller.next_round`."""
        return self._Budget(max(0, min(20, max_length - min(lengths) - 1)), reads_confidence=True)

    def observe(self, round_: Round) -> None:
        """Nothing is learned."""


def record(num_tokens: int) -> list[Text]:
    """Run the pair in bf16 over the built-in prompts."""
    pair = load_pair(DEFAULT_TARGET, DEFAULT_DRAFT, torch.bfloat16)
    texts = []
    for prompt in built_in():
        inputs = encode(pair.tokenizer, [prompt], "cpu")
        with torch.no_grad():
            ids = pair.target.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
            num_new = ids.shape[1] - inputs["input_ids"].shape[1]
            logits = pair.draft(ids, logits_to_keep=num_new + 1).logits[0, :-1].float()
        best, chosen = logits.topk(2)
        doubts = (best[:, 1] - best[:, 0]).exp()
        is_drafted = (chosen[:, 0] == ids[0, -num_new:]).tolist()
        texts.append(Text(prompt.id, prompt.category, is_drafted, [round(1 - each, 6) for each in doubts.tolist()]))
    return texts


class Machine:
    """How much longer than usual things take: now and then something else has it for a while, or for a moment."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._left, self._level = 0, 1.0

    def slowness(self) -> float:
        """A factor for the next thing that is timed."""
        if self._left == 0 and self._random.random() < 0.03:
            self._left, self._level = self._random.randint(3, 60), self._random.uniform(1.3, 2.5)
        self._left = max(0, self._left - 1)
        factor = self._level if self._left else 1.0
        if self._random.random() < 0.1:
            factor *= self._random.uniform(1.2, 3)
        return factor


@dataclass
class Row:
    """How far one text of a batch is written. The first token is the prompt's."""

    text: Text
    num_written: int = 1

    @property
    def num_left(self) -> int:
        """Tokens still to be written."""
        return len(self.text.is_drafted) - self.num_written

    def verdict(self, num_drafted: int) -> Outcome:
        """Write what so many draft tokens bring."""
        drafted = self.text.is_drafted[self.num_written : self.num_written + num_drafted]
        num_accepted = drafted.index(False) if False in drafted else len(drafted)
        num_committed = min(num_accepted + 1, self.num_left)
        outcome = Outcome(min(len(drafted), num_accepted + 1), tuple(range(num_accepted)), (0,) * num_committed)
        self.num_written += outcome.num_committed
        return outcome


def speedup(
    texts: Sequence[Text],
    experience: Experience,
    prices: Prices,
    budget: DraftBudget,
    machine: Machine | None = None,
    controller: Controller | HuggingFace | None = None,
) -> float:
    """Against plain decoding of the same batch; what is learned stays in `experience`.

    Args:
        machine: on which the controller sees longer times; what counts are the usual ones.
        controller: instead of one that chooses by `budget`.
    """
    controller = controller or Controller(budget, experience, prices.reads_confidence, num_rows=len(texts))
    longest = max(len(text.is_drafted) for text in texts)
    rows, total, has_read = [Row(text) for text in texts], 0.0, False
    while at_work := [row for row in rows if row.num_left]:
        lengths = [PROMPT + row.num_written for row in at_work]
        budget_now = controller.next_round(lengths, max_length=PROMPT + longest)
        confidences: list[tuple[float, ...]] = []
        while len(confidences) < budget_now.num_tokens:
            here = len(confidences)
            # Behind a text's end there is nothing to be sure of.
            confidences.append(tuple([*row.text.confidences[row.num_written :], *[0.0] * 99][here] for row in at_work))
            if budget_now.reads_confidence and not budget_now.allows_another(*confidences[-1]):
                break
        num_drafted = len(confidences)
        is_reading = num_drafted > 0 and not has_read
        has_read |= is_reading
        ids = torch.zeros(len(at_work), num_drafted, dtype=torch.long)
        draft = Draft(ids, confidences=torch.tensor(confidences).T if confidences else None)
        outcomes = [row.verdict(num_drafted) for row in at_work]
        draft_seconds = prices.drafting(num_drafted, len(at_work)) + prices.reading * len(texts) * is_reading
        verify_seconds = prices.verify(len(at_work) * (1 + num_drafted))
        total += draft_seconds + verify_seconds + OVERHEAD
        if machine is not None:
            draft_seconds, verify_seconds = draft_seconds * machine.slowness(), verify_seconds * machine.slowness()
        seconds = draft_seconds + verify_seconds + OVERHEAD
        controller.observe(
            Round(
                draft,
                Outcomes(tuple(outcomes)),
                1 + num_drafted,
                draft_seconds,
                verify_seconds,
                seconds,
                at_work=range(len(at_work)),
                caught_up=PROMPT * is_reading,
            )
        )
    return (longest - 1) * (prices.verify(len(texts)) + OVERHEAD) / total


def replay(
    texts: Sequence[Text], prices: Prices, budget: DraftBudget, orders: int = ORDERS, is_busy: bool = False
) -> list[float]:
    """Speed-ups of all texts, one batch after the other with what was learned before, in several orders."""
    found = []
    for order in range(orders):
        experience, shuffled, machine = Experience(), list(texts), Machine(order) if is_busy else None
        random.Random(order).shuffle(shuffled)
        for start in range(0, len(shuffled) - prices.rows + 1, prices.rows):
            found.append(speedup(shuffled[start : start + prices.rows], experience, prices, budget, machine))
    return found


def table(texts: Sequence[Text]) -> Table:
    """Geometric means at each price; for what the controller chooses, the worst text, and a busy machine, too."""
    lengths = (f"fixed {length}" for length in FIXED)
    shown = Table("draft", "wider", "reading", "rows", *lengths, "auto", "worst", "auto, busy machine")
    for prices in PRICES:
        fixed = [replay(texts, prices, DraftBudget(max_tokens=length, policy="fixed"), orders=1) for length in FIXED]
        chosen = replay(texts, prices, DraftBudget())
        busy = replay(texts, prices, DraftBudget(), is_busy=True)
        cells = [*map(statistics.geometric_mean, (*fixed, chosen)), min(chosen), statistics.geometric_mean(busy)]
        costs = (prices.draft, prices.wider, prices.reading, prices.rows)
        shown.add_row(*map(str, costs), *(f"{cell:.2f}×" for cell in cells))
    return shown


def weakened(texts: Sequence[Text], share: float, is_sure: bool) -> list[Text]:
    """The same texts by a draft that gets so large a share more wrong, and mostly knows unless it `is_sure`."""
    chance, found = random.Random(0), []
    for text in texts:
        text = replace(text, is_drafted=[right or chance.random() < -share for right in text.is_drafted])
        is_wrong = [chance.random() < share for _ in text.is_drafted]
        unsure = [chance.uniform(0.2, 0.9) if wrong and not is_sure else 1.0 for wrong in is_wrong]
        drafted = [right and not wrong for right, wrong in zip(text.is_drafted, is_wrong, strict=True)]
        confidences = [sure * factor for sure, factor in zip(text.confidences, unsure, strict=True)]
        found.append(replace(text, is_drafted=drafted, confidences=confidences))
    return found


def machines(texts: Sequence[Text]) -> Table:
    """On each machine, with each draft: a pair's first call, and its worst; later calls; and what others make of it."""
    names = ("first call", "worst", "later calls", "worst", "best fixed", "its length", "Hugging Face")
    shown, auto = Table("machine", "draft", *names), DraftBudget()
    for machine, prices in MACHINES.items():
        for draft, kind in DRAFTS.items():
            weak = weakened(texts, *kind)
            first = [speedup([text], Experience(), prices, auto) for text in weak]
            later, fixed = replay(weak, prices, auto, orders=2)[1:], {0: 1.0}
            for length in FIXED:
                budget = DraftBudget(max_tokens=length, policy="fixed")
                fixed[length] = statistics.geometric_mean(replay(weak, prices, budget, orders=1))
            best = max(fixed, key=lambda length: fixed[length])
            host = [speedup([text], Experience(), prices, auto, controller=HuggingFace()) for text in weak]
            cells = [statistics.geometric_mean(first), min(first), statistics.geometric_mean(later), min(later)]
            told = (*(f"{cell:.2f}×" for cell in (*cells, fixed[best])), str(best))
            shown.add_row(machine, draft, *told, f"{statistics.geometric_mean(host):.2f}×")
    return shown


def read(path: Path) -> list[Text]:
    """The texts that `record` wrote."""
    return [Text(**each) for each in json.loads(path.read_text())["texts"]]


def main() -> None:
    """Record or replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "replay"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, when recording")
    options = parser.parse_args()
    if options.command == "record":
        conditions = describe("python benchmarks/budget.py") | {"target": DEFAULT_TARGET, "draft": DEFAULT_DRAFT}
        started = time.perf_counter()
        texts = record(options.tokens)
        conditions["seconds"] = time.perf_counter() - started
        options.path.parent.mkdir(parents=True, exist_ok=True)
        options.path.write_text(
            json.dumps({"conditions": conditions, "texts": [asdict(each) for each in texts]}) + "\n"
        )
    texts = read(options.path)
    Console(width=160).print(table(texts), machines(texts))


if __name__ == "__main__":
    main()
