"""Directories of strangers: whatever a file holds, there is a report or an error of Evener's."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.core.attempts import FaultRecord, SaveRecord, StartRecord
from evener.core.records import RunStart, as_json
from evener.errors import EvenerError
from evener.tools.report import ReportFile, compare, json_of, read_report, report_of
from evener.tools.report.schema import EvaluationPoint
from tests.tools.report.making import report, step

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from(
        [10**18, 10**400, -1, 1e308, "x", "", "\x00", [], {}, [[1]], [None], {"a": 1}, "9" * 5000]
    ),
)
"""JSON values that stand where another is expected."""
START = RunStart(
    "digits", {}, 2, 8, 10, 0, parts=(0, 1), devices=("cpu", "cpu"), threads=(1, 1), cores=(2, 2)
)
MERGES = {"merges": [[[0, 0, 0, 4]], [[1, 0, 4, 8]]], "merge_spread": [0.5], "merge_bytes": 3, "wasted": 1}
MEMORY = {"memory_peak": [5, 6], "memory_held": [4, 5], "memory_parts": {"activations": [1, 2]}}
LINES = [
    step(0, **MERGES, **MEMORY),
    {"kind": "note", "step": 1, "words": "words"},
    {
        "kind": "decision",
        "step": 1,
        "effective_step": 2,
        "old_shares": [4, 4],
        "new_shares": [5, 3],
        "reason": "r",
    },
    {"kind": "skipped", "step": 1, "epoch": 0, "samples": [{"rank": 0}]},
    {"kind": "evaluation", "step": 1, "epoch": 0, "metrics": {"loss": 0.5}, "samples": 5, "seconds": 0.1},
    *(step(at, forward_seconds=[0.01, 0.02], costs=[1.0, 2.0]) for at in range(1, 6)),
]
FILES: dict[str, Any] = {
    "records.jsonl": LINES,
    "attempts.jsonl": [
        as_json(StartRecord.of_run(START, 1e9)),
        as_json(SaveRecord(3, 0.5)),
        as_json(FaultRecord("death", 1, "words")),
        as_json(StartRecord.of_run(START, 1e9, 2, 0.5)),
    ],
    "config.json": {
        "task": "digits",
        "batch_size": 8,
        "balance": None,
        "memory_limit": "4GB",
        "throttle": "1,0.5",
    },
    "task.json": {"task": "digits", "options": {"width": 3}},
    "summary.json": {
        "task": "digits",
        "world_size": 2,
        "ranks": [{"cpu_seconds": 1.0, "queued_seconds": 0.5}] * 2,
        "workers": [0, 0],
        "graphs": [1, 1],
        "versions": {"torch": "2"},
        "collectives": [{"name": "all_reduce", "algorithm": "ring", "nbytes": 8, "calls": 9}],
        "link_seconds": [0.1, 0.2],
        "samples_in_seconds": 48,
        "batch_size": 8,
        "merging": "words",
        "devices": ["cpu", "cpu"],
    },
    "evener.json": {"written_by": "evener", "run": "a", "history": []},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a JSON value, itself included."""
    yield path
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for key, entry in entries:
        yield from places(entry, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at[key] = list(at[key]) if isinstance(at[key], tuple) else at[key]
        at = at[key]
    at[path[-1]] = new
    return changed


PLACES = [(name, path) for name, content in FILES.items() for path in places(content) if path]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(PLACES), ODD), min_size=1, max_size=3))
def test_odd_values_are_unknown_or_errors(changes: list[tuple[tuple[str, tuple[Any, ...]], Any]]) -> None:
    files = FILES
    for (name, path), odd in changes:
        try:
            files = files | {name: replaced(files[name], path, odd)}
        except (KeyError, IndexError, TypeError):  # an earlier change has removed the place
            continue
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            lines = content if name.endswith("jsonl") else [content]
            Path(directory, name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            found = report_of(Path(directory))
        except EvenerError:
            return
    assert json.loads(json_of(ReportFile((found,))))["runs"][0]["identity"]["name"] == found.identity.name


WHOLE = report(
    [{"compute": 0.1}] * 2, block_seconds=(0.1,) * 9, evaluations=(EvaluationPoint(5, 0, {"a": 0.5}, 5, 0.1),)
)
REPORT = json.loads(json.dumps(asdict(ReportFile((WHOLE,)))))


@settings(max_examples=60)
@given(st.sampled_from([path for path in places(REPORT) if path]), ODD)
def test_odd_reports_are_read_or_errors(path: tuple[Any, ...], odd: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "report.json")
        place.write_text(json.dumps(replaced(REPORT, path, odd)))
        try:
            runs = read_report(place).runs
            compare(runs[0], WHOLE).words() if runs else None
        except EvenerError:
            return
