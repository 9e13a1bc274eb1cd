"""Drafts that others have made: whether they are what they should be, and of single rows one. Knows no source."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from hfspec.drafts import Draft
from hfspec.errors import DraftError


def checked(draft: object, num_rows: int, max_tokens: int, vocab_size: int, device: torch.device) -> Draft:
    """The draft, if it is one of `num_rows` rows and at most `max_tokens` tokens each, below `vocab_size`.

    Raises:
        DraftError: it is not, and how.
    """
    if not isinstance(draft, Draft) or not isinstance(draft.token_ids, torch.Tensor):
        raise DraftError(f"it proposed a {type(draft).__name__}, not an hfspec Draft of a tensor of token ids")
    ids = draft.token_ids
    if ids.dim() != 2 or ids.shape[0] != num_rows or ids.dtype != torch.long:
        wanted = f"[{num_rows}, num_tokens] int64"
        raise DraftError(f"it proposed ids of shape {list(ids.shape)} and {ids.dtype}; {wanted} is needed")
    if ids.shape[1] > max_tokens:
        raise DraftError(f"it proposed {ids.shape[1]} tokens where at most {max_tokens} were asked for")
    if ids.device != device:
        raise DraftError(f"it proposed ids on {ids.device}; the target's are on {device}")
    is_node = ids >= 0
    is_last = num_rows > 1 and not bool((is_node[:, 1:] & ~is_node[:, :-1]).any())  # -1 is for rows with fewer
    if ids.numel() and not bool((((ids == -1) & is_last) | (is_node & (ids < vocab_size))).all()):
        raise DraftError(f"it proposed ids outside the target's vocabulary of {vocab_size}")
    _check_confidences(draft.confidences, ids)
    _check_parents(draft.parents, ids)
    if draft.probs is not None:
        _check_probs(draft.probs, is_node, (*ids.shape, vocab_size))
    lengths = _checked_lengths(draft.lengths, ids)
    counts = is_node.sum(dim=1).tolist() if num_rows > 1 else lengths
    whole = Draft(ids, draft.parents, draft.probs, draft.confidences)  # with a depth that holds
    return whole.cut([min(pair) for pair in zip(lengths, counts, strict=True)])


def _checked_lengths(lengths: Any, ids: torch.Tensor) -> list[int]:
    num_rows, num_nodes = ids.shape
    found = list(lengths) if isinstance(lengths, list | tuple) else []
    if len(found) != num_rows or not all(isinstance(each, int) and 0 <= each <= num_nodes for each in found):
        raise DraftError(f"its lengths {lengths} are no {num_rows} numbers from 0 to {num_nodes}, one a row")
    return found


def _check_confidences(confidences: Any, ids: torch.Tensor) -> None:
    if confidences is None:
        return
    if not isinstance(confidences, torch.Tensor) or confidences.is_complex() or not bool(confidences.isfinite().all()):
        raise DraftError(f"its confidences {confidences} are not finite numbers")
    if confidences.shape != ids.shape:
        raise DraftError(f"it proposed ids of shape {list(ids.shape)} with confidences of {list(confidences.shape)}")


def _check_parents(parents: Any, ids: torch.Tensor) -> None:
    if parents is None:
        return
    if not isinstance(parents, torch.Tensor) or parents.shape != ids.shape or parents.dtype != torch.long:
        raise DraftError(f"its parents are no {list(ids.shape)} int64 tensor: an index for each token, -1 for the root")
    if parents.device != ids.device:
        raise DraftError(f"its parents are on {parents.device}; its ids are on {ids.device}")
    own = torch.arange(ids.shape[1], device=parents.device)
    if not bool(((parents >= -1) & (parents < own)).all()):
        raise DraftError("a node's parent must be -1 (the root) or a node before it")


def _check_probs(probs: torch.Tensor, is_node: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(probs.shape) != wanted:
        raise DraftError(f"its probabilities have shape {list(probs.shape)}; {list(wanted)} is needed")
    # A distribution that does not sum to 1, nan included, would bias what is accepted.
    is_one = ((probs.sum(dim=-1) - 1).abs() < 1e-3) & (probs >= 0).all(dim=-1)
    if not bool((is_one | ~is_node).all()):
        raise DraftError("its probabilities are not a distribution: each row must be 0 or more and sum to 1")


def joined(drafts: Sequence[Draft]) -> Draft:
    """The rows' drafts `[1, n]` as one `[rows, most]`, those that are shorter filled up with nodes that are none."""
    if len(drafts) == 1:
        return replace(drafts[0], depth=_depth(drafts[0]))
    most = max(draft.num_tokens for draft in drafts)

    def filled(values: Sequence[Any], value: float, like: Any) -> torch.Tensor | None:
        """One tensor `[rows, most, …]` of the rows' own; rows without any get `like` of their length."""
        if all(each is None for each in values):
            return None
        whole = [like(draft) if each is None else each for each, draft in zip(values, drafts, strict=True)]
        behind = [(*(0, 0) * (each.dim() - 2), 0, most - each.shape[1]) for each in whole]
        return torch.cat([pad(each, room, value=value) for each, room in zip(whole, behind, strict=True)])

    token_ids = filled([draft.token_ids for draft in drafts], -1, None)
    parents = filled([draft.parents for draft in drafts], -1, _chain_of)
    probs = filled([draft.probs for draft in drafts], 0.0, _certain(drafts))
    is_sure = all(draft.confidences is not None or not draft.num_tokens for draft in drafts)
    confidences = filled([draft.confidences for draft in drafts], 0.0, _none_of) if is_sure else None
    lengths = tuple(draft.num_tokens for draft in drafts)
    if token_ids is None:
        raise DraftError("no row has a draft")
    depth = max(map(_depth, drafts))
    return Draft(token_ids, parents, probs, confidences, lengths, depth)


def _depth(draft: Draft) -> int:
    """The most nodes on a path."""
    if draft.parents is None:
        return draft.num_tokens
    depths = [0]
    for parent in draft.parents[0].tolist():
        depths.append(1 + depths[parent + 1])
    return max(depths)


def _chain_of(draft: Draft) -> torch.Tensor:
    """The parents of a chain."""
    return torch.arange(-1, draft.num_tokens - 1, device=draft.token_ids.device)[None]


def _none_of(draft: Draft) -> torch.Tensor:
    return torch.zeros(1, draft.num_tokens)


def _certain(drafts: Sequence[Draft]) -> Any:
    """For a row whose tokens were chosen, not drawn: distributions with all weight on them."""

    def of(draft: Draft) -> torch.Tensor:
        like = next(each.probs for each in drafts if each.probs is not None)
        probs = like.new_zeros(1, draft.num_tokens, like.shape[2])
        return probs.scatter_(2, draft.token_ids[..., None], 1.0)

    return of
