"""Compares what a graph has computed with what an eager pass has.

Both run the same kernels, so that they are equal to the last bit, unless a kernel adds up in no fixed order. The graph
therefore runs twice, and may differ from the eager pass by a few times what its two results differ, if that is little.
PyTorch's deterministic algorithms leave no such difference, and none is allowed with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_FLOORS = 8.0
"""How many times the difference of two replays an eager pass may differ from one."""
_MOST = 0.05
"""The largest difference that may be allowed, in parts of the norm."""
_ROUNDING = 64.0
"""Difference that is allowed in any case, in units of the type's precision."""

Values = Mapping[str, Tensor | None]


def difference(eager: Values, replay: Values, again: Values) -> str:
    """Returns what differs between an eager pass and a replay, in words; "" if nothing does.

    Args:
        eager, replay: Results by name; None for a parameter without gradient.
        again: The results of a second replay.
    """
    whole = max((_norm(value) for value in eager.values() if value is not None), default=0.0)
    for name, value in eager.items():
        other, second = replay.get(name), again.get(name)
        if value is None or other is None or second is None:
            if (value is None) != (other is None):
                return f"{name}, which only {'the replay' if value is None else 'the eager pass'} computes"
        elif not torch.equal(value, other):
            differs, floor = _norm(value, other), _norm(other, second)
            if not math.isfinite(_norm(value)):  # the run finds this by itself
                continue
            if not differs <= _allowed(value, whole, floor):
                return f"{name}, by {differs / (_norm(value) or 1.0):.1e} of its norm"
    return ""


def _allowed(value: Tensor, whole: float, floor: float) -> float:
    if torch.are_deterministic_algorithms_enabled():
        return 0.0
    precision = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
    size = max(_norm(value), 1e-3 * whole)
    return min(_FLOORS * floor, _MOST * size) + _ROUNDING * precision * size


def _norm(value: Tensor, other: Tensor | None = None) -> float:
    wide = torch.complex128 if value.is_complex() else torch.float64
    numbers = value.to(wide) if other is None else value.to(wide) - other.to(wide)
    return float(torch.linalg.vector_norm(numbers))
