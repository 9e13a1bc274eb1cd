"""Proves a target's forwards over several tokens before a token is chosen by one.

A round that is to be proved reads the first tokens twice: one by one, as vanilla would, and then all in one forward
with the others. If the logits agree but for rounding, that forward serves the round, and later ones are believed;
if not, the round commits one token, from a forward over it alone, and the model is written plainly from there on.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from hfspec.budget.timing import measured
from hfspec.drafts import Draft
from hfspec.host.trial import Fingerprint, Trial, arithmetic, difference, rounding
from hfspec.metrics import Metrics
from hfspec.proof import Proof
from hfspec.rounds import Verified
from hfspec.sampling.devices import Generators, Watch
from hfspec.texts import Texts
from hfspec.verification.target import Target, TooFewLogitsError

logger = logging.getLogger("hfspec")

#: Tokens that are read one by one: the second sees the first, in the same forward or in the cache.
_NUM_STEPS = 2
#: How wide a forward may be that is proved for its own sake.
_FIRST_WIDTH = 16
#: What is against a model whose forwards do.
_DRAWS = "the model draws random numbers in its forwards"
#: What is against a model whose inputs follow from every single forward.
_GROWS = "the inputs of its forwards depend on what every forward before has given"
#: Letters of somebody else's error that are repeated.
_MAX_LETTERS = 200


class Proving:
    """A target's forwards in one call, each proved if it has to be.

    Args:
        fingerprint: of the model as it stands.
        num_before: places taken before the text begins.

    Attributes:
        single_seconds: of each forward over one token that the last `verify` made for a proof, besides the forward that
            serves the round.
        is_due: whether the first draft brings a proof, as nothing was known of the model as it stands.
        why_chains: why drafts must be chains, as a tree's forward has shown; `None` if none has.
    """

    def __init__(
        self, target: Target, trial: Trial, fingerprint: Fingerprint, metrics: Metrics, num_before: int = 0
    ) -> None:
        self._target = target
        self._trial = trial
        self._fingerprint = fingerprint
        self._metrics = metrics
        self._num_before = num_before
        self.single_seconds: list[float] = []
        self.is_due = trial.of(fingerprint) is None
        trees = trial.problem(fingerprint.for_trees)
        self.why_chains: str | None = None if trees is None else f"as a tree, {trees}"

    @property
    def widest(self) -> int:
        """The width of a forward over chains that need not be proved for its width; or that may be, where none was."""
        known = self._trial.of(self._fingerprint)
        return _FIRST_WIDTH if known is None else known.reach

    def verify(self, texts: Texts, draft: Draft) -> Verified:
        """The target's `verify`; where that turns out wrong, the logits behind the texts alone, and no more.

        `target.problem` says then what was seen.

        Raises:
            Exception: whatever a forward raises that vanilla would make, too.
        """
        self.single_seconds = []
        width = 1 + draft.num_tokens
        if width == 1:
            return self._target.verify(texts, draft)
        num_before = self._target.num_forwards
        at_hand = Proof(self._num_before + max(texts.lengths) + draft.num_tokens, width)
        known = self._trial.of(self._fingerprint_of(draft))
        if known is None or not known.covers(at_hand.length, width):
            verified = self._prove(texts, draft, at_hand)
        else:
            try:
                verified = self._target.verify(texts, draft)
            except TooFewLogitsError as error:
                verified = self._give_up(texts, draft, replace(at_hand, problem=str(error)))
        self._metrics.trial_forwards += self._target.num_forwards - num_before - 1
        return verified

    def _fingerprint_of(self, draft: Draft) -> Fingerprint:
        """Of the model as it stands, for chains or for trees."""
        return self._fingerprint if draft.parents is None else self._fingerprint.for_trees

    def _prove(self, texts: Texts, draft: Draft, at_hand: Proof) -> Verified:
        target, device = self._target, texts.device
        self._metrics.trials += 1
        self.is_due = False
        generators = Generators(device)
        singles = []
        for index in range(min(_NUM_STEPS, at_hand.width)):
            with measured(device) as step:
                singles.append(target.step(texts, draft, index))
            self.single_seconds.append(step.seconds)
        self._metrics.plain_seconds += sum(self.single_seconds)
        if self._has_drawn(generators, texts, draft):
            generators.put_back()
            return self._give_up(texts, draft, replace(at_hand, problem=_DRAWS))
        try:
            verified = target.verify(texts, draft)
        except Exception as error:  # it is the model's, and says that the model takes no such forward
            return self._after(error, texts, draft, at_hand)
        proof = _compared(target.model, singles, verified, draft, at_hand)
        if proof.problem is None and not target.grows_alike([*singles, verified]):
            proof = replace(proof, problem=_GROWS)
        if proof.problem is not None:
            return self._give_up(texts, draft, proof)
        self._trial.note(self._fingerprint_of(draft), proof)
        return verified

    def _has_drawn(self, generators: Generators, texts: Texts, draft: Draft) -> bool:
        """Whether the model has drawn random numbers since; where it may have been another thread, it is watched."""
        if not generators.have_moved:
            return False
        if generators.are_ours:
            return True
        self._target.rewind()
        watch = Watch()  # type: ignore[no-untyped-call]
        with watch, suppress(Exception):  # compiled models may not bear it
            self._target.step(texts, draft, 0)
        self._target.rewind()
        return watch.has_drawn

    def _after(self, error: Exception, texts: Texts, draft: Draft, at_hand: Proof) -> Verified:
        """An error that comes again is that of a forward over several tokens; one that does not would be vanilla's."""
        if not isinstance(error, TooFewLogitsError | torch.OutOfMemoryError):
            self._target.rewind()
            try:
                self._target.verify(texts, draft)
            except Exception as again:
                logger.debug("hfspec: a forward over several tokens failed again", exc_info=again)
            else:
                self._target.rewind()
                raise error
        problem = str(error)
        if not isinstance(error, TooFewLogitsError):
            problem = f"its forward over {at_hand.width} tokens raises {type(error).__name__}: {problem[:_MAX_LETTERS]}"
        is_lasting = not isinstance(error, torch.OutOfMemoryError)
        return self._give_up(texts, draft, replace(at_hand, problem=problem), is_lasting)

    def _give_up(self, texts: Texts, draft: Draft, proof: Proof, is_lasting: bool = True) -> Verified:
        """Nothing is drafted any more in this call, nor in others while the model stands as it does; or no trees."""
        if draft.parents is None:
            self._target.problem = proof.problem
        else:
            self.why_chains = f"as a tree, {proof.problem}"
        if is_lasting:
            self._trial.note(self._fingerprint_of(draft), proof)
        self._target.rewind()
        return self._target.step(texts, draft, 0)


