from __future__ import annotations

import dataclasses
import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

from evener.core.record_file import RecordFile
from evener.core.records import EvaluationRecord, StepRecord, as_json
from evener.files import dumps, write_json


def step(number: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(number, 0, loss, samples=4, seconds=0.1, shares=(3, 1), lr=0.1)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_is_one_line_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    with closing(RecordFile(path)) as records:
        records.write(step(0))
        records.write(EvaluationRecord(1, 0, {"accuracy": 0.5}, samples=9, seconds=0.2))
        first, second = lines(path)
    assert first.keys() == {"kind"} | {entry.name for entry in dataclasses.fields(StepRecord)}
    assert (first["kind"], first["step"], first["loss"], first["shares"]) == ("step", 0, 1.0, [3, 1])
    assert (second["kind"], second["step"], second["metrics"]) == ("evaluation", 1, {"accuracy": 0.5})


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    for number in (0, 7):
        records = RecordFile(tmp_path / "records.jsonl")
        records.write(step(number))
        records.close()
    assert [record["step"] for record in lines(tmp_path / "records.jsonl")] == [7]


def test_steps_of_an_attempt_that_begins_anew_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for counts, lost in ((False, 0), (True, 3)):
        records = RecordFile(path, counts_lost=counts)
        assert records.lost_steps == lost
        for number in range(3):
            records.write(step(number))
        records.close()


def test_a_run_that_goes_on_keeps_the_records_of_steps_its_checkpoint_knows(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = RecordFile(path)
    for number in range(4):
        records.write(step(number))
        records.write(EvaluationRecord(number + 1, 0, {}, 9, 0.2))
    records.close()
    path.write_text(path.read_text() + '{"kind": "step", "st')  # killed while writing
    records = RecordFile(path, steps_done=2)
    assert (records.lost_steps, records.lost_seconds) == (2, 0.2)
    records.write(step(2))
    records.close()
    assert [(record["kind"], record["step"]) for record in lines(path)] == [
        ("step", 0),
        ("evaluation", 1),
        ("step", 1),
        ("evaluation", 2),
        ("step", 2),
    ]


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    assert json.loads(dumps(as_json(step(0, math.nan))))["loss"] is None
    write_json(tmp_path / "summary.json", {"a": [math.inf, 1.5], "b": {"c": (-math.inf,)}})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": [None, 1.5], "b": {"c": [None]}}


def test_what_is_told_of_a_step_before_it_is_no_step(tmp_path: Path) -> None:
    """A rank may die in between: the step is still to be written then."""
    path = tmp_path / "records.jsonl"
    lines = [{"kind": "step", "step": 0}, {"kind": "skipped", "step": 1}, {"kind": "note", "step": 2}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = RecordFile(path, 2)
    file.close()
    assert file.steps_done == 1
    assert len(path.read_text().splitlines()) == 3
