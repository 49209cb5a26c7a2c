"""How far apart devices come that round differently, with the same gradients.

Replicas take the same sum of gradients, so that what an update rounds otherwise adds up, and no step makes it grow.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAST_BITS = 16
"""That an update may round otherwise on another device, of the largest number of a tensor."""
MOST = 0.1
"""Of the largest number, what is never rounding."""


def is_rounding(numbers: Tensor, right: Tensor, steps: int) -> bool:
    """Whether so many updates on devices that round differently explain the difference.

    Codes of 8 bits are not judged: one may stand for twice another.

    Args:
        numbers: What a rank holds.
        right: What it should hold, of the same shape and type.
        steps: Updates since both were the same; at least 1.
    """
    if numbers.dtype == torch.uint8 or not numbers.numel():
        return True
    if not (numbers.is_floating_point() or numbers.is_complex()):
        return torch.equal(numbers, right)
    allowed = min(MOST, LAST_BITS * max(1, steps) * torch.finfo(right.dtype).eps)
    return bool(((numbers - right).abs() <= allowed * right.abs().max()).all())
