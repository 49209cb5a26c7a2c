"""Launchers of one machine that several users share: whatever another leaves in /tmp neither hangs nor ends them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from evener.distributed.launch import scratch_dir as scratch
from evener.errors import StorageError


def left(home: Path, name: str = "evener-run-left", mode: int = 0o700) -> Path:
    """What a launcher of this machine has left that is dead."""
    path = home / name
    path.mkdir(mode=mode)
    path.chmod(mode)
    (path / "owner").write_text(json.dumps([*scratch._here(), os.getpid(), 1]))
    return path


def cleared(home: Path) -> bool:
    """Whether that came to an end, in a thread that is waited for no longer than a while."""
    thread = threading.Thread(target=scratch.clear, args=(home,), daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_what_a_dead_launcher_left_is_removed(tmp_path: Path) -> None:
    path = left(tmp_path)
    assert cleared(tmp_path)
    assert not path.exists()


def test_a_launcher_whose_parent_does_not_ask_for_its_status_is_dead(tmp_path: Path) -> None:
    path = left(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as process:
        (path / "owner").write_text(json.dumps([*scratch._here(), process.pid, scratch._begin(process.pid)]))
        assert cleared(tmp_path)
        assert path.exists()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert cleared(tmp_path)
    assert not path.exists()


@pytest.mark.parametrize("content", ["", "{", "3", "{}", "[]", "[1, 2, 3]", "null", "[" * 4000, "x" * 5000])
def test_an_owner_of_an_odd_form_is_left_alone(tmp_path: Path, content: str) -> None:
    path = left(tmp_path)
    (path / "owner").write_text(content)
    assert cleared(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("pid", ["1/../self", {}, None, 1.5, [1]])
def test_a_process_that_is_no_number(tmp_path: Path, pid: object) -> None:
    path = left(tmp_path)
    (path / "owner").write_text(json.dumps([*scratch._here(), pid, 1]))
    assert cleared(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_an_owner_that_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = left(tmp_path)
    text = (path / "owner").read_text()
    (path / "owner").unlink()
    if kind == "pipe":
        os.mkfifo(path / "owner")
    elif kind == "device":
        (path / "owner").symlink_to("/dev/zero")
    else:
        (tmp_path / "elsewhere").write_text(text)
        (path / "owner").symlink_to(tmp_path / "elsewhere")
    assert cleared(tmp_path)
    assert path.exists()


def test_what_others_may_have_filled_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all, linked, file = (
        left(tmp_path, mode=0o755),
        tmp_path / "evener-run-link",
        tmp_path / "evener-run-file",
    )
    private = left(tmp_path, "private")
    linked.symlink_to(private)
    file.touch()
    assert cleared(tmp_path)
    assert all(path.exists() for path in (open_to_all, private / "owner", linked, file))
    mine = left(tmp_path, "evener-run-mine")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cleared(tmp_path)
    assert mine.exists()


def test_nobody_else_may_enter_the_directory_of_a_launcher() -> None:
    with scratch.scratch() as path:
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_full_directory_of_temporary_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_text", full)
    with (
        pytest.raises(StorageError, match="which TMPDIR names, cannot be written: No space left"),
        scratch.scratch(),
    ):
        pass
    assert not list(tmp_path.iterdir())