def _compared(
    model: PreTrainedModel,
    singles: Sequence[Verified],
    verified: Verified,
    draft: Draft,
    at_hand: Proof,
) -> Proof:
    """What comes of the logits of forwards over one token each, and of one forward over all of them and more."""
    one_by_one = torch.stack([each.logits[:, -1] for each in singles], dim=1)
    at_once = verified.logits[:, : len(singles)]
    name, share = arithmetic(model, at_once)
    apart, bounds = difference(at_once, one_by_one), rounding(one_by_one, share)
    num_drafted = torch.tensor(draft.lengths, device=apart.device)[:, None]
    is_read = torch.arange(len(singles), device=apart.device) <= num_drafted
    row, index = divmod(int((apart - bounds).masked_fill(~is_read, -torch.inf).argmax()), len(singles))
    most, bound = float(apart[row, index]), float(bounds[row, index])
    problem = None
    if most > bound:
        problem = (
            f"its forward over {at_hand.width} tokens does not give what forwards over one give: at its token "
            f"{index + 1} of a text of {at_hand.length}, logits differ by up to {most:.3g}, where {name} may round "
            f"by {bound:.3g}"
        )
    return replace(
        at_hand, difference=most, tolerance=bound, arithmetic=name, num_positions=len(singles), problem=problem
    )
