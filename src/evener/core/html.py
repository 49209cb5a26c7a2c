"""Builds small HTML tables, by which a notebook shows results.

They have no colors, styles of a page or scripts, so that they look right in light and dark notebooks, and texts are
escaped: names of tasks, metrics and parameters may be anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from evener.core.text import counted, printable


def html_text(text: object) -> str:
    """Returns ``text`` escaped for HTML, with control characters escaped."""
    return escape(printable(str(text)))


def html_table(caption: str, rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Returns a table whose first column names the rows.

    Args:
        caption: What the table shows.
        rows: The cells of each row.
        head: Names of the columns; none are shown if it is empty.
    """
    top = "".join(f'<th scope="col">{html_text(name)}</th>' for name in head)
    lines = [f"<caption>{html_text(caption)}</caption>", f"<thead><tr>{top}</tr></thead>" if head else ""]
    for name, *cells in rows:
        rest = "".join(f"<td>{html_text(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{html_text(name)}</th>{rest}</tr>')
    return f"<table>{''.join(lines)}</table>"


def summary_html(summary: Any) -> str:
    """Returns a `RunSummary` as tables: the result, and what each rank did."""
    samples = f"{summary.samples:,} in {summary.seconds:.1f} s: {summary.samples_per_second:,.0f} per second"
    if summary.samples_in_seconds not in (0, summary.samples):
        samples = f"{summary.samples_in_seconds:,} of {samples}"
    rows = [("steps", f"{summary.steps:,} in {counted(summary.epochs, 'epoch')}"), ("samples", samples)]
    values = {"last loss": summary.final_loss} | summary.metrics
    rows += [(name, f"{value:.4f}") for name, value in values.items()]
    rows += [("run directory", summary.run_dir)] if summary.run_dir else []
    ranks = counted(summary.world_size, "rank")
    state = "stopped" if summary.interrupted else "trained"
    result = html_table(f"{summary.task}: {state} with {summary.strategy} on {ranks}", rows)
    if summary.world_size == 1 or len(summary.ranks) != len(summary.shares):
        return result
    parts = ("compute", "wait", "input")
    times = [[f"{each[f'{part}_seconds']:.2f} s" for part in parts] for each in summary.ranks]
    each_rank = [(rank, f"{share:.1%}", *times[rank]) for rank, share in enumerate(summary.shares)]
    return result + html_table("ranks", each_rank, ("rank", "share", *parts))
