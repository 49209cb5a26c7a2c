"""The sections of a report's page: which chart and which table shows what, for one run or several.

Quantities of a whole run, such as the loss, share a chart. Quantities of ranks (``rank_sections``) have a chart for
each run, with the same vertical axis. A section without data is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evener.core.text import shortened
from evener.tools.report import schema
from evener.tools.report.charts import Bar, BarPart, Figure, Trace, bars, lines
from evener.tools.report.numbers import value_text
from evener.tools.report.rank_sections import (
    Named,
    collective_parts,
    memory_parts,
    rank_parts,
    share_parts,
    side_by_side,
    spot_of,
    spots_of,
    timeline_parts,
    title_of,
)
from evener.tools.report.schema import Report
from evener.tools.report.tables import TEXT, WHOLE, Table, tabulated

GOODPUT = {
    "startup": "start-up",
    "compute": "compute",
    "communication": "communication",
    "waiting": "waiting for slower ranks",
    "input": "waiting for samples",
    "checkpoints": "checkpoints",
    "evaluation": "evaluation",
    "lost_steps": "lost steps",
    "other": "other",
}
"""The parts of the wall-clock time: the field of `evener.tools.report.schema.Goodput`, and its name."""
_METRICS = 12
_SETBACKS = ("death", "hang", "error", "restart", "skipped")


@dataclass(frozen=True)
class Words:
    """Paragraphs, or commands."""

    title: str
    lines: tuple[str, ...]
    is_code: bool = False


Part = Figure | Table | Words


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading. The verdict stands before all sections."""

    anchor: str
    title: str
    parts: tuple[Part, ...]


def sections_of(runs: Sequence[Report]) -> list[Section]:
    """Returns the sections that have data."""
    named = list(zip(run_names(runs), runs, strict=True))
    makers: tuple[tuple[str, str, Callable[[list[Named]], Iterator[Part | None]]], ...] = (
        ("time", "Where the time went", _goodput),
        ("loss", "Loss and metrics", _loss),
        ("speed", "Speed", _speed),
        ("shares", "Shares", side_by_side(share_parts)),
        ("ranks", "Ranks", side_by_side(rank_parts)),
        ("memory", "Memory", side_by_side(memory_parts)),
        ("collectives", "Collectives", side_by_side(collective_parts)),
        ("timeline", "A few steps over time", side_by_side(timeline_parts)),
        ("events", "Events", _events),
        ("prediction", "Predicted and measured", _prediction),
        ("merges", "Merges", _merges),
        ("settings", "Settings and versions", _settings),
        ("reproduce", "How to reproduce", _reproduce),
    )
    found = []
    for anchor, title, make in makers:
        parts = tuple(part for part in make(named) if part is not None)
        if parts:
            found.append(Section(anchor, title, parts))
    return found


def run_names(runs: Sequence[Report]) -> list[str]:
    """Returns a short name for each run. Runs of the same name get numbers."""
    names = [shortened(run.identity.name, 60) for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]


def _goodput(named: list[Named]) -> Iterator[Part | None]:
    title, rows = "Wall-clock time of all starts", []
    for name, run in named:
        begin, segments = 0.0, []
        for part, words in GOODPUT.items():
            seconds = getattr(run.goodput, part) or 0.0
            segments.append(BarPart(words, part, begin, seconds))
            begin += seconds
        rows.append(Bar(name if len(named) > 1 else "", tuple(segments)))
    used = [part for part in GOODPUT if any(getattr(run.goodput, part) for _, run in named)]
    columns = [
        (name if len(named) > 1 else "time", TEXT, lambda part, run=run: _time_text(run, part))
        for name, run in named
    ]
    table = tabulated(title, used, [("part", TEXT, GOODPUT.get), *columns])
    figure = bars(title, "s", rows, table, "Parts of a step are means over the ranks.", height=34, shown=True)
    if figure is not None and len(named) == 1:
        told = {part: _time_text(named[0][1], part) for part in used}
        figure = replace(figure, legend=tuple((part, words, told[part]) for part, words, _ in figure.legend))
    yield figure


def _time_text(run: Report, part: str) -> str:
    seconds = getattr(run.goodput, part)
    whole = run.goodput.total or 1.0
    return "–" if seconds is None else f"{value_text(seconds / whole, '1')}, {value_text(seconds, 's')}"


def _loss(named: list[Named]) -> Iterator[Part | None]:
    marks = _setbacks(named)
    yield lines("Loss", "", _of_runs(named, schema.LOSS), marks=marks, from_zero=False, at_end=True)
    names = dict.fromkeys(name for _, run in named for point in run.evaluations for name in point.metrics)
    for metric in list(names)[:_METRICS]:
        traces = []
        for place, (name, run) in enumerate(named):
            values = [(point.step, point.metrics.get(metric)) for point in run.evaluations]
            traces.append(Trace(name, f"k{place % 8}", tuple(spot_of(x, x, y, y, y) for x, y in values)))
        title = f"Evaluation: {shortened(metric, 80)}"
        yield lines(title, "", traces, marks=marks, from_zero=False, at_end=True)
    if len(names) > _METRICS:
        yield Words(
            "Further metrics", (f"{len(names) - _METRICS:,} metrics more are in the data of the report.",)
        )
    yield lines("Learning rate", "", _of_runs(named, schema.LR), at_end=True)


