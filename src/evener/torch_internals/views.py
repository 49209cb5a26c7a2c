"""Whether a tensor is a view of another, and of which: ``Tensor._base``.

FSDP2 hangs a hook on what a module returns, which an operation in place on a view drops in silence; and a view of a
weight is in a weight's memory. PyTorch's notes on views name the attribute, and no public one tells it.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch import Tensor


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes it for a view."""
    return tensor._base is not None


def base_of(tensor: Tensor) -> Tensor | None:
    """What it is a view of; None if autograd takes it for none."""
    return tensor._base
