"""Records of benchmarks: one JSON file for each, ``benchmarks/results/NAME.json``.

A benchmark prints its tables by :func:`record`, which also writes them where the runner asks for it. The format::

    {
     "benchmark": "overhead",
     "tables": {
      "two CPU ranks": {
       "date": "2026-11-26",
       "machine": "2 cores, x86_64, Python 3.11.7, torch 2.13.0+cpu",
       "command": "python -m benchmarks.overhead --turns 12",
       "ratio": "time over that of plain DDP",
       "columns": ["workload", "plain DDP", "Evener"],
       "rows": [
        ["digits CNN", {"value": 8.26, "unit": "ms", "ratio": 1.0}, {"value": 5.87, "unit": "ms", "ratio": 0.72}]
       ]
      }
     }
    }

=========  ===========================================================================================================
tables     by title: one that is measured again takes the place of the one before, all others stay
ratio      what the ratios of the cells are, empty if there are none
rows       a label, and for each further column a cell, a word, or null for what was not measured
cell       ``value`` (usually a median) and ``unit`` (one of :data:`UNITS`); and where they are known ``ratio``, the
           median of those of paired turns, ``spread``, of the ratio if there is one and of the value otherwise, and
           ``predicted``, in the same unit
spread     half of the distance between the quartiles over all turns; of accuracies half of a 95 % interval
=========  ===========================================================================================================

Numbers have four significant digits.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from evener.files import read_json, replace_text

DIRECTORY = Path(__file__).parent / "results"
PLACE = "EVENER__RECORDS"
"""The variable of the environment that names the directory for records; without it tables are only printed."""
UNITS = {
    "",
    "%",
    "x",
    "ns",
    "us",
    "ms",
    "s",
    "MB",
    "MiB",
    "GiB",
    "samples/s",
    "words/s",
    "versions",
    "points",
}
FIELDS = {"date", "machine", "command", "ratio", "columns", "rows"}


class Cell(TypedDict):
    """A number of a table, as in the records."""

    value: float
    unit: str
    ratio: NotRequired[float]
    spread: NotRequired[float]
    predicted: NotRequired[float]


Value = Cell | str | None


@dataclass(frozen=True)
class Table:
    """What a benchmark has to show. Rows that are generated are printed one by one, as they come."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Value]]
    """Each has a label and the other columns' values."""
    ratio: str = ""


def cell(
    value: float,
    unit: str = "",
    *,
    ratio: float | None = None,
    spread: float | None = None,
    predicted: float | None = None,
) -> Cell:
    """A number and what belongs to it."""
    found: dict[str, Any] = {"value": _rounded(value), "unit": unit}
    others = {"ratio": ratio, "spread": spread, "predicted": predicted}
    return found | {name: _rounded(each) for name, each in others.items() if each is not None}  # type: ignore[return-value]


def _rounded(value: float) -> float:
    if isinstance(value, int):
        return value
    short = float(f"{value:.4g}")
    return int(short) if 1000 <= abs(short) < math.inf else short


def spread(values: Sequence[float]) -> float | None:
    """Half of the distance between the quartiles; None of fewer than three values."""
    if len(values) < 3:
        return None
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def machine() -> str:
    """What the figures depend on."""
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    return f"{cores} cores, {platform.machine()}, Python {python}, torch {version('torch')}"


def record(name: str, title: str, table: Table, *, beside: str = "") -> None:
    """Prints a table, and writes it to the record of benchmark ``name`` if :data:`PLACE` is set.

    Args:
        title: What tells this table from the others of the benchmark.
        beside: What else the figures depend on, besides :func:`machine`.
    """
    where = f"{machine()}, {beside}" if beside else machine()
    print(f"\n{title} ({date.today()}, {where})\n", *head(table.columns), sep="\n", flush=True)
    rows = []
    for row in table.rows:
        rows.append(list(row))
        print(line(map(shown, row)), flush=True)
    if directory := os.environ.get(PLACE):
        made = {
            "date": str(date.today()),
            "machine": where,
            "command": shlex.join(
                ["python", "-m", f"benchmarks.{name}", *map(_without_directory, sys.argv[1:])]
            ),
            "ratio": table.ratio,
            "columns": list(table.columns),
            "rows": rows,
        }
        merge(Path(directory), name, {title: made})


