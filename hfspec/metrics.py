"""What happened: counted in the round, divided only when read.

Knows nothing of models; times come in as seconds and go out as milliseconds.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hfspec.proof import Proof
from hfspec.rounds import Round

#: Different reasons that are kept of all calls together.
_MAX_REASONS = 25


def ratio(numerator: float, denominator: float) -> float | None:
    """A quotient, or `None` where there is nothing to divide by."""
    return numerator / denominator if denominator else None


@dataclass
class Metrics:
    """Counts and seconds of one call, or of all calls added up.

    A rate is `None` while there is nothing to divide by.

    Attributes:
        calls: `generate()` calls counted in here.
        speculative_calls: those of them in which something was drafted.
        new_tokens: tokens generated, whichever way.
        steps: forwards after the prompt's that plain decoding would have made in hfspec's place.
        host_steps: the same for calls that the host decoded plainly; it made them.
        rounds: target forwards over a draft of at least one token.
        row_rounds: the same, counted for each row at work: equal to `rounds` without batches.
        plain_rounds: target forwards without a draft (the prompt's not counted).
        plain_reasons: why those were made, with how often.
        prefills: target forwards over a prompt.
        trials: times the target's forward over several tokens was proved, or disproved, by forwards over one each.
        trial_forwards: target forwards that this took besides those of rounds.
        catch_ups: target forwards after the last token, over what a cache that is handed back still lacked, or over
            the padding of rows that have ended.
        committed_tokens: tokens those rounds committed, recovered and bonus tokens included.
        drafted_tokens, accepted_tokens: draft tokens proposed / taken over.
        rejected_rounds: rounds in which a draft token was rejected.
        timed_draft_tokens: draft tokens whose time is in `draft_seconds`.
        drafted_by_depth, accepted_by_depth: draft tokens judged / accepted at depth 1, 2, …
        budget_histogram: rounds by number of tokens (nodes) drafted.
        draft_prefill_seconds: the draft source reading the prompt (or catching up after a pause).
        draft_seconds, verify_seconds, plain_seconds: drafting; target forwards with a draft; target forwards
            without one (those of trials among them), and whole calls that the host decoded plainly.
        prefill_seconds: target forwards over prompts.
        total_seconds: from the first prefill to the last token.
        ttft_seconds: from the start to the first token, one entry's worth per call.
        fallback_reasons: why calls (or their rest) ran plain, with how often.
        lockstep_reasons: why the rows of a batch had to keep in step, each waiting for the others, with how often.
        chain_reasons: why of trees only the first path was verified, with in how many calls.
    """

    calls: int = 0
    speculative_calls: int = 0
    new_tokens: int = 0
    steps: int = 0
    host_steps: int = 0
    rounds: int = 0
    row_rounds: int = 0
    plain_rounds: int = 0
    plain_reasons: Counter[str] = field(default_factory=Counter)
    prefills: int = 0
    trials: int = 0
    trial_forwards: int = 0
    catch_ups: int = 0
    committed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    timed_draft_tokens: int = 0
    rejected_rounds: int = 0
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    budget_histogram: Counter[int] = field(default_factory=Counter)
    draft_prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: float = 0.0
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    ttft_seconds: float = 0.0
    fallback_reasons: Counter[str] = field(default_factory=Counter)
    lockstep_reasons: Counter[str] = field(default_factory=Counter)
    chain_reasons: Counter[str] = field(default_factory=Counter)

    def count_round(self, round_: Round, why_plain: str = "") -> None:
        """Count one target forward after the prompt's; `why_plain` says why it was to have no draft, if so."""
        self.budget_histogram[round_.num_drafted] += 1
        if round_.num_drafted == 0:
            self.plain_rounds += 1
            self.plain_reasons[why_plain or "nothing was proposed"] += 1
            self.plain_seconds += round_.verify_seconds
            return
        self.rounds += 1
        self.row_rounds += len(round_.at_work)
        self.verify_seconds += round_.verify_seconds
        if round_.caught_up:
            self.draft_prefill_seconds += round_.draft_seconds
        else:
            self.draft_seconds += round_.draft_seconds
            self.timed_draft_tokens += round_.num_drafted
        for row in round_.at_work:
            outcome = round_.outcomes[row]
            self.committed_tokens += outcome.num_committed
            self.drafted_tokens += round_.draft.lengths[row]
            self.accepted_tokens += outcome.num_accepted
        self.rejected_rounds += any(each.num_accepted < each.num_judged for each in round_.outcomes)
        for _, outcome in round_.verdicts:
            self.drafted_by_depth.update(range(1, outcome.num_judged + 1))
            self.accepted_by_depth.update(range(1, outcome.num_accepted + 1))

    def add(self, other: "Metrics") -> None:
        """Add another call's counts to these."""
        for item in dataclasses.fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, item.name, mine + theirs)

    def forget_rare_reasons(self) -> None:
        """Keep the reasons few, the commonest by themselves and the others as one."""
        for reasons in (self.fallback_reasons, self.lockstep_reasons, self.chain_reasons, self.plain_reasons):
            if len(reasons) > 2 * _MAX_REASONS:
                kept = Counter(dict(reasons.most_common(_MAX_REASONS)))
                kept["other reasons"] += reasons.total() - kept.total()
                reasons.clear()
                reasons.update(kept)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ drafted tokens."""
        return ratio(self.accepted_tokens, self.drafted_tokens)

    @property
    def acceptance_by_depth(self) -> dict[int, float]:
        """Accepted ÷ judged tokens at depth 1, 2, …; a depth is judged only if all before it were accepted."""
        return {
            depth: self.accepted_by_depth[depth] / judged for depth, judged in sorted(self.drafted_by_depth.items())
        }

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens a row committed per target forward with a draft, recovered and bonus tokens included."""
        return ratio(self.committed_tokens, self.row_rounds)

    @property
    def rollback_rate(self) -> float | None:
        """Rounds with a rejection ÷ rounds."""
        return ratio(self.rejected_rounds, self.rounds)

    @property
    def target_forward_passes(self) -> int:
        """Target forwards that hfspec made; calls that the host decoded plainly are not in here."""
        return self.prefills + self.plain_rounds + self.rounds + self.trial_forwards + self.catch_ups

    @property
    def target_forward_passes_saved(self) -> int:
        """Forwards that plain decoding would have made beyond these."""
        return self.steps - self.rounds - self.plain_rounds - self.trial_forwards - self.catch_ups

    @property
    def draft_latency_ms(self) -> float | None:
        """Mean time of one draft token, of all rows together (rounds that also read the prompt left out)."""
        return ratio(1e3 * self.draft_seconds, self.timed_draft_tokens)

    @property
    def verify_latency_ms(self) -> float | None:
        """Mean time of a target forward over a draft."""
        return ratio(1e3 * self.verify_seconds, self.rounds)

    @property
    def overhead_seconds(self) -> float:
        """Time inside hfspec's loop but outside every model forward."""
        forwards = (
            self.prefill_seconds
            + self.verify_seconds
            + self.plain_seconds
            + self.draft_seconds
            + self.draft_prefill_seconds
        )
        return max(0.0, self.total_seconds - forwards)

    @property
    def overhead_ms(self) -> float | None:
        """Mean time outside the models per target forward after prefill."""
        return ratio(1e3 * self.overhead_seconds, self.rounds + self.plain_rounds)

    @property
    def ttft_ms(self) -> float | None:
        """Mean time to the first token."""
        return ratio(1e3 * self.ttft_seconds, self.prefills)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first (per token of calls that the host decoded plainly); rows count as one."""
        return ratio(1e3 * (self.total_seconds - self.ttft_seconds), self.steps + self.host_steps)

    @property
    def fallback_reason(self) -> str | None:
        """Why plain decoding ran (the commonest reason, where there are several), or `None`."""
        return max(self.fallback_reasons, key=self.fallback_reasons.__getitem__) if self.fallback_reasons else None

    def to_dict(self) -> dict[str, Any]:
        """All counts and all rates, ready for JSON."""
        counts = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        rates = {name: getattr(self, name) for name, kind in vars(type(self)).items() if isinstance(kind, property)}
        return counts | rates


@dataclass(frozen=True)
class Stats:
    """What `hfspec.stats(model)` returns: the last call and all calls since `patch()`.

    Reading any metric on it directly (`stats(model).fallback_reason`) reads the last call.
    Printed, it is a table.

    Attributes:
        proof: what was found last about the target's forwards over several tokens, if any were made.
    """

    last: Metrics
    total: Metrics
    proof: Proof | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.last, name)

    def to_dict(self) -> dict[str, Any]:
        """All as dicts, ready for JSON."""
        proof = None if self.proof is None else dataclasses.asdict(self.proof)
        return {"last": self.last.to_dict(), "total": self.total.to_dict(), "proof": proof}

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from hfspec.cli import stats_table  # rich is imported by who prints, not by `import hfspec`

        yield from stats_table.parts(self)

    def __str__(self) -> str:
        from hfspec.cli import stats_table

        return stats_table.as_text(self)
