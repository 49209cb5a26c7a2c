"""A report is the same with the index of the records, without it, and with one that does not fit."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.core.record_file import RecordFile
from evener.core.record_index import INDEX, MAGIC, ROW
from evener.core.records import RECORDS, EvaluationRecord, Note, StepRecord
from evener.files import open_regular
from evener.tools.report import json_of, report_of
from evener.tools.report.index_reader import CHUNK, rows_of_index
from evener.tools.report.schema import ReportFile


def run(directory: Path, steps: int, seed: int = 0) -> Path:
    """A run with notes, evaluations, repeated steps, unknown losses, spikes, and a change of its ranks."""
    random = np.random.default_rng(seed)
    directory.mkdir(exist_ok=True)
    with closing(RecordFile(directory / RECORDS)) as records:
        number = 0
        for at in range(steps):
            ranks = 2 if at < 0.7 * steps else 3
            compute = tuple((0.1 + 0.01 * random.random(ranks)).tolist())
            loss = math.nan if random.random() < 0.02 else float(random.random())
            seconds = 5.0 if random.random() < 0.01 else 0.1 + 0.01 * float(random.random())
            more = {"compute_seconds": compute, "wait_seconds": (0.01,) * ranks}
            shares = (8 // ranks,) * ranks
            records.write(StepRecord(number, 0, loss, 8, seconds, shares, lr=1 / (1 + number), **more))
            if random.random() < 0.02:
                records.write(Note(number, f"a note of step {number}"))
            if random.random() < 0.01:
                records.write(EvaluationRecord(number + 1, 0, {"accuracy": 0.5}, 9, 0.2))
            number = max(0, number - 3) if random.random() < 0.005 else number + 1
    return directory


def content(directory: Path) -> str:
    return json_of(ReportFile((report_of(directory),)))


def indexed(directory: Path) -> int:
    """How many lines are read from the index."""
    with open_regular(directory / RECORDS) as records:
        return sum(map(len, rows_of_index(directory / INDEX, records)))


@pytest.mark.parametrize("steps", [1, 300, CHUNK + 500])
def test_a_report_is_the_same_with_the_index_and_without(tmp_path: Path, steps: int) -> None:
    directory = run(tmp_path / "run", steps)
    lines = (directory / RECORDS).read_bytes().count(b"\n")
    assert indexed(directory) == lines
    found = content(directory)
    rows = (directory / INDEX).read_bytes()
    for nbytes in (len(rows) - 1, len(MAGIC) + ROW.size * (lines // 2), 3, 0):  # a killed run, or a torn copy
        (directory / INDEX).write_bytes(rows[:nbytes])
        assert indexed(directory) == max(0, (nbytes - len(MAGIC)) // ROW.size)
        assert content(directory) == found
    (directory / INDEX).unlink()
    assert content(directory) == found


def test_an_index_of_more_lines_than_there_are(tmp_path: Path) -> None:
    """The records were copied before the index."""
    directory = run(tmp_path / "run", 500)
    whole = (directory / RECORDS).read_bytes()
    (directory / RECORDS).write_bytes(whole[: len(whole) // 2])
    assert indexed(directory) > 200, "the last line is torn"
    (directory / RECORDS).write_bytes(whole[: whole.index(b"\n", len(whole) // 2) + 1])
    assert indexed(directory) > 200
    found = content(directory)
    (directory / INDEX).unlink()
    assert content(directory) == found


def test_records_that_were_edited_are_read(tmp_path: Path) -> None:
    directory = run(tmp_path / "run", 500)
    lines = (directory / RECORDS).read_bytes().splitlines(keepends=True)
    without = [*lines[:100], *lines[101:]]
    other = [*lines[:-1], lines[-1].replace(b'"samples": 8', b'"samples": 7')]
    assert other[-1] != lines[-1]
    for edited in (without, other, [*reversed(lines)]):
        (directory / RECORDS).write_bytes(b"".join(edited))
        assert indexed(directory) == 0


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_index_changes_nothing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / "damaged"
    if not directory.exists():
        run(directory, 60)
        (directory / "rows").write_bytes((directory / INDEX).read_bytes())
        (directory / INDEX).unlink()
        (directory / "report").write_text(content(directory))
    rows = bytearray((directory / "rows").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        rows[data.draw(st.integers(0, len(rows) - 1))] = data.draw(st.integers(0, 255))
    (directory / INDEX).write_bytes(rows)
    assert content(directory) == (directory / "report").read_text()