def _speed(named: list[Named]) -> Iterator[Part | None]:
    marks = _setbacks(named)
    yield lines("Throughput", "samples/s", _of_runs(named, schema.THROUGHPUT), marks=marks)
    yield lines("Time of a step", "s", _of_runs(named, schema.STEP_SECONDS), marks=marks)


def _of_runs(named: list[Named], name: str) -> list[Trace]:
    found = []
    for place, (run_name, run) in enumerate(named):
        series = next((each for each in run.series if each.name == name and each.rank is None), None)
        found.append(Trace(run_name, f"k{place % 8}", spots_of(run, series) if series else ()))
    return found


def _setbacks(named: list[Named]) -> list[tuple[float, str]]:
    """Returns what is marked in the charts of a single run."""
    events = named[0][1].events if len(named) == 1 else ()
    return [(event.step, event.words) for event in events if event.kind in _SETBACKS]


def _events(named: list[Named]) -> Iterator[Part | None]:
    for name, run in named:
        columns = [
            ("step", WHOLE, lambda each: each.step),
            ("kind", TEXT, lambda each: each.kind),
            ("rank", WHOLE, lambda each: each.rank),
            ("what", TEXT, lambda each: each.words),
        ]
        if run.events:
            yield tabulated(title_of(name, "What happened", named), run.events, columns)
        columns = [
            ("from step", WHOLE, lambda each: each.step),
            ("ranks", WHOLE, lambda each: each.world_size),
            ("time (UTC)", TEXT, lambda each: each.started),
            ("start-up", "s", lambda each: each.startup_seconds),
            ("repeated steps", WHOLE, lambda each: each.lost_steps),
            ("lost time", "s", lambda each: each.lost_seconds),
            ("reason", TEXT, lambda each: each.reason),
        ]
        if len(run.attempts) > 1:
            yield tabulated(title_of(name, "Starts of the ranks", named), run.attempts, columns)


def _prediction(named: list[Named]) -> Iterator[Part | None]:
    for name, run in named:
        found = run.prediction
        if found is None:
            continue
        title = title_of(name, "A step, predicted and measured", named)
        columns = [
            ("part", TEXT, lambda each: each.name),
            ("predicted", "s", lambda each: each.predicted),
            ("measured", "s", lambda each: each.measured),
            (
                "difference",
                "1",
                lambda each: each.predicted / each.measured - 1 if each.measured > 0 else None,
            ),
        ]
        rows = [
            Bar(f"{each.name}, {word}", (BarPart(word, style, 0.0, seconds),))
            for each in found.terms
            for word, style, seconds in (
                ("predicted", "k0", each.predicted),
                ("measured", "k1", each.measured),
            )
        ]
        low, high = value_text(found.low, "s"), value_text(found.high, "s")
        caption = f"{found.words} Nine of ten steps were predicted to take {low} to {high}."
        yield bars(title, "s", rows, tabulated(title, found.terms, columns), caption)


def _merges(named: list[Named]) -> Iterator[Part | None]:
    for name, run in named:
        found = run.merges
        if found is None:
            continue
        yield Words(title_of(name, "How replicas merged", named), found.words) if found.words else None
        facts = {
            "merges": f"{found.number:,}",
            "bytes of rank 0": value_text(found.nbytes, "B"),
            "samples computed again": f"{found.wasted:,}",
            **{f"gradients {age} versions old": f"{number:,}" for age, number in found.versions_old.items()},
        }
        yield Table(title_of(name, "Merges", named), ("what", "number"), tuple(facts.items()), "lr")
        if found.spread is not None:
            spread = [Trace("spread", "k0", spots_of(run, found.spread))]
            yield lines(title_of(name, "Distance of the replicas at merges", named), "", spread)


def _settings(named: list[Named]) -> Iterator[Part | None]:
    runs = [run.identity for _, run in named]
    heads = tuple(name for name, _ in named) if len(named) > 1 else ("value",)
    facts = [
        {
            "state": run.state,
            "task": run.task,
            "strategy": run.strategy,
            "all-reduce": run.allreduce,
            "ranks": run.world_size,
            "devices": ", ".join(
                f"{run.devices.count(name)} × {name}" for name in dict.fromkeys(run.devices)
            ),
            "batch size": run.batch_size,
            "epochs": run.epochs or None,
            "started (UTC)": run.started,
            "weights (sha256)": run.weights_digest,
            "notes": "; ".join(run.notes),
        }
        for run in runs
    ]
    yield _facts("Runs" if len(named) > 1 else "Run", facts, heads)
    yield _facts("Settings", [run.settings for run in runs], heads)
    yield _facts("Versions", [run.versions for run in runs], heads)


def _facts(title: str, of_runs: Sequence[dict[str, Any]], heads: tuple[str, ...]) -> Table | None:
    """Returns a row for each name that a run has. Rows in which the runs differ come first, and say so."""
    names = dict.fromkeys(name for each in of_runs for name in each)
    rows = [(str(name), *(_fact_text(each.get(name)) for each in of_runs)) for name in names]
    known = [row for row in rows if any(row[1:])]
    differing = [(f"{row[0]} (differs)", *row[1:]) for row in known if len(set(row[1:])) > 1]
    rows = differing + [row for row in known if len(set(row[1:])) == 1]
    return Table(title, ("name", *heads), tuple(rows), "l" * (1 + len(heads))) if rows else None


def _fact_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def _reproduce(named: list[Named]) -> Iterator[Part | None]:
    for name, run in named:
        if run.identity.command:
            yield Words(title_of(name, "Command", named), (run.identity.command,), is_code=True)
