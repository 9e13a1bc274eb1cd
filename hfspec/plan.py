"""`Plan`: how a call is decoded, worked out once from what the host has prepared. Rounds look nothing up."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from hfspec.config import Options
from hfspec.host.prepared import Prepared
from hfspec.host.verdicts import ROW_CRITERIA, apart_problem, lockstep_reason, tree_problem
from hfspec.sampling.processors import are_row_independent, sorts

#: Below so many scores a row, sorting them for states that are not reached costs nothing to speak of.
_FEW_SCORES = 4096


@dataclass(frozen=True)
class Plan:
    """What all rounds of a call have in common.

    Attributes:
        selection: how the target chooses.
        why_in_step: why the rows are committed together, token by token; `None` for a single row, and where each goes
            on at its own pace.
        is_ragged: whether the target's forwards are made by `RaggedTarget`.
        is_vectorised: whether all states of a round are settled at once; otherwise the walk does it.
        why_chains: why drafts must be chains; `None` where they may be trees.
        max_length: the length that no draft may reach beyond; `None` if there is none.
        last_draft_id: the id behind which nothing can be verified in the same forward, if there is one.
        unverifiable_ids: ids that no forward may hold besides those of the prompt: they stand for images, which a
            forward over the whole text would look for.
        pad_id: what finished rows get while others go on; `None` if vanilla goes on writing them.
    """

    selection: Literal["greedy", "seeded", "rejection"]
    why_in_step: str | None
    is_ragged: bool
    is_vectorised: bool
    why_chains: str | None
    max_length: int | None
    last_draft_id: int | None
    unverifiable_ids: tuple[int, ...]
    pad_id: int | None
    pad_is_readable: bool

    @property
    def is_in_step(self) -> bool:
        """Whether rows are committed together."""
        return self.why_in_step is not None

    def prepared_by_host(self, why: str, num_rows: int) -> "Plan":
        """The same where the host must prepare the target's forwards, rows in step, with the reason."""
        return replace(self, why_in_step=why if num_rows > 1 else None, is_ragged=False, why_chains=why)

    @classmethod
    def of(cls, prepared: Prepared, cache: Any, options: Options) -> "Plan":
        """Work it out.

        Args:
            cache: the one the call will use.
        """
        apart = apart_problem(prepared, cache)
        why_in_step = (lockstep_reason(prepared) or apart) if prepared.num_rows > 1 else None
        is_ragged = apart is None and why_in_step is None
        selection: Literal["greedy", "seeded", "rejection"] = "greedy"
        if prepared.generation_config.do_sample:
            selection = "seeded" if options.acceptance == "seeded" else "rejection"
        return cls(
            selection,
            why_in_step,
            is_ragged,
            _is_vectorised(prepared),
            tree_problem(prepared.model, cache) if is_ragged else apart or why_in_step,
            prepared.max_length,
            prepared.last_draft_id,
            prepared.media_token_ids if prepared.has_media and not prepared.uses_cache else (),
            prepared.pad_id,
            prepared.pad_is_readable,
        )


def _is_vectorised(prepared: Prepared) -> bool:
    """Whether processors and criteria are the host's own, and cheap for states that may not be reached."""
    processors = prepared.processors
    if not are_row_independent(processors) or not all(type(each) in ROW_CRITERIA for each in prepared.criteria):
        return False
    is_dear = prepared.device.type == "cpu" and prepared.vocab_size > _FEW_SCORES and any(map(sorts, processors))
    return not is_dear
