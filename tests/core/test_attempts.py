from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from evener.core.attempts import ATTEMPTS, FaultRecord, SaveRecord, StartRecord, append_attempt, fault_record
from evener.core.records import RunStart
from evener.errors import RankError, RankTimeoutError

_START = StartRecord.of_run(RunStart("digits", {"seed": 0}, 2, 8, 10, 4, startup_seconds=1.5), 100.0, 3, 0.5)


def test_records_are_appended(tmp_path: Path) -> None:
    append_attempt(tmp_path, _START)
    append_attempt(tmp_path, SaveRecord(5, 0.25))
    first, second = map(json.loads, (tmp_path / ATTEMPTS).read_text().splitlines())
    assert (first["kind"], first["step"], first["started"], first["startup_seconds"]) == (
        "start",
        4,
        100.0,
        1.5,
    )
    assert (first["lost_steps"], first["lost_seconds"]) == (3, 0.5)
    assert (first["run"]["world_size"], "settings" in first["run"]) == (2, False)
    assert second == {"kind": "save", "step": 5, "seconds": 0.25}


@pytest.mark.parametrize("obstacle", ["pipe", "link", "directory", "no directory"])
def test_what_cannot_be_written_ends_nothing(tmp_path: Path, obstacle: str) -> None:
    place, other = tmp_path / "run", tmp_path / "other"
    other.write_text("mine")
    if obstacle != "no directory":
        place.mkdir()
    if obstacle == "pipe":
        os.mkfifo(place / ATTEMPTS)
    elif obstacle == "link":
        (place / ATTEMPTS).symlink_to(other)
    elif obstacle == "directory":
        (place / ATTEMPTS).mkdir()
    append_attempt(place, _START)
    assert other.read_text() == "mine"


def test_a_directory_in_the_place_of_the_run_stays_as_it_is(tmp_path: Path) -> None:
    append_attempt(tmp_path, SaveRecord(5, 0.25))
    append_attempt(tmp_path, FaultRecord("death", 1, "rank 1 was killed"))
    assert not any(tmp_path.iterdir())


def test_the_umask_decides_who_may_append(tmp_path: Path) -> None:
    before = os.umask(0o002)  # those of a group share the run
    try:
        append_attempt(tmp_path, _START)
    finally:
        os.umask(before)
    assert (tmp_path / ATTEMPTS).stat().st_mode & 0o777 == 0o664


def test_a_fault_has_the_rank_that_its_error_names() -> None:
    late, other = RankTimeoutError("rank 0 waited"), RankError("rank 2 raised")
    late.rank = 1
    found = fault_record(late), fault_record(other), fault_record(ValueError())
    assert [(each.cause, each.rank, each.words) for each in found] == [
        ("hang", 1, "rank 0 waited"),
        ("error", None, "rank 2 raised"),
        ("error", None, "ValueError"),
    ]
