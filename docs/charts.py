"""Bars of the records of benchmarks, where a comment of a page asks for them (``benchmarks/page.py`` says how).

The table of the same numbers stays below, for those who read it, or hear it.
"""

from __future__ import annotations

import html
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.page import MARKED, marked_table
from benchmarks.results import read_records

LABEL, WIDTH, HEIGHT = 350, 380, 20
"""Of the labels, of the longest bar, and of a bar, in units of the drawing."""
SHADES = ("#5b8db8", "#c9783a", "#6aa06a", "#a06aa0", "#8a8a4a")
"""Of the columns; they are seen on a light and on a dark page."""


def with_bars(markdown: str) -> str:
    """Puts bars and a table of the records in the place of each marked table."""
    records = read_records() if MARKED.search(markdown) else {}

    def drawn(what: str) -> str:
        table = marked_table(what, records)
        return f"{bars(table)}\n\n{table}"

    return MARKED.sub(lambda found: drawn(found["what"]), markdown)


def bars(table: str) -> str:
    """An SVG with a group of bars for each row, one for each column."""
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().split("\n")
    ]
    longest = max(_length(cell) for row in rows for cell in row[1:])
    drawn, y = [], 4
    if len(head) > 2:
        for place, name in enumerate(head[1:]):
            drawn.append(_bar(LABEL, y, 14, place) + _text(LABEL + 22, y, name))
            y += HEIGHT
        y += 10
    for label, *cells in rows:
        drawn.append(_text(0, y + (len(cells) - 1) * HEIGHT / 2, label))
        for place, cell in enumerate(cells):
            width = WIDTH * _length(cell) / longest
            drawn.append(_bar(LABEL, y, width, place) + _text(LABEL + width + 6, y, cell))
            y += HEIGHT
        y += 8
    size = f'viewBox="0 0 {LABEL + WIDTH + 60} {y}" style="max-width: 46rem" font-size="14"'
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} fill="currentColor">'
    return f"<div>{opened}<title>Bars of the numbers in the table below</title>{''.join(drawn)}</svg></div>"


def _length(cell: str) -> float:
    return 0.0 if cell == "-" else float(cell.replace(",", ""))


def _bar(x: float, y: float, width: float, place: int) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{HEIGHT - 4}" rx="2" fill="{SHADES[place]}"/>'
    )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y + HEIGHT - 7:g}">{html.escape(words.replace("`", ""))}</text>'
