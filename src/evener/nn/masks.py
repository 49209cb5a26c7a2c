"""Interprets attention masks that a model built for this rank's positions as masks of the whole sequence.

A model that sees only this rank's positions builds a mask of (own length x own length), which does not cover the other
ranks' keys. But the masks that models build combine two rules: later positions are hidden (causal), and some keys are
hidden from all queries. Both rules also apply to the whole sequence::

    piece of rank 0      causal        hidden keys           a rank with one position cannot tell a causal mask from
    . # # #              . # # #       . . # .               none, so the ranks exchange what they found
    . . # #         =    . . # #   +   . . # .
    . . # #              . . . #       . . # .
    . . # .              . . . .       . . # .
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evener.errors import ConfigurationError
from evener.nn import collectives_no_grad as messages
from evener.nn.sequence_layout import DividedSequence

_EITHER, _PLAIN, _CAUSAL, _OTHER = range(4)
"""Kinds of masks that a rank finds: either is possible, not causal, causal, neither."""


def bias_of(mask: Tensor) -> Tensor:
    """Converts a mask to a bias that is added to scores. In a boolean mask, False hides a key (-inf). In a mask of
    numbers, values near the lowest of the type become -inf.

    Raises:
        ConfigurationError: If the mask requires a gradient.
    """
    if mask.requires_grad:
        raise ConfigurationError(
            "attention: a learned bias of the scores would have to be known for the positions of all ranks; strategy "
            "'context' takes masks without gradient only"
        )
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -math.inf)


def understood(mask: Tensor, shape: torch.Size, sequence: DividedSequence) -> tuple[bool, Tensor]:
    """Splits a mask into its rules: returns True if it is causal, and the bias of each key (batch, own length).

    All ranks must call this together.

    Args:
        mask: A bias for scores, of any shape that broadcasts to (batch, heads, own length, own length).
        shape: The shape of the queries, (batch, heads, own length, width).

    Raises:
        ConfigurationError: If the mask has another shape. On all ranks, if any rank's mask is not made of these rules,
            or no rank can tell if it is causal.
    """
    size = shape[2]
    if mask.dim() > 4 or [*mask.shape][-2:] not in ([size, size], [1, size]):
        raise ConfigurationError(
            f"attention: a mask of shape {tuple(mask.shape)} is neither (..., {size}, {size}) nor (..., 1, {size}), "
            f"queries and keys of this rank's {size} positions"
        )
    mask = mask.reshape([1] * (4 - mask.dim()) + [*mask.shape])
    if mask.shape[2] > 1:
        sequence.square_masks.add(size)
    row = mask[:, 0, -1] if mask.shape[2] else mask.new_zeros(mask.shape[0], size)
    kinds = _kinds_on_all_ranks(_kind(mask, row), mask.device, sequence)
    if _OTHER in kinds or {_PLAIN, _CAUSAL} <= kinds:
        raise ConfigurationError(
            "attention: a mask that is neither causal nor hides keys from all queries alike says nothing of the "
            "positions of other ranks; use one of these, or a strategy that leaves sequences whole"
        )
    if kinds == {_EITHER}:
        raise ConfigurationError(
            f"attention: in a sequence of {sequence.length} positions no rank can tell from its piece whether a mask "
            "is causal; say is_causal=True in place of a mask, or use fewer ranks"
        )
    return _CAUSAL in kinds, row.expand(shape[0], size)


def _kinds_on_all_ranks(kind: int, device: torch.device, sequence: DividedSequence) -> set[int]:
    """Exchanges and returns the kinds of masks that the ranks found."""
    own = torch.tensor([kind], device=device)
    return set(messages.gathered(own, 0, [1] * sequence.group.size(), sequence.group).tolist())


def _kind(mask: Tensor, row: Tensor) -> int:
    """Returns the kind of the mask. ``row`` is the last query's: it shows which keys are hidden from all queries."""
    if mask.shape[1] > 1 and not torch.equal(mask, mask[:, :1].expand_as(mask)):
        return _OTHER
    if mask.shape[2] == 1:
        return _PLAIN if mask.shape[3] > 1 else _EITHER
    plain = row[:, None, :].expand(-1, mask.shape[2], -1)
    after = torch.ones(mask.shape[2:], dtype=torch.bool, device=mask.device).triu(1)
    is_plain = torch.equal(mask[:, 0], plain)
    is_causal = torch.equal(mask[:, 0], plain.masked_fill(after, -math.inf))
    if is_plain and is_causal:
        return _EITHER
    return _PLAIN if is_plain else _CAUSAL if is_causal else _OTHER