def _without_directory(argument: str) -> str:
    """A file of this machine by its name alone: where it lies says nothing to others."""
    path = Path(argument)
    return path.name if path.is_absolute() else argument


def merge(directory: Path, name: str, tables: Mapping[str, Any]) -> None:
    """Puts tables into a record in the place of those with the same titles."""
    path = directory / f"{name}.json"
    before = read_json(path)["tables"] if path.exists() else {}
    made = {"benchmark": name, "tables": {**before, **tables}}
    if wrong := list(problems(name, made)):
        raise ValueError(f"the record of {name} would be wrong: {'; '.join(wrong)}")
    replace_text(path, as_text(made))


def read_records(directory: Path = DIRECTORY) -> dict[str, dict[str, Any]]:
    """The tables of all records, by benchmark."""
    return {path.stem: read_json(path)["tables"] for path in sorted(directory.glob("*.json"))}


def as_text(made: Mapping[str, Any]) -> str:
    """JSON with a line for each row."""
    rows = [row for table in made["tables"].values() for row in table["rows"]]
    number = iter(range(len(rows)))
    tables = {
        title: table | {"rows": [f"@{next(number)}@" for _ in table["rows"]]}
        for title, table in made["tables"].items()
    }
    text = json.dumps({**made, "tables": tables}, indent=1, ensure_ascii=False) + "\n"
    return re.sub(r'"@(\d+)@"', lambda found: json.dumps(rows[int(found[1])], ensure_ascii=False), text)


def problems(name: str, made: Any) -> Iterator[str]:
    """What is wrong with a record."""
    if made.keys() != {"benchmark", "tables"} or made["benchmark"] != name or not made["tables"]:
        yield "not a benchmark's own name and its tables"
        return
    for title, table in made["tables"].items():
        if table.keys() != FIELDS or not all(table[each] for each in FIELDS - {"ratio"}):
            yield f"{title}: the fields are not {', '.join(sorted(FIELDS))}"
        elif not re.fullmatch(r"\d{4}-\d\d-\d\d", table["date"]):
            yield f"{title}: the date {table['date']!r}"
        else:
            for row in table["rows"]:
                if len(row) != len(table["columns"]) or not isinstance(row[0], str):
                    yield f"{title}: a row {row} for {len(table['columns'])} columns"
                yield from (f"{title}, {row[0]}: {each}" for each in row[1:] if not _is_value(each))
            has_ratios = any(
                "ratio" in each for row in table["rows"] for each in row if isinstance(each, dict)
            )
            if has_ratios != bool(table["ratio"]):
                yield f"{title}: ratios, and what they are"


def _is_value(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None or isinstance(value, str)
    numbers = [each for name, each in value.items() if name != "unit"]
    return (
        {"value", "unit"} <= value.keys() <= {*Cell.__annotations__}
        and value["unit"] in UNITS
        and all(isinstance(each, int | float) and math.isfinite(each) for each in numbers)
    )


# Markdown


def head(columns: Sequence[str]) -> list[str]:
    return [line(columns), "|---" * len(columns) + "|"]


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(value: Value) -> str:
    """A value as tables show it: ``5.87 ms (0.72x ±0.03)``, and in square brackets what was predicted."""
    if not isinstance(value, dict):
        return "-" if value is None else " ".join(value.split()).replace("|", "\\|")
    about = f" ±{value['spread']:.2f}" if "spread" in value else ""
    gap = "" if value["unit"] in ("", "x", "%") else " "
    number = f"{value['value']:.2f}" if value["unit"] == "x" else f"{value['value']:,}"
    text = f"{number}{'' if 'ratio' in value else about}{gap}{value['unit']}"
    text += f" [{value['predicted']:,}]" if "predicted" in value else ""
    return f"{text} ({value['ratio']:.2f}x{about})" if "ratio" in value else text
