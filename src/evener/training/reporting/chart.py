"""Charts of bandwidth by message size: SVG lines over a logarithmic axis of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from evener.training.reporting.drawing import Panel, Point, svg


def size_chart(lines: Mapping[str, Sequence[Point]], title: str, y_label: str) -> str:
    """Returns an SVG chart of lines of points ``(nbytes, y)``. The axis of bytes is logarithmic; y begins at 0.

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
    """Formats bytes as ``4K`` or ``25M`` if they are a whole number of such units, else as a plain number."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)
