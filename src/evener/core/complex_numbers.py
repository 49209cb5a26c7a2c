"""Complex numbers as real ones, for code that sums, sends or compares numbers of any kind."""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Returns complex numbers as pairs in an additional last dimension, in the same memory; other tensors as they
    are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
