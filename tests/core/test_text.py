from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from evener.core.text import counted, from_here, printable, said, shortened
from evener.distributed.failure import failure_of, is_communication_error
from evener.errors import DataError, EvenerError, RankError


class UnspeakableError(RuntimeError):
    def __str__(self) -> str:
        raise TypeError("no words")


class Foreign(BaseException):
    pass


class UnpicklableError(EvenerError):
    def __init__(self) -> None:
        super().__init__("said all the same", lambda: None)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> str:
        raise pickle.PicklingError


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("a" * 4000) == "a" * 4000
    text = shortened("begin" + "x" * 5_000_000 + "end")
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "5,000,008 characters in all" in text
    assert len(text) < 4100


def test_a_text_that_cannot_be_made() -> None:
    assert said(UnspeakableError()) == "(its text cannot be made: its __str__ raises TypeError)"
    assert not is_communication_error(UnspeakableError())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("x" * 5_000_000), "5,000,000 characters in all"),
        (DataError("x" * 5_000_000), "5,000,000 characters in all"),
        (UnspeakableError(), "its __str__ raises TypeError"),
        (Foreign("not an Exception"), "raised Foreign: not an Exception"),
        (UnpicklableError(), "raised UnpicklableError: said all the same"),
        (SystemExit("x" * 5_000_000), "5,000,000 characters in all"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_exception_ends_in_words_of_bounded_size(error: BaseException, words: str) -> None:
    try:
        raise error
    except BaseException as caught:
        failure = failure_of(caught, 3)
    told = failure.to_error()
    assert words in str(told)
    assert "rank 3" in str(told)
    assert isinstance(told, RankError | DataError)
    assert len(str(told)) + len(failure.pickled) < 130_000


def test_of_a_full_disk_the_place_is_told_and_no_traceback() -> None:
    try:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"1")
    except OSError as error:
        failure = failure_of(error, 0)
    assert failure.traceback == ""
    assert "No space left on device; make room" in failure.message
    assert Path(__file__).name in failure.message
    assert "\n" not in failure.message


@pytest.mark.parametrize(
    "obeyed", ["\x1b", "\x00", "\r", "\x08", "\x7f", "\x9b", "\u202e", "\u2066", "\u2028", "\ud800"]
)
def test_what_a_terminal_would_obey_is_shown(obeyed: str) -> None:
    shown = printable(f"a{obeyed}b")
    assert obeyed not in shown
    assert shown == f"a{obeyed.encode('unicode_escape').decode()}b"
    shown.encode()


def test_what_people_read_stays() -> None:
    text = "ÄßñИ中א🐎\t1\n2 \\x1b"
    assert printable(text) == text


def test_a_path_is_told_as_one_would_type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_here(tmp_path / "runs" / "a") == "runs/a"
    assert from_here("/elsewhere/a") == "/elsewhere/a"
    assert from_here("runs/a") == "runs/a"


def test_one_thing_is_told_from_several() -> None:
    assert [counted(number, "step") for number in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
