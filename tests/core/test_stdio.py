from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.stdio import Unheard, to_stderr, unheard


class Broken(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.tries = number, 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_what_nobody_reads_is_dropped(number: int) -> None:
    stream = Broken(number)
    print("one", "two", file=Unheard(stream), flush=True)
    assert stream.tries == 1


def test_a_full_disk_is_no_reader_that_left() -> None:
    with pytest.raises(OSError, match="No space"):
        print("one", file=Unheard(Broken(errno.ENOSPC)))
    print("one", file=unheard(Broken(errno.ENOSPC)))
    print("one", file=unheard(None))


def test_the_rest_is_the_streams_own() -> None:
    stream = io.StringIO()
    guarded = Unheard(stream)
    print("word", file=guarded, flush=True)
    assert guarded.getvalue() == "word\n"
    stream.close()
    print("word", file=guarded, flush=True)


def command(line: str) -> subprocess.CompletedProcess[str]:
    evener = f"{sys.executable} -m evener.cli.main"
    line = line.replace("evener ", f"{evener} ", 1)
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True)


def test_help_into_a_closed_pipe() -> None:
    ended = command("evener train --help | true")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_without_any_standard_stream() -> None:
    assert command("evener train --help <&- >&- 2>&-").returncode == 0


def test_help_onto_a_full_disk_is_one_line() -> None:
    ended = command("evener train --help > /dev/full")
    assert ended.returncode in (0, 1)
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") <= 1
    listed = command("evener list > /dev/full")
    assert listed.stderr.startswith("evener: No space left on device: <stdout>; make room")


def test_a_line_is_dropped_if_standard_error_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to_stderr("seen")
    assert capsys.readouterr().err == "seen\n"
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    to_stderr("unseen")


def test_own_warnings_are_one_line_and_those_of_others_as_ever(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.py"
    theirs.write_text("warnings.warn('of theirs')")
    code = (
        "import warnings\n"
        "from evener.core import stdio\n"
        "stdio.shorten_own_warnings()\n"
        "warnings.warn_explicit('of ours', UserWarning, stdio.__file__, 1)\n"
        f"warnings.warn_explicit('of theirs', UserWarning, {str(theirs)!r}, 1)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert told.splitlines() == [
        "evener: of ours",
        f"{theirs}:1: UserWarning: of theirs",
        "  warnings.warn('of theirs')",
    ]
