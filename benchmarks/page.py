"""Makes ``RESULTS.md`` of the records and of ``catalogue.toml``, and the tables of the page of benchmarks."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import DIRECTORY, Value, head, line, read_records, shown
from evener.files import replace_text

HERE = Path(__file__).parent
GLANCE = HERE.parent / "docs/benchmarks.md"
MARKED = re.compile(r"^<!-- bars: (?P<what>.+) -->\n(?P<table>(?:\|.*\n)*)", re.M)
"""A table of the page of benchmarks, which is drawn as bars on the site: ``NAME/TITLE + NAME/TITLE | ratio or value |
COLUMN | COLUMN | rows: PART OF A LABEL``. The last may be missing."""
INTRODUCTION = """\
# Results

Ratios within one run count; times by themselves do not, since these machines are shared and noisy. Each benchmark lets
its contenders take turns (A B C A B C ...) in the same processes; times are medians, ratios medians of paired turns.
Behind a ratio, ± is half of the distance between its quartiles; older records have none. Unless something else is said,
ranks are CPU processes of one thread over gloo. One GPU was measured, once: [a step on one GPU](#a-step-on-one-gpu).
**No two GPUs and no second machine have been.**

This page is made of the [records](results), one JSON file for each benchmark, and of the [catalogue](catalogue.toml),
which has the texts: `make bench` measures and writes it again. [The history](HISTORY.md) has all that was measured
before, with the reasons for what was decided. Notes begin with the day of the figures that they explain.
"""


@dataclass(frozen=True)
class Entry:
    """A benchmark in the catalogue."""

    name: str
    title: str
    compares: str
    """What is compared, in a sentence."""
    seconds: int
    """About how long the runs take on two cores."""
    runs: tuple[str, ...] = ("",)
    """The arguments of each run of it, one after the other."""
    read: str = ""
    """How to read the tables."""
    needs: str = ""
    """Why it is not part of ``make bench``: what else it needs."""
    notes: str = ""
    """What explains figures, each paragraph with the day of these figures."""

    @property
    def commands(self) -> list[list[str]]:
        return [["python", "-m", f"benchmarks.{self.name}", *shlex.split(each)] for each in self.runs]


def catalogue() -> dict[str, Entry]:
    """All benchmarks, in the order of the page."""
    listed: dict[str, dict[str, Any]] = tomllib.loads((HERE / "catalogue.toml").read_text())
    return {
        name: Entry(name, **entry | {"runs": (*entry.get("runs", [""]),)}) for name, entry in listed.items()
    }


def results_page(entries: Mapping[str, Entry], records: Mapping[str, Mapping[str, Any]]) -> str:
    """``RESULTS.md``."""
    parts = [INTRODUCTION, *_left_out(entries)]
    for entry in entries.values():
        parts += _section(entry, records.get(entry.name, {}))
    return "\n".join(parts)


def _left_out(entries: Mapping[str, Entry]) -> Iterator[str]:
    yield "`make bench` leaves these out; `make bench ONLY=NAME` runs one of them:\n"
    yield from head(["NAME", "what it needs"])
    yield from (
        line([f"[`{entry.name}`](#{_anchor(entry.title)})", entry.needs])
        for entry in entries.values()
        if entry.needs
    )
    yield ""


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _section(entry: Entry, tables: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {entry.title}\n\n{entry.compares.strip()}\n"
    if entry.read:
        yield f"{entry.read.strip()}\n"
    if not tables:
        yield f"Not recorded yet: `make bench ONLY={entry.name}`.\n"
    for title, table in tables.items():
        ratio = f" In brackets: {table['ratio']}." if table["ratio"] else ""
        yield f"**{title}**, {table['date']}, {table['machine']}; `{table['command']}`.{ratio}\n"
        yield from head(table["columns"])
        yield from (line(map(shown, row)) for row in table["rows"])
        yield ""
    if entry.notes:
        yield f"{entry.notes.strip()}\n"


# The page of benchmarks


def with_tables(page: str, records: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the tables that its marks ask for."""
    return MARKED.sub(
        lambda found: f"<!-- bars: {found['what']} -->\n{marked_table(found['what'], records)}", page
    )


def marked_table(what: str, records: Mapping[str, Mapping[str, Any]]) -> str:
    """The table that a mark asks for.

    Raises:
        KeyError: If there is no such record, table or column.
    """
    places, kind, *columns = [part.strip() for part in what.split(" | ")]
    of = columns.pop().removeprefix("rows: ") if columns[-1].startswith("rows: ") else ""
    rows = []
    for place in places.split(" + "):
        name, _, title = place.partition("/")
        table = records.get(name, {}).get(title)
        if table is None:
            raise KeyError(f"there is no record {place}")
        chosen = [_place(table["columns"], column, place) for column in columns]
        rows += [
            [row[0], *(_number(row[each], kind) for each in chosen)] for row in table["rows"] if of in row[0]
        ]
    return "\n".join([*head(["", *columns]), *map(line, rows)]) + "\n"


def _place(columns: Sequence[str], column: str, place: str) -> int:
    if column not in columns:
        raise KeyError(f"{place} has no column {column!r}, only {', '.join(columns)}")
    return columns.index(column)


def _number(value: Value, kind: str) -> str:
    if not isinstance(value, dict):
        return "-"
    return f"{value['ratio']:.2f}" if kind == "ratio" else f"{value['value']:,}"


def write_pages(directory: Path = DIRECTORY) -> None:
    """Writes ``RESULTS.md`` beside the directory of records, and for Evener's own the tables of the site's page.

    Raises:
        KeyError: If the site's page asks for what no record has.
    """
    records = read_records(directory)
    replace_text(directory.parent / "RESULTS.md", results_page(catalogue(), records))
    if directory == DIRECTORY:
        replace_text(GLANCE, with_tables(GLANCE.read_text(), records))
