from __future__ import annotations

import os
from pathlib import Path

import pytest

from evener.core.attempts import ATTEMPTS
from evener.distributed.failure import Failure
from evener.distributed.launch.fault_note import (
    note_directory,
    note_fault,
    noted_directory,
    write_directory_note,
)
from evener.distributed.session import RUN_DIR


def test_a_fault_is_noted_in_the_runs_own_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = tmp_path / "run", tmp_path / "other"
    for each in (place, other):
        each.mkdir()
        (each / ATTEMPTS).touch()
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    note_directory(place)
    assert noted_directory() == place
    note_fault(tmp_path, Failure(1, "killed", "was killed"))
    assert '"death"' in (place / ATTEMPTS).read_text()
    place.rename(tmp_path / "moved")
    other.rename(place)
    assert noted_directory() is None
    note_fault(tmp_path, Failure(1, "killed", "was killed"))
    assert not (place / ATTEMPTS).read_text()


def test_a_directory_whose_name_is_no_utf_8_gets_its_note(tmp_path: Path) -> None:
    run_dir = tmp_path / os.fsdecode(b"run-\xff")
    run_dir.mkdir()
    (run_dir / ATTEMPTS).touch()
    write_directory_note(tmp_path, run_dir)
    note_fault(tmp_path, Failure(1, "killed", "was killed"))
    assert '"death"' in (run_dir / ATTEMPTS).read_text()
