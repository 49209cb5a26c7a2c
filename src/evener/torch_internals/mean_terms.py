"""Private names of backward graphs: what autograd keeps of a mean, which tells over how many terms it was taken.

- ``_saved_total_weight`` of the node of a cross entropy is the sum of the weights of its terms: their number, without
  weights of classes, and without terms that are ignored. ``_saved_reduction`` is 1 for a mean and 2 for a sum.
- ``_saved_self_sym_numel`` of a mean is the number of its elements, and ``_saved_indices`` of an indexed tensor are the
  indices, or masks.
- ``_saved_other`` of a quotient is the divisor.

PyTorch's notes on autograd document that nodes have such attributes. Their names are those of derivatives.yaml, and a
name that is not there tells nothing.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_MOST_NODES = 64
_MEAN, _SUM = 1, 2
_CROSS_ENTROPIES = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_QUOTIENTS = frozenset({"DivBackward0", "DivBackward1"})
_OF_ONE = frozenset({"NegBackward0", "MulBackward0", "MulBackward1", "ToCopyBackward0", "CloneBackward0"}) | {
    *("ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1", "ReshapeAliasBackward0")
}
"""Nodes of what is a multiple of one number, if only that one has a graph."""
_SUMS = frozenset({"AddBackward0", "SubBackward0"})

Number = Tensor | float


class MeanTerms(NamedTuple):
    """What the graph of a number tells of the means in it."""

    means: list[Number]
    """The number of terms of each."""
    divisors: list[Number]
    """What sums were divided by, which may be the number of their terms or a constant."""
    others: int
    """The number of addends that tell nothing."""

    @property
    def number(self) -> Number | None:
        """The number of terms, if the value is made of means over as many. Numbers on another device than the CPU are
        taken for the same, because the host would wait for them."""
        if self.divisors or self.others or not self.means:
            return None
        first, *others = self.means
        known = all(not isinstance(each, Tensor) or each.is_cpu for each in self.means)
        return None if known and any(float(each) != float(first) for each in others) else first


def mean_terms(value: Tensor) -> MeanTerms:
    """Looks at the graph of a number as far as it is linear in means."""
    found, seen = MeanTerms([], [], 0), 0
    left: list[Any] = [value.grad_fn]
    while left and seen < _MOST_NODES:
        node = left.pop()
        seen += 1
        name, behind = _name(node), _behind(node)
        if name in _SUMS:
            left += behind
            continue
        terms = _terms(node, name, behind)
        if terms is not None:
            found.means.append(terms)
        elif name in _QUOTIENTS and len(behind) == 1 and _is_sum(behind[0]):
            found.divisors.append(node._saved_other)
        elif len(behind) == 1 and (name in _OF_ONE or name in _QUOTIENTS):
            left += behind
        else:
            found = found._replace(others=found.others + 1)
    return found._replace(others=found.others + len(left))


def _name(node: Any) -> str:
    return "" if node is None else str(node.name())


def _behind(node: Any) -> list[Any]:
    return [] if node is None else [each for each, _ in node.next_functions if each is not None]


def _terms(node: Any, name: str, behind: list[Any]) -> Number | None:
    if name in _CROSS_ENTROPIES:
        found: Tensor | None = node._saved_total_weight if node._saved_reduction == _MEAN else None
        return found
    if name == "MeanBackward0" and behind and _is_selection(behind[0]):
        return float(node._saved_self_sym_numel)
    return None


def _is_selection(node: Any) -> bool:
    """Returns True for what a mask has chosen."""
    if _name(node) == "IndexBackward0":
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in node._saved_indices)
    return _name(node) == "MaskedSelectBackward0"


def _is_sum(node: Any) -> bool:
    for _ in range(_MOST_NODES):
        name, behind = _name(node), _behind(node)
        if name in _CROSS_ENTROPIES:
            return bool(node._saved_reduction == _SUM)
        if name not in _OF_ONE or len(behind) != 1:
            return name in ("SumBackward0", "DotBackward0")
        node = behind[0]
    return False
