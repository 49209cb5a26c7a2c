"""A command that says whether this host is about to be taken away."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from evener.distributed.launch import notice
from evener.distributed.launch.notice import error_of, watching


def watched(command: str, rounds: Path, seconds: float = 10.0) -> bool:
    """Whether the command gave notice before it had run three times."""
    noticed = threading.Event()
    with watching(f"echo >> {rounds}; {command}", noticed.set, 0.01):
        deadline = time.monotonic() + seconds
        while not noticed.is_set() and time.monotonic() < deadline:
            if rounds.exists() and len(rounds.read_text()) >= 3:
                break
            time.sleep(0.01)
    return noticed.is_set()


def test_status_zero_is_a_notice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert watched("true", tmp_path / "rounds")
    assert (tmp_path / "rounds").read_text() == "\n", "it is not asked again"
    assert "says that this host is about to be taken away" in capfd.readouterr().err


def test_another_status_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not watched("exit 22", tmp_path / "rounds")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [("nosuchcommand-", "cannot be run (status 127)"), ("kill -9 $$", "was killed by SIGKILL")],
)
def test_what_is_wrong_with_it_is_told_once(
    command: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not watched(command, tmp_path / "rounds")
    said = capfd.readouterr().err
    assert said.count("the notice command") == 1
    assert words in said
    assert "the run goes on" in said


def test_one_that_hangs_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_LIMIT_SECONDS", 0.2)
    assert error_of("sleep 60 & wait") == "took longer than 0.2 s"


def test_without_a_command_there_is_no_thread() -> None:
    before = threading.active_count()
    with watching(None):
        assert threading.active_count() == before
