"""Bandwidth by size: lines over a logarithmic axis of bytes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from evener.training.reporting.drawing import Panel, Point, svg


def size_chart(lines: Mapping[str, Sequence[Point]], title: str, y_label: str) -> str:
    """Draws each line's points ``(nbytes, y)``; bytes on a logarithmic axis, y from 0.

    Raises:
        ValueError: If there is no point.
    """
    places = [(name, [(math.log2(nbytes), y) for nbytes, y in line]) for name, line in lines.items()]
    exponents = [x for _, line in places for x, _ in line]
    if not exponents:
        raise ValueError("there is nothing to plot")
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    marks = [(low + 2 * step, size_text(2 ** (low + 2 * step))) for step in range((high - low + 1) // 2 + 1)]
    return svg(title, [Panel(y_label, "", places, marks, height=380)])


def size_text(nbytes: int) -> str:
    """``4K``, ``25M``: bytes as the sizes of a bench are named."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)
