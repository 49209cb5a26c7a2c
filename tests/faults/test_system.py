"""Ordinary errors of the operating system: one line and a status, and what was finished stays finished."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.processes import await_files, end, start
from tests.faults.running import Fault, rows, suffer
from tests.tiers import NIGHTLY, SLOW, spread

TASK = "tests.faults.tasks_input:items"
FAULTS = (
    Fault(
        "5 MB of text",
        "tests.faults.tasks_input:long_text",
        1,
        ("5,000,000 characters in all",),
        30,
        never=(),
    ),
    Fault("no text", "tests.faults.tasks_input:no_text", 1, ("its text cannot be made",), 30, never=()),
    Fault(
        "no Exception",
        "tests.faults.tasks_input:foreign",
        1,
        ("raised ForeignError: from elsewhere",),
        30,
        never=(),
    ),
)


@pytest.mark.parametrize("fault", spread(rows(*FAULTS), SLOW, NIGHTLY))
def test_an_exception_ends_in_words_of_bounded_size(fault: Fault, tmp_path: Path) -> None:
    assert len(suffer(fault, tmp_path).err) < 30_000


def shell(line: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``line`` in bash, where ``TRAIN`` is the command for one process."""
    program = (
        f"{shlex.quote(sys.executable)} -m evener.cli.main train tests.tasks:plain --device cpu --processes 1"
    )
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("TRAIN", program)],
        cwd=directory,
        capture_output=True,
        text=True,
        env=variables,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (
            "ulimit -f 4; TRAIN --batch-size 1 --run-dir run",
            1,
            "records cannot be written to run: .*--on-full-disk go-on",
        ),
        ("TRAIN --run-dir /proc/run", 2, "/proc/run cannot hold a run: "),
        ("touch runs; TRAIN", 2, "runs cannot hold a run: "),
        ("ulimit -n 12; TRAIN --workers 4 --run-dir run", 1, "(?i)too many open files|open files"),
        ("TRAIN --json /proc/x --run-dir run", 1, "No such file or directory: /proc/"),
        ("TRAIN --run-dir run > /dev/full", 1, "No space left on device"),
        ("echo no > w.pt; TRAIN --weights w.pt --run-dir run", 1, "w.pt is refused"),
        ("TRAIN --weights none --run-dir run", 2, "there are no weights at none"),
    ],
    ids=["full", "read-only", "no-directory", "open-files", "json", "full-output", "weights", "no-weights"],
)
def test_it_is_one_line_and_a_status(line: str, status: int, words: str, tmp_path: Path) -> None:
    ended = shell(line, tmp_path)
    assert ended.returncode == status, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("evener: ")
    assert re.search(words, last), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "TRAIN --run-dir run | head -c 1",
        "TRAIN --run-dir run 2>&1 | true",
        "TRAIN --run-dir run <&- >&- 2>&-",
        "TRAIN --run-dir run 2> /dev/full",
    ],
)
def test_a_reader_that_left_does_not_fail_a_run(line: str, tmp_path: Path) -> None:
    ended = shell(line, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 8
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_ranks_that_print_to_nobody_finish(tmp_path: Path) -> None:
    line = f"TRAIN --processes 2 --run-dir {tmp_path / 'run'} | true".replace("TRAIN", "PROGRAM")
    program = f"{shlex.quote(sys.executable)} -m evener.cli.main train tests.faults.tasks_input:talkative --device cpu"
    ended = shell(line.replace("PROGRAM", program), Path.cwd(), EVENER__TESTS_FAULT=str(tmp_path / "fault"))
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run that goes on and on."""
    program = start(
        *("-m", "evener.cli.main", "train", "tests.tasks:slow", "--device", "cpu", "--processes", "1"),
        *("--run-dir", tmp_path / "run"),
    )
    await_files(tmp_path / "run" / ".evener-owner")
    yield tmp_path / "run"
    program.send_signal(signal.SIGKILL)
    end(program)


@pytest.mark.slow
def test_two_runs_never_share_a_directory(running: Path) -> None:
    ended = shell(f"TRAIN --run-dir {running}", running.parent)
    assert ended.returncode == 2
    assert re.search(r"another run writes to .*run \(process \d+ on .*--run-dir", ended.stderr)
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_finished_run_is_refused_before_ranks_are_started(tmp_path: Path) -> None:
    assert shell("TRAIN --steps 1 --run-dir run", tmp_path).returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    began = time.monotonic()
    ended = shell("TRAIN --processes 2 --run-dir run", tmp_path)
    assert ended.returncode == 2
    assert "holds a finished run" in ended.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert time.monotonic() - began < 40


@pytest.mark.slow
def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(2, 2)}, tmp_path / "w.pt")
    ended = shell("TRAIN --processes 2 --weights w.pt --run-dir run", tmp_path)
    assert ended.returncode == 2
    assert re.search("rank 0: the weights in w.pt are of another model: they lack 0.bias", ended.stderr)
    assert "Traceback" not in ended.stderr
