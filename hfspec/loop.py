"""THE round: draft → verify → accept → commit, one target forward each.

What a call may do differently is decided before, in `decode`, and stands in its `Plan`.
"""

import time
from dataclasses import dataclass

from hfspec.accept.vectorised import Vectorised
from hfspec.accept.walk import Walk
from hfspec.budget.controller import Controller
from hfspec.budget.timing import measured
from hfspec.draft.guard import Guard
from hfspec.drafts import Draft
from hfspec.host import forwards
from hfspec.metrics import Metrics
from hfspec.plan import Plan
from hfspec.rounds import Round, RoundBudget
from hfspec.texts import Texts
from hfspec.verification.fitting import fitted
from hfspec.verification.proving import Proving
from hfspec.verification.ragged import RaggedTarget
from hfspec.verification.target import Target


@dataclass
class Loop:
    """One call's parts, and the rounds that they make together.

    Attributes:
        source: proposes tokens.
        target: reads them; `proving` makes its forwards, and proves those that are not proved yet.
        acceptor: settles what of them becomes text.
        controller: says how many to draft.
    """

    plan: Plan
    texts: Texts
    source: Guard
    target: Target
    proving: Proving
    acceptor: Walk | Vectorised
    controller: Controller
    metrics: Metrics

    def write(self) -> None:
        """Write the texts to their ends."""
        started = time.perf_counter()
        try:
            self._prefill()
            with forwards.decoding(self.target.model):
                while self._goes_on():
                    self._round()
        finally:
            num_new = [length - self.texts.num_prompt for length in self.texts.all_lengths()]
            self.metrics.new_tokens += sum(num_new)
            self.metrics.steps += max(0, max(num_new) - 1)
            self.metrics.total_seconds += time.perf_counter() - started

    def _prefill(self) -> None:
        """Read the prompt and commit the first token: before any drafting, as soon as in vanilla."""
        started = time.perf_counter()
        with measured(self.texts.device) as prefill:
            verified = self.target.prefill(self.texts.together())
        with forwards.decoding(self.target.model):
            self.acceptor.begin(verified)
        self.metrics.prefills += 1
        self.metrics.prefill_seconds += prefill.seconds
        self.metrics.ttft_seconds += time.perf_counter() - started

    def _round(self) -> None:
        """Draft, verify, accept, commit."""
        started = time.perf_counter()
        at_work = self._at_work()

        budget = self._budget()
        with measured(self.texts.device) as draft_time:
            draft = self._fitted(self.source.propose(self.texts, budget))
        with measured(self.texts.device) as verify_time:
            verified = self.proving.verify(self.texts, draft)
        draft = draft.cut([verified.num_drafted] * draft.num_rows)  # nothing, where a proof has failed
        outcomes = self.acceptor.settle(draft, verified)
        self.target.keep(outcomes)
        self.source.read(self.texts, outcomes)

        proof_seconds = self.proving.single_seconds
        round_ = Round(
            draft,
            outcomes,
            num_read=verified.num_read,
            draft_seconds=draft_time.seconds,
            verify_seconds=verify_time.seconds - sum(proof_seconds),
            seconds=time.perf_counter() - started - sum(proof_seconds),
            is_in_step=self.plan.is_in_step,
            at_work=at_work,
            caught_up=self.source.caught_up,
        )
        self.metrics.count_round(round_, self.target.problem or budget.why_plain)
        self.controller.observe(round_, proof_seconds)

    def _goes_on(self) -> bool:
        """Whether some row goes on; rows that have ended by themselves leave target and draft."""
        rows = [row for row, has_ended in enumerate(self.texts.has_ended) if not has_ended]
        if isinstance(self.target, RaggedTarget) and 0 < len(rows) < len(self.texts.rows):
            self.target.select(rows)
            self.source.select(rows)
            self.texts.select(rows)
        return bool(rows)

    def _at_work(self) -> list[int]:
        """The rows that are written, and not filled up with padding."""
        return [row for row, ended in enumerate(self.texts.has_ended) if not ended or self.plan.pad_id is None]

    @property
    def _why_chains(self) -> str | None:
        return self.plan.why_chains or self.proving.why_chains

    def _budget(self) -> RoundBudget:
        """What the round may draft: nothing where nothing can be verified."""
        if self.target.problem is not None:
            return RoundBudget(0, why_plain=self.target.problem)
        if self.plan.is_in_step and not self.plan.pad_is_readable and any(self.texts.has_ended):
            return RoundBudget(0, why_plain="a row that has ended is fed a padding id that the model does not have")
        budget = self.controller.next_round(
            self.texts.lengths, self.plan.max_length, self.target.num_unread, self.proving.is_due
        )
        budget.allows_trees = self._why_chains is None
        return budget

    def _fitted(self, draft: Draft) -> Draft:
        """What of a draft can be verified: of a tree its first path, where it must be a chain."""
        if draft.parents is not None and self._why_chains is not None:
            chains = draft.first_paths()
            if chains.lengths != draft.lengths:
                self.metrics.chain_reasons[self._why_chains] = 1  # once a call
            draft = chains
        return fitted(draft, self.texts, self.plan)
