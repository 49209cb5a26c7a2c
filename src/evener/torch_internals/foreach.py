"""Private operators of PyTorch that do the same to each of many tensors in one call.

- ``torch._foreach_copy_``, ``torch._foreach_add_`` and ``torch._foreach_sub_`` copy to, add to and subtract from many
  tensors. Their public counterparts take one tensor each, and launching them on a GPU one by one takes the host as long
  as the additions themselves.
- ``torch._amp_foreach_non_finite_check_and_unscale_`` looks for elements that are not finite, and multiplies all by a
  number, in one call. On a CPU it takes less than the sum of each of many small tensors, and knows infinities from
  finite numbers whose sum overflows. ``torch.amp.GradScaler`` calls it, for all gradients of an optimizer.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_each(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies each of ``values`` to the tensor at its place in ``to``, and converts it to that one's type."""
    if to:
        torch._foreach_copy_(list(to), list(values))


def add_each(to: Sequence[Tensor], values: Sequence[Tensor] | Sequence[float]) -> None:
    """Adds each of ``values``, tensors or numbers, to the tensor at its place in ``to``."""
    if to:
        torch._foreach_add_(list(to), list(values))  # type: ignore[arg-type]


def subtract_each(to: Sequence[Tensor], values: Sequence[float]) -> None:
    """Subtracts each number of ``values`` from the tensor at its place in ``to``."""
    if to:
        torch._foreach_sub_(list(to), list(values))


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a float32 number on the device of the tensors: 0 if an element of one is NaN or infinite, else 1. The
    tensors are of one real floating-point type and dense. Each element is written back as it is."""
    found, one = torch.arange(2.0, device=tensors[0].device).unbind()
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)  # type: ignore[arg-type]
    return one - found


class FiniteCheck:
    """Looks for elements that are not finite. For one thread at a time."""

    def __init__(self) -> None:
        self._found, self._one = torch.zeros(()), torch.ones(())

    def all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Returns True if no element of these tensors is NaN or infinite. They are of real floating-point types, on a
        CPU, and dense. Each element is written back as it is."""
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, self._found, self._one)  # type: ignore[arg-type]
        if not self._found.item():
            return True
        self._found.zero_()
        return False
