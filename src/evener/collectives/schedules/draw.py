"""Draws a schedule of a collective: as a table of text, or as SVG with arrows between ranks.

A cell of the table holds what a rank sends: ``0-3>2+`` sends chunks 0 to 3 to rank 2, which adds them. Without ``+``
rank 2 copies them.
"""

from __future__ import annotations

from collections.abc import Iterator

from evener.collectives.schedules.schedule import RankRound, Schedule, Transfer
from evener.core.drawing import WHITE, svg_page

_COLUMN, _ROW, _MARGIN = 110, 64, 48
_COLORS = {"add": "#d95f02", "copy": "#1f6fb4"}


def draw(schedule: Schedule) -> str:
    """Returns a table as text: a row for each round, a column for each rank, no blanks at the ends of lines."""
    world_size = schedule.topology.world_size
    columns = [_column(rank, schedule.for_rank(rank)) for rank in range(world_size)]
    numbers = [str(number).rjust(5) for number in range(len(columns[0]) - 1)]
    rows = zip(["round", *numbers], *columns, strict=True)
    return "\n".join("   ".join(row).rstrip() for row in rows)


def _column(rank: int, rounds: list[RankRound]) -> list[str]:
    cells = [f"rank {rank}", *(" ".join(_cell_entries(rank, round_)) for round_ in rounds)]
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]


def _cell_entries(rank: int, round_: RankRound) -> list[str]:
    local = [t for t in round_.receives if t.src == rank]
    transfers = sorted((*round_.sends, *local), key=lambda t: (t.start, t.dst))
    return [f"{_chunks(t)}>{t.dst}{'+' * t.reduce}" for t in transfers]


def _chunks(transfer: Transfer) -> str:
    last = transfer.stop - 1
    return str(last) if last == transfer.start else f"{transfer.start}-{last}"


def draw_svg(schedule: Schedule) -> str:
    """Returns an SVG image: ranks from left to right, time downward, additions solid orange, copies dashed blue."""
    rounds = list(schedule.rounds())
    width = 2 * _MARGIN + _COLUMN * (schedule.topology.world_size - 1)
    height = 2 * _MARGIN + _ROW * len(rounds)
    arrows = [line for y, round_ in enumerate(rounds) for t in round_ for line in _arrow(y, t)]
    tips = (_tip(name, color) for name, color in _COLORS.items())
    shapes = (*tips, WHITE, *_frame(schedule, height), *arrows)
    return svg_page(width, height, shapes, 'font-size="12" text-anchor="middle"')


def _tip(name: str, color: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{color}"/></marker>'
    )


def _frame(schedule: Schedule, height: int) -> Iterator[str]:
    """Yields a vertical line for each rank, with its number and host at the top."""
    for rank in range(schedule.topology.world_size):
        x = _MARGIN + _COLUMN * rank
        yield f'<path d="M{x} {_MARGIN}V{height - _MARGIN / 2:g}" stroke="#bbb"/>'
        yield f'<text x="{x}" y="20">rank {rank}</text>'
        yield f'<text x="{x}" y="36" fill="#777">host {schedule.topology.host_of(rank)}</text>'


def _arrow(number: int, transfer: Transfer) -> Iterator[str]:
    """Yields an arrow from the source at the beginning of the round to the destination at its end, and its label.

    The arrow is a loop if both are the same rank.
    """
    x1, x2 = (_MARGIN + _COLUMN * rank for rank in (transfer.src, transfer.dst))
    y1, y2 = _MARGIN + _ROW * number + 6, _MARGIN + _ROW * (number + 1) - 6
    bend = f"C{x1 + 30} {y1} {x1 + 30} {y2}" if x1 == x2 else "L"
    name = "add" if transfer.reduce else "copy"
    style = f'stroke="{_COLORS[name]}" marker-end="url(#{name})"' + ' stroke-dasharray="5 3"' * (
        name == "copy"
    )
    yield f'<path d="M{x1} {y1}{bend} {x2} {y2}" fill="none" {style}/>'
    label_x, label_y = x1 + (x2 - x1) / 4 + (24 if x1 == x2 else 0), y1 + (y2 - y1) / 4 - 3
    yield f'<text x="{label_x:g}" y="{label_y:g}" font-size="10">{_chunks(transfer)}</text>'
