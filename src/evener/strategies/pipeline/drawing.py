"""Draws a step of a pipeline, predicted and measured, as text and as SVG.

In the text a column is a slice of time. A digit is the forward of a micro-batch, a letter its backward, ``w`` a
separate computation of weight gradients, and a dot means that the rank waits::

    predicted, 2 micro-batches: 21 ms, bubble 33%
     0  000111....aaaa...bbbb
     1  ...000aaaa111bbbb....
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from evener.core.drawing import svg_page, svg_text
from evener.strategies.pipeline.schedule import (
    FORWARD,
    WEIGHT,
    Action,
    Order,
    Timeline,
    bubble,
    length,
    simulate,
)

_COLUMNS = 100
_COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}


def in_characters(timeline: Timeline, columns: int = _COLUMNS) -> list[str]:
    """Returns one row of text for each rank."""
    scale = columns / (length(timeline) or 1.0)
    rows = []
    for rank, actions in enumerate(timeline):
        row = ["."] * columns
        for action, began, ended in actions:
            start = min(round(began * scale), columns - 1)
            stop = min(max(start + 1, round(ended * scale)), columns)
            row[start:stop] = _mark(action) * (stop - start)
        rows.append(f"{rank:2d}  {''.join(row)}")
    return rows


def _mark(action: Action) -> str:
    if action.kind == WEIGHT:
        return "w"
    marks = string.digits if action.kind == FORWARD else string.ascii_lowercase
    return marks[action.micro % len(marks)]


def as_svg(rows: Sequence[tuple[str, Timeline]], width: int = 1000) -> str:
    """Returns an SVG of the titled timelines, one below the other, with the same scale of time."""
    longest = max(length(timeline) for _, timeline in rows) or 1.0
    shapes, top = list[str](), 0
    for title, timeline in rows:
        shapes.append(f'<text x="4" y="{top + 16}" font-size="14">{svg_text(title)}</text>')
        for rank, actions in enumerate(timeline):
            y = top + 24 + 26 * rank
            shapes.append(f'<text x="4" y="{y + 16}" font-size="12">{rank}</text>')
            for action, began, ended in actions:
                x, wide = 24 + began / longest * width, (ended - began) / longest * width
                shapes.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="22" fill="{_COLORS[action.kind]}" '
                    f'stroke="white"><title>{action} of stage {action.stage}, {1e3 * (ended - began):.3g} ms</title>'
                    "</rect>"
                )
        top += 40 + 26 * len(timeline)
    return svg_page(width + 32, top, shapes)


@dataclass(frozen=True)
class Drawing:
    """A measured step, and its prediction from the schedule and the mean time of each kind of action."""

    order: Order
    measured: Timeline
    message: float = 0.0
    """The seconds that a message between ranks takes."""

    @property
    def predicted(self) -> Timeline:
        """The timeline by the schedule, with the measured mean time of each stage's actions and of a message."""
        took: dict[tuple[str, int], list[float]] = defaultdict(list)
        for actions in self.measured:
            for action, began, ended in actions:
                took[action.kind, action.stage].append(ended - began)
        mean = {key: sum(values) / len(values) for key, values in took.items()}
        return simulate(self.order, lambda action: mean[action.kind, action.stage], self.message)

    def _titled(self) -> list[tuple[str, Timeline]]:
        micros = 1 + max(action.micro for actions in self.order for action in actions)
        return [
            (
                f"{title}, {micros} micro-batches: {1e3 * length(timeline):.3g} ms, bubble {bubble(timeline):.0%}",
                timeline,
            )
            for title, timeline in (("predicted", self.predicted), ("measured", self.measured))
        ]

    def __str__(self) -> str:
        return "\n".join("\n".join([title, *in_characters(timeline)]) for title, timeline in self._titled())

    def svg(self) -> str:
        """Returns the predicted and the measured step as SVG."""
        return as_svg(self._titled())
