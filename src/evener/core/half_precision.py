"""Sums of float16 and bfloat16, which are not added in their own type: bfloat16 cannot count beyond 256."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def is_half(value: object) -> bool:
    """Whether it is a tensor of one of these types."""
    return isinstance(value, Tensor) and value.dtype in HALVES


def widened(value: Any) -> Any:
    """A tensor of these types in float32, anything else as it is."""
    return value.float() if is_half(value) else value


def added_in_float32(tensor: Tensor, add: Callable[[Tensor], Any]) -> None:
    """Has ``add`` change a tensor in place; one of these types in float32, of which it is rounded once."""
    wide = widened(tensor)
    add(wide)
    if wide is not tensor:
        tensor.copy_(wide)
