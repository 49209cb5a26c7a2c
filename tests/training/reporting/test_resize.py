"""``evener resize`` asks a run in its directory, and gets an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evener.cli.main import main
from evener.errors import ConfigurationError, RankTimeoutError
from evener.files import write_json
from evener.training.reporting import resize as module
from evener.training.reporting.resize import RESIZE, answer_resize, resize, resize_asked
from evener.training.reporting.run_dir import RunDirectory, has_ended, is_held


@contextmanager
def going_on(run_dir: Path, processes: int | str = "1:3") -> Iterator[None]:
    with RunDirectory(run_dir):
        write_json(run_dir / "config.json", {"processes": processes})
        yield


def answering(run_dir: Path, accepted: bool, words: str) -> threading.Thread:
    def answer() -> None:
        while not resize_asked(run_dir):
            time.sleep(0.01)
        answer_resize(run_dir, accepted, words, 7)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_run_that_agrees_is_told_of(tmp_path: Path) -> None:
    with going_on(tmp_path):
        thread = answering(tmp_path, True, "2 instead of 1 ranks")
        assert resize(tmp_path, 2, 10) == f"{tmp_path}: 2 instead of 1 ranks, after step 7"
        thread.join()
    assert not list(tmp_path.glob(".evener-resize*"))


def test_one_that_refuses_says_why(tmp_path: Path) -> None:
    with going_on(tmp_path):
        thread = answering(tmp_path, False, "the run has 2 ranks already")
        with pytest.raises(ConfigurationError, match="stays as it is: the run has 2 ranks already"):
            resize(tmp_path, 2, 10)
        thread.join()


def test_a_request_that_nobody_answers_is_withdrawn(tmp_path: Path) -> None:
    with going_on(tmp_path), pytest.raises(RankTimeoutError, match="took no step within"):
        resize(tmp_path, 2, 0.2)
    assert not (tmp_path / RESIZE).exists()


@pytest.mark.parametrize(
    ("processes", "ranks", "words"),
    [
        ("1:3", 4, "may have 1:3 ranks, and not 4"),
        ("2:3", 1, "and not 1"),
        (2, 3, "has processes 2, and so many"),
    ],
)
def test_what_the_run_cannot_do_is_not_asked(
    processes: int | str, ranks: int, words: str, tmp_path: Path
) -> None:
    with going_on(tmp_path, processes), pytest.raises(ConfigurationError, match=words):
        resize(tmp_path, ranks, 10)
    assert not resize_asked(tmp_path)


def test_without_a_run_there_is_nobody_to_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_START_SECONDS", 0.1)
    assert main(["resize", str(tmp_path), "2"]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    with going_on(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    assert main(["resize", str(tmp_path), "2"]) == 2
    assert "no run goes on in" in capsys.readouterr().err
    write_json(tmp_path / "summary.json", {})
    assert has_ended(tmp_path)


@pytest.mark.parametrize("text", ["", "x", "-1", "²", "1.5"])
def test_what_is_no_number_asks_for_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / RESIZE).write_text(text)
    assert resize_asked(tmp_path) == 0


def test_a_request_that_is_no_plain_file_asks_for_nothing(tmp_path: Path) -> None:
    number = Path("/proc/sys/kernel/pid_max")
    assert number.read_text().strip().isdecimal()
    (tmp_path / RESIZE).symlink_to(number)
    assert resize_asked(tmp_path) == 0
