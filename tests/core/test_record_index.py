from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest

from evener.core.record_file import RecordFile
from evener.core.record_index import INDEX, MAGIC, NO_STEP, ROW
from evener.core.records import Note, StepRecord


def step(number: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(number, 2, loss, 4, 0.1, shares=(3, 1), lr=0.1, compute_seconds=(0.1, 0.2, 0.3))


def rows(directory: Path) -> list[tuple[float, ...]]:
    content = (directory / INDEX).read_bytes()
    assert content.startswith(MAGIC)
    return list(ROW.iter_unpack(content[len(MAGIC) :]))


def test_each_line_has_a_row_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with closing(RecordFile(path)) as records:
        records.write(step(0))
        records.write(Note(1, "words"))
        records.write(step(1, math.nan))
    first, second, _ = path.read_bytes().splitlines(keepends=True)
    assert rows(tmp_path)[0] == (0, 2, 1.0, 4, 0.1, 0, 3)
    assert rows(tmp_path)[1] == (0, 0, 0, 0, 0, len(first), NO_STEP)
    assert rows(tmp_path)[2][:2] == (1, 2)
    assert math.isnan(rows(tmp_path)[2][2])
    assert rows(tmp_path)[2][5:] == (len(first + second), 3)


def test_a_run_that_goes_on_has_the_index_of_what_it_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with closing(RecordFile(path)) as records:
        for number in range(5):
            records.write(step(number))
    with closing(RecordFile(path, steps_done=2)) as records:
        assert records.steps_done == 2
        records.write(step(2, loss=7.0))
    assert [row[0] for row in rows(tmp_path)] == [0, 1, 2]
    lines = path.read_bytes().splitlines(keepends=True)
    assert [row[5] for row in rows(tmp_path)] == [0, len(lines[0]), len(lines[0] + lines[1])]
    assert rows(tmp_path)[2][2] == 7.0


def test_records_of_another_version_are_kept_without_an_index(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "step", "step": 0, "loss": "x"}\n')
    with closing(RecordFile(path, steps_done=1)) as records:
        records.write(step(1))
    assert len(path.read_text().splitlines()) == 2
    assert rows(tmp_path) == []


def test_an_index_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.jsonl"
    (tmp_path / INDEX).mkdir()
    with closing(RecordFile(path)) as records:
        records.write(step(0))
    (tmp_path / INDEX).rmdir()

    class Full:
        def write(self, rows: bytes) -> int:
            raise OSError("no space")

        def close(self) -> None:
            pass

    with closing(RecordFile(path)) as records:
        records._index._file.close()  # type: ignore[union-attr]
        monkeypatch.setattr(records._index, "_file", Full())
        for number in range(200):
            records.write(step(number))
    assert len(path.read_text().splitlines()) == 200
    assert (tmp_path / INDEX).read_bytes() == b""
