"""Limits how far replicas on devices that round differently may diverge, with the same gradients.

Replicas use the same sum of gradients. So rounding differences of the updates add up, but no step amplifies them.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAST_BITS = 16
"""Rounding difference of one update between devices, in units of eps times the largest number of a tensor."""
MOST = 0.1
"""Largest difference, relative to the largest number, that may be rounding at all."""


def is_rounding(numbers: Tensor, right: Tensor, steps: int) -> bool:
    """Returns True if rounding differences in ``steps`` updates explain the difference.

    Codes of 8 bits always pass: one code may stand for twice the value of another.

    Args:
        numbers: The values of a rank.
        right: The values that it should have, of the same shape and dtype.
        steps: Updates since both were the same; at least 1.
    """
    if numbers.dtype == torch.uint8 or not numbers.numel():
        return True
    if not (numbers.is_floating_point() or numbers.is_complex()):
        return torch.equal(numbers, right)
    allowed = min(MOST, LAST_BITS * max(1, steps) * torch.finfo(right.dtype).eps)
    return bool(((numbers - right).abs() <= allowed * right.abs().max()).all())
