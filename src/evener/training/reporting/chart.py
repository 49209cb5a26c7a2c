"""Lines over a logarithmic x axis, as one self-contained SVG: bandwidth by size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from evener.core.text import printable

Point = tuple[float, float]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 60, 150, 40, 50
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")


def size_chart(lines: Mapping[str, Sequence[Point]], title: str, y_label: str) -> str:
    """An SVG of each line's points ``(nbytes, y)``; bytes on a logarithmic axis, y from 0.

    Raises:
        ValueError: If there is no point.
    """
    points = [point for line in lines.values() for point in line]
    if not points:
        raise ValueError("there is nothing to plot")
    scale = _Scale(points)
    parts = [*_axes(scale, title, y_label), *_curves(lines, scale)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


class _Scale:
    """From bytes and values to places on the page."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.low = math.floor(math.log2(min(x for x, _ in points)))
        self.high = max(self.low + 1, math.ceil(math.log2(max(x for x, _ in points))))
        self.step = _round_step(max(y for _, y in points) / 5 or 1.0)
        self.top = self.step * math.ceil(max(y for _, y in points) / self.step or 1)

    def x(self, nbytes: float) -> float:
        part = (math.log2(nbytes) - self.low) / (self.high - self.low)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _TOP - _BOTTOM)


def _round_step(value: float) -> float:
    """The next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * (1 - 1e-9))


def _axes(scale: _Scale, title: str, y_label: str) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="22" font-size="15">{escape(printable(title))}</text>']
    parts += [f'<text x="{_LEFT}" y="{_TOP - 4}" fill="#555">{escape(printable(y_label))}</text>']
    for exponent in range(scale.low, scale.high + 1, 2):
        x = scale.x(2.0**exponent)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eee"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{size_text(2**exponent)}</text>'
        )
    for number in range(round(scale.top / scale.step) + 1):
        y = scale.y(number * scale.step)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * scale.step:g}</text>'
        )
    return parts


def _curves(lines: Mapping[str, Sequence[Point]], scale: _Scale) -> list[str]:
    parts = []
    for number, (name, line) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        y = _TOP + 16 * (number + 1)
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 12}" y="{y}" fill="{color}">{escape(printable(name))}</text>'
        )
    return parts


def size_text(nbytes: int) -> str:
    """``4K``, ``25M``: bytes as the sizes of a bench are named."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)
