"""Private operators of PyTorch that do the same to each of many tensors in one call.

- ``torch._foreach_copy_``, ``torch._foreach_add_`` and ``torch._foreach_sub_`` copy to, add to and subtract from many
  tensors. Their public counterparts take one tensor each, and launching them on a GPU one by one takes the host as long
  as the additions themselves.
- ``torch._C._nn.flatten_dense_tensors`` copies many tensors into one. For ``torch.cat`` Python must make a view of
  each.

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


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the elements of strided tensors of one type, at least one, in a new tensor of one dimension."""
    found: Tensor = torch._C._nn.flatten_dense_tensors(list(tensors))
    return found
