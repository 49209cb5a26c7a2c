"""A schedule as a picture: as a table for reading, as arrows between ranks for showing.

A cell of the table holds what a rank sends: ``0-3>2+`` sends chunks 0 to 3 to rank 2, which adds them;
without ``+`` it copies them.
"""

from __future__ import annotations

from collections.abc import Iterator

from evener.collectives.schedules.schedule import RankRound, Schedule, Transfer
from evener.core.drawing import WHITE, svg_page

_COLUMN, _ROW, _MARGIN = 110, 64, 48
_COLORS = {"add": "#d95f02", "copy": "#1f6fb4"}


def draw(schedule: Schedule) -> str:
    """The table of rounds: a row a round, a column a rank, no blanks at the ends of lines."""
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
    """An SVG image: ranks from left to right, time downward, additions solid orange, copies dashed blue."""
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
    """A vertical line for each rank, headed by its number and host."""
    for rank in range(schedule.topology.world_size):
        x = _MARGIN + _COLUMN * rank
        yield f'<path d="M{x} {_MARGIN}V{height - _MARGIN / 2:g}" stroke="#bbb"/>'
        yield f'<text x="{x}" y="20">rank {rank}</text>'
        yield f'<text x="{x}" y="36" fill="#777">host {schedule.topology.host_of(rank)}</text>'


def _arrow(number: int, transfer: Transfer) -> Iterator[str]:
    """From the source as the round begins to the destination as it ends; a loop where they are one."""
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
