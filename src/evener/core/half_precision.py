"""Sums float16 and bfloat16 tensors in float32: in its own precision, bfloat16 cannot count beyond 256."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def is_half(value: object) -> bool:
    """Returns True if ``value`` is a float16 or bfloat16 tensor."""
    return isinstance(value, Tensor) and value.dtype in HALVES


def widened(value: Any) -> Any:
    """Converts a float16 or bfloat16 tensor to float32; returns anything else unchanged."""
    return value.float() if is_half(value) else value


def added_in_float32(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
    """Applies the in-place operation ``add`` to a tensor. A float16 or bfloat16 tensor is changed in float32, and
    rounded once at the end."""
    wide = widened(tensor)
    add(wide)
    if wide is not tensor:
        tensor.copy_(wide)
