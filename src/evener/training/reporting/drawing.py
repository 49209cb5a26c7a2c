"""Draws line charts as SVG: panels one below the other, each with its axes and a legend.

The scale and the ticks of an axis are also those of the charts of a report (``evener.tools.report.charts``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evener.core.drawing import WHITE, svg_page, svg_text

WIDTH, HEIGHT = 760, 170
"""The size of a panel, in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 34, 30
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#882255")
"""The colours of lines, repeated if there are more lines. The first seven are those of Okabe and Ito (2008), which
people with any colour vision can tell apart."""

_LEAST_POWER = -300
"""Steps of an axis are not much smaller than 10 to this power. Numbers near the least of the type have few digits."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """One chart: lines with common axes."""

    title: str
    unit: str
    """The unit after the numbers of the vertical axis, which begins at 0."""
    lines: Sequence[tuple[str, Sequence[Point]]]
    """The name and the points of each line. Points are sorted by their first number."""
    marks: Sequence[tuple[float, str]] = ()
    """Labelled places on the horizontal axis, which reaches from the first to the last of them. Without marks, the axis
    is labelled with the first and the last step."""
    height: int = HEIGHT


@dataclass(frozen=True)
class Scale:
    """Maps numbers to places on a drawing, in pixels from its top left corner."""

    x_range: Point
    """The numbers at the left and the right edge."""
    y_range: Point
    """The numbers at the lower and the upper edge."""
    left: float
    right: float
    top: float
    bottom: float

    def x(self, number: float) -> float:
        return self.left + _part(number, *self.x_range) * (self.right - self.left)

    def y(self, number: float) -> float:
        return self.bottom - _part(number, *self.y_range) * (self.bottom - self.top)


def _part(number: float, first: float, last: float) -> float:
    """Returns where ``number`` is on the way from ``first`` to ``last``. Halves do not overflow."""
    return (number / 2 - first / 2) / (last / 2 - first / 2 or 1)


def svg(title: str, panels: Sequence[Panel]) -> str:
    """Returns the text of an SVG file with a title and the panels."""
    shapes = [
        f"<title>{svg_text(title)}</title>",
        WHITE,
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{svg_text(title)}</text>',
    ]
    top = 32
    for panel in panels:
        shapes += [f'<g transform="translate(0 {top})">', *_drawn(panel), "</g>"]
        top += panel.height
    return svg_page(WIDTH, top + 8, shapes, 'font-size="11"')


def _drawn(panel: Panel) -> Iterator[str]:
    points = [point for _, line in panel.lines for point in line]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    marks = [(x, "middle", name) for x, name in panel.marks]
    if marks:
        first, last = marks[0][0], marks[-1][0]
    else:
        marks = [(first, "start", f"step {first:g}"), (last, "end", f"step {last:g}")]
    ticks = ticks_to(max(y for _, y in points))
    right, bottom = WIDTH - _RIGHT, panel.height - _BOTTOM
    scale = Scale((first, max(last, first + 1)), (0, ticks[-1]), _LEFT, right, _TOP, bottom)

    yield f'<text x="{_LEFT}" y="{_TOP - 10}" font-weight="bold">{svg_text(panel.title)}</text>'
    for tick in ticks:
        y = scale.y(tick)
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        label = f"{tick:g} {panel.unit}".strip()
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{svg_text(label)}</text>'
    for place, anchor, name in marks:
        x = scale.x(place)
        yield f'<text x="{x:.1f}" y="{panel.height - 14}" text-anchor="{anchor}">{svg_text(name)}</text>'
    for number, (name, line) in enumerate(panel.lines):
        colour, y = COLOURS[number % len(COLOURS)], _TOP + 14 * number
        places = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in line)
        yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        yield f'<text x="{right + 10}" y="{y + 4}" fill="{colour}">{svg_text(name)}</text>'


def ticks_to(highest: float) -> list[float]:
    """Returns the ticks of an axis from 0 to at least ``highest``, in steps of 1, 2 or 5 times a power of ten.

    There are three to six ticks; two if ``highest`` is not above 0. None is above the largest number of the type.
    """
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** max(math.floor(math.log10(highest)), _LEAST_POWER)
    each = next(
        power * part for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if highest / power <= 5 * part * (1 + 1e-9)
    )
    return [_finite(each * count) for count in range(math.ceil(highest / each * (1 - 1e-9)) + 1)]


def ticks_between(lowest: float, highest: float) -> list[float]:
    """Returns the ticks of an axis from at most ``lowest`` to at least ``highest``, in the steps of `ticks_to`."""
    if highest <= lowest:
        lowest, highest = (
            _finite(lowest - abs(lowest) / 10 - 1e-9),
            _finite(highest + abs(highest) / 10 + 1e-9),
        )
    each = ticks_to(_finite(highest - lowest))[1]
    first, last = math.floor(lowest / each + 1e-9), math.ceil(highest / each - 1e-9)
    return [_finite(each * count) for count in range(first, max(last, first + 1) + 1)]


def _finite(number: float) -> float:
    return max(-sys.float_info.max, min(number, sys.float_info.max))
