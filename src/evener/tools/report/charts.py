"""The charts of a report: lines over steps and rows of bars, as SVG inside of an HTML page.

A chart holds no colours and no sizes of its own: classes name what is drawn (``k0``, ``waiting``), and the page's style
sheet says how that looks, by day, by night and on a phone. Text beside a chart is text of the page. Each figure has the
table of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from evener.core.drawing import svg_text
from evener.tools.report.numbers import axis_unit, value_text
from evener.tools.report.tables import Table
from evener.training.reporting.drawing import Scale, ticks_between, ticks_to

WIDTH, HEIGHT = 560, 190
"""The size of a chart of lines, in units of which the page shows about one per pixel."""
_LEFT, _TOP, _BOTTOM, _EDGE = 58, 10, 24, 10
_FINE = 4
"""Places on a line are whole numbers of quarter units, which need few characters."""
_COLUMNS = 240
"""At most so many points of a line: one for two pixels."""
_TABLE_ROWS = 32
_MARKS = 40
_NARROW = 8
"""Labels of rows of at most so many characters stand beside their bars, longer ones above."""
GREATEST = 1e15
"""Numbers of this size or larger are no measurements and are not drawn."""


@dataclass(frozen=True)
class Spot:
    """A point of a line, which stands for several steps: the least, mean and greatest of their values."""

    x: float
    low: float
    mean: float
    high: float
    weight: float = 1.0
    """The number of steps."""


@dataclass(frozen=True)
class Trace:
    """A line of a chart. None among the spots interrupts it."""

    name: str
    style: str
    """The class of its colour."""
    spots: tuple[Spot | None, ...]

    def known(self) -> list[Spot]:
        return [spot for spot in self.spots if spot is not None]


@dataclass(frozen=True)
class BarPart:
    """A part of a bar."""

    name: str
    style: str
    begin: float
    length: float


@dataclass(frozen=True)
class Bar:
    """A row of a chart."""

    label: str
    segments: tuple[BarPart, ...]
    limit: float | None = None
    """Where a line marks the limit of the row."""


@dataclass(frozen=True)
class Figure:
    """A chart with its legend and the table of its numbers."""

    title: str
    caption: str
    svg: str
    legend: tuple[tuple[str, str, str], ...]
    """The class, the name and the most important number of each line or kind of bar."""
    table: Table


def lines(
    title: str,
    unit: str,
    traces: Sequence[Trace],
    caption: str = "",
    marks: Sequence[tuple[float, str]] = (),
    from_zero: bool = True,
    at_end: bool = False,
    reach: float = 0.0,
) -> Figure | None:
    """Returns a chart of lines over steps, or None if there is no number.

    Args:
        unit: The unit of the numbers, as in `evener.tools.report.schema.Series`.
        marks: Steps at which something happened, and what.
        from_zero: Whether the vertical axis begins at 0.
        at_end: Whether the legend tells the last numbers, and not the means.
        reach: The vertical axis reaches at least to this number.
    """
    traces = [Trace(each.name, each.style, _merged(each.spots)) for each in traces if each.known()]
    if not traces:
        return None
    spots = [spot for trace in traces for spot in trace.known()]
    first = min(spot.x - (spot.weight - 1) / 2 for spot in spots)
    last = max(spot.x + (spot.weight - 1) / 2 for spot in spots)
    lowest, highest = min(spot.low for spot in spots), max(spot.high for spot in spots)
    highest = max(highest, reach)
    shown = marks[:: -(-len(marks) // _MARKS) or 1]
    factor, unit_name = axis_unit(unit, max(abs(lowest), abs(highest)))
    if from_zero and lowest >= 0:
        ticks = ticks_to(highest / factor)
    else:
        ticks = ticks_between(lowest / factor, highest / factor)
    heights = (ticks[0] * factor, ticks[-1] * factor)
    scale = Scale((first, max(last, first + 1)), heights, _LEFT, WIDTH - _EDGE, _TOP, HEIGHT - _BOTTOM)
    shapes = [
        *_grid(ticks, [scale.y(tick * factor) for tick in ticks]),
        *_steps_axis(scale, first, last),
        *_marks(scale, shown),
        f'<g transform="scale({1 / _FINE:g})">',
        *(shape for trace in traces for shape in _drawn(scale, trace)),
        "</g>",
    ]
    if len(shown) < len(marks):
        caption = f"{caption} {len(shown)} of {len(marks):,} events are marked.".strip()
    told = [(trace, _told(trace, unit, at_end)) for trace in traces]
    described = "; ".join(f"{trace.name}: {text}, {_range(trace.known(), unit)}" for trace, text in told[:8])
    return Figure(
        title + (f", {unit_name}" if unit_name else ""),
        caption,
        _svg(HEIGHT, title, f"Steps {first:,.0f} to {last:,.0f}. {described}.", shapes),
        tuple((trace.style, trace.name, text) for trace, text in told),
        _lines_table(title, unit, traces),
    )


def bars(
    title: str,
    unit: str,
    rows: Sequence[Bar],
    table: Table,
    caption: str = "",
    height: int = 16,
    shown: bool = False,
    reach: float = 0.0,
) -> Figure | None:
    """Returns a chart of rows of bars, or None if all are empty.

    Args:
        height: The height of a bar.
        shown: Whether large parts show their fraction of the bar.
        reach: The axis reaches at least to this number.
    """
    rows = [replace(row, segments=tuple(filter(_is_drawn, row.segments))) for row in rows]
    ends = [part.begin + part.length for row in rows for part in row.segments]
    if not ends:
        return None
    highest = max(reach, *ends, *(row.limit or 0.0 for row in rows))
    factor, unit_name = axis_unit(unit, highest)
    ticks = ticks_to(highest / factor)
    above = any(len(row.label) > _NARROW for row in rows)
    left = 0 if above or not any(row.label for row in rows) else _LEFT + 6
    pitch = height + (20 if above else 8)
    bottom = len(rows) * pitch + 4
    scale = Scale((0, highest), (0, 1), left + 1, WIDTH - _EDGE, 0, bottom)
    shapes = list(_value_axis([tick for tick in ticks if tick * factor <= highest * 1.0001], factor, scale))
    for number, row in enumerate(rows):
        top = number * pitch + (16 if above else 2)
        anchor = (
            f'x="1" y="{top - 4}"' if above else f'x="{left - 5}" y="{top + height - 4}" text-anchor="end"'
        )
        shapes += [f"<text {anchor}>{svg_text(row.label)}</text>"] if row.label else []
        shapes += _bar(row, scale, top, height, unit, shown)
    names = {part.style: part.name for row in rows for part in row.segments}
    described = "; ".join(f"{row.label}: {_parts_text(row, unit)}" for row in rows[:8])
    return Figure(
        title + (f", {unit_name}" if unit_name else ""),
        caption,
        _svg(bottom + _BOTTOM, title, f"{described}.", shapes),
        tuple((style, name, "") for style, name in names.items()),
        table,
    )


def _is_drawn(part: BarPart) -> bool:
    """Returns False for an empty part, and for one whose numbers are no measurements."""
    return 0 < part.length < GREATEST and 0 <= part.begin < GREATEST


def _svg(height: float, title: str, description: str, shapes: Sequence[str]) -> str:
    """The title and the description are for screen readers."""
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img"><title>{svg_text(title)}</title>'
    return "\n".join([head, f"<desc>{svg_text(description)}</desc>", *shapes, "</svg>"])


def _grid(ticks: Sequence[float], heights: Sequence[float]) -> Iterator[str]:
    for tick, y in zip(ticks, heights, strict=True):
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _EDGE}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick_text(tick)}</text>'


def _tick_text(tick: float) -> str:
    return f"{tick:,.0f}" if 1000 <= abs(tick) < 1e6 else f"{tick:.6g}"


def _steps_axis(scale: Scale, first: float, last: float) -> Iterator[str]:
    middle = (first + last) // 2
    places = [(first, "start", f"step {first:,.0f}"), (last, "end", f"{last:,.0f}")]
    places[1:1] = [(middle, "middle", f"{middle:,.0f}")] if last - first >= 2 else []
    for place, anchor, name in places if last > first else places[:1]:
        yield f'<text x="{scale.x(place):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{name}</text>'


def _marks(scale: Scale, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
    first, last = scale.x_range
    for step, words in marks:
        if not first <= step <= last:
            continue
        text = svg_text(f"step {step:,.0f}: {words}")
        x = scale.x(step)
        yield f'<path class="mark" d="M{x:.1f} {scale.top}V{scale.bottom}"><title>{text}</title></path>'


def _drawn(scale: Scale, trace: Trace) -> Iterator[str]:
    def at(x: float, y: float) -> tuple[int, int]:
        return round(_FINE * scale.x(x)), round(_FINE * scale.y(y))

    bands, middles = [], []
    for piece in _pieces(trace.spots):
        upper, lower = [at(spot.x, spot.high) for spot in piece], [at(spot.x, spot.low) for spot in piece]
        if upper != lower:
            bands.append(_path([*upper, *reversed(lower)]) + "z")
        middles.append(_path([at(spot.x, spot.mean) for spot in piece]))
    if bands:
        yield f'<path class="band {trace.style}" d="{"".join(bands)}"/>'
    yield f'<path class="line {trace.style}" d="{"".join(middles)}"/>'


def _pieces(spots: Sequence[Spot | None]) -> Iterator[list[Spot]]:
    piece: list[Spot] = []
    for spot in (*spots, None):
        if spot is not None:
            piece.append(spot)
        elif piece:
            yield piece
            piece = []


def _path(places: Sequence[tuple[int, int]]) -> str:
    """Returns path data in relative coordinates. A single place becomes a dot."""
    (x, y), *rest = places
    found = [f"M{x} {y}", "l" if rest else "h0"]
    for next_x, next_y in rest:
        found += (_number(next_x - x), _number(next_y - y))
        x, y = next_x, next_y
    return "".join(found).replace("l ", "l")


def _number(number: int) -> str:
    return f" {number}" if number >= 0 else str(number)


def _merged(spots: Sequence[Spot | None]) -> tuple[Spot | None, ...]:
    """Merges neighbours until at most `_COLUMNS` are left. The least and the greatest values stay."""
    together = -(-len(spots) // _COLUMNS) or 1
    return tuple(_merge(spots[begin : begin + together]) for begin in range(0, len(spots), together))


def _merge(spots: Sequence[Spot | None]) -> Spot | None:
    known = [spot for spot in spots if spot is not None]
    if len(known) <= 1:
        return known[0] if known else None
    weight = sum(spot.weight for spot in known)
    return Spot(
        (known[0].x + known[-1].x) / 2,
        min(spot.low for spot in known),
        sum(spot.mean * spot.weight for spot in known) / weight,
        max(spot.high for spot in known),
        weight,
    )


def _told(trace: Trace, unit: str, at_end: bool) -> str:
    known = trace.known()
    if at_end:
        return f"last {value_text(known[-1].mean, unit)}"
    whole = _merge(known)
    return f"mean {value_text(whole.mean if whole else None, unit)}"


def _range(spots: Sequence[Spot], unit: str) -> str:
    low, high = min(spot.low for spot in spots), max(spot.high for spot in spots)
    return f"from {value_text(low, unit)} to {value_text(high, unit)}"


def _lines_table(title: str, unit: str, traces: Sequence[Trace]) -> Table:
    """The means of the lines, with the least and the greatest values where they differ."""
    places = sorted({spot.x for trace in traces for spot in trace.known()})
    together = -(-len(places) // _TABLE_ROWS)
    groups = [places[begin : begin + together] for begin in range(0, len(places), together)]
    columns = []
    for trace in traces:
        of_place = {spot.x: spot for spot in trace.known()}
        cells = [_merge([of_place.get(place) for place in group]) for group in groups]
        columns.append([_cell(cell, unit) for cell in cells])
    steps = [f"{group[len(group) // 2]:,.0f}" for group in groups]
    head = ("step", *(trace.name for trace in traces))
    return Table(title, head, tuple(zip(steps, *columns, strict=True)), "r" * len(head))


def _cell(spot: Spot | None, unit: str) -> str:
    if spot is None:
        return "–"
    mean, low, high = (value_text(value, unit) for value in (spot.mean, spot.low, spot.high))
    return mean if low == high else f"{mean} ({low} to {high})"


def _value_axis(ticks: Sequence[float], factor: float, scale: Scale) -> Iterator[str]:
    for tick in ticks:
        x = scale.x(tick * factor)
        yield f'<path class="grid" d="M{x:.1f} {scale.top}V{scale.bottom}"/>'
        anchor = "start" if not tick else "end" if x > WIDTH - 30 else "middle"
        yield f'<text x="{x:.1f}" y="{scale.bottom + 16:g}" text-anchor="{anchor}">{_tick_text(tick)}</text>'


def _bar(row: Bar, scale: Scale, top: float, height: float, unit: str, shown: bool) -> Iterator[str]:
    whole = sum(part.length for part in row.segments)
    for part in row.segments:
        begin, end = scale.x(part.begin), scale.x(part.begin + part.length)
        text = svg_text(f"{row.label}, {part.name}: {value_text(part.length, unit)}")
        box = f'x="{begin:.1f}" y="{top:g}" width="{max(end - begin, 0.5):.1f}" height="{height:g}"'
        yield f'<rect class="{part.style}" {box}><title>{text}</title></rect>'
        if shown and end - begin > 45:
            place = f'x="{(begin + end) / 2:.1f}" y="{top + height / 2 + 4:g}" text-anchor="middle"'
            yield f'<text class="on" {place}>{part.length / whole:.0%}</text>'
    if row.limit is not None:
        x = scale.x(row.limit)
        words = svg_text(f"{row.label}, limit: {value_text(row.limit, unit)}")
        yield f'<path class="limit" d="M{x:.1f} {top - 3:g}v{height + 6:g}"><title>{words}</title></path>'


def _parts_text(row: Bar, unit: str) -> str:
    parts = [f"{part.name} {value_text(part.length, unit)}" for part in row.segments]
    return ", ".join(parts + ([f"limit {value_text(row.limit, unit)}"] if row.limit is not None else []))
