"""Errors of the operating system in one line, with a way out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from evener.core.os_errors import os_error_message


def test_an_error_names_its_file_and_a_remedy() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "a.pt")
    assert (
        os_error_message(error)
        == "No space left on device: a.pt; make room on the device, or write elsewhere"
    )


def test_a_working_directory_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert os_error_message(missing) == "No such file or directory"
    (tmp_path / "gone").rmdir()
    assert "the current directory was removed: change into one" in os_error_message(missing)
    missing.filename = os.fspath(tmp_path / "other")
    assert os_error_message(missing).endswith("other")
