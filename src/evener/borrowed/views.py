"""Whether a tensor is a view of another: ``Tensor._base``.

FSDP2 hangs a hook on what a module returns, which an operation in place on a view drops in silence. PyTorch's notes on
views name the attribute, and no public one tells it.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from torch import Tensor


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes it for a view."""
    return tensor._base is not None
