"""Ordinary errors of the operating system: one line and a status, and what was finished stays finished."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.cli.main import main
from evener.training.fit import fit
from tests.distributed.processes import await_files, end, start_command
from tests.faults.running import Fault, rows, suffer
from tests.tiers import NIGHTLY, SLOW, spread
from tests.warm import Warm

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


@pytest.mark.parametrize("fault", rows(*FAULTS, slow=("5 MB of text",)))
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
        ("ulimit -n 12; TRAIN --workers 4 --run-dir run", 1, "(?i)too many open files|open files"),
        ("TRAIN --run-dir run > /dev/full", 1, "No space left on device: <stdout>"),
    ],
    ids=["full", "open-files", "full-output"],
)
def test_it_is_one_line_and_a_status(line: str, status: int, words: str, tmp_path: Path) -> None:
    ended = shell(line, tmp_path)
    assert ended.returncode == status, ended.stderr
    check_one_line(ended.stderr, words)


def check_one_line(said: str, words: str) -> None:
    last = said.splitlines()[-1]
    assert last.startswith("evener: ")
    assert re.search(words, last), said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--run-dir", "/proc/run"), 2, "/proc/run cannot hold a run: "),
        ((), 2, "runs cannot hold a run: "),
        (("--json", "/proc/x", "--run-dir", "run"), 1, "No such file or directory: /proc/"),
        (("--weights", "w.pt", "--run-dir", "run"), 1, "w.pt is refused"),
        (("--weights", "none", "--run-dir", "run"), 2, "there are no weights at none"),
    ],
    ids=["read-only", "no-directory", "json", "weights", "no-weights"],
)
def test_what_cannot_be_used_is_one_line_and_a_status(
    arguments: tuple[str, ...], status: int, words: str, tmp_path: Path, warm: Warm, capsys: Any
) -> None:
    for name in ("runs", "w.pt"):
        (tmp_path / name).write_text("no")
    found = warm.status(
        "evener", "train", "tests.tasks:plain", "--device", "cpu", "--processes", "1", *arguments
    )
    said = capsys.readouterr().err
    assert found == status, said
    check_one_line(said, words)


@pytest.mark.parametrize(
    "line",
    spread(
        [
            "TRAIN --run-dir run | head -c 1",
            "TRAIN --run-dir run 2>&1 | true",
            "TRAIN --run-dir run <&- >&- 2>&-",
            "TRAIN --run-dir run 2> /dev/full",
        ],
        SLOW,
        NIGHTLY,
    ),
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
    one = ("--device", "cpu", "--processes", "1")
    program = start_command("train", "tests.tasks:slow", *one, "--run-dir", tmp_path / "run")
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
def test_a_finished_run_is_refused_before_ranks_are_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit("tests.tasks:plain", device="cpu", processes=1, steps=1, run_dir=tmp_path / "run", show=False)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evener.distributed.launch.launch.run_job", lambda *_: pytest.fail("ranks are started"))
        status = main(
            [
                *("train", "tests.tasks:plain", "--device", "cpu", "--processes", "2", "--run-dir"),
                str(tmp_path / "run"),
            ]
        )
    assert status == 2
    assert "holds a finished run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """By rank 0 alone, which is why it is a whole command."""
    torch.save({"0.weight": torch.zeros(2, 2)}, tmp_path / "w.pt")
    ended = shell("TRAIN --processes 2 --weights w.pt --run-dir run", tmp_path)
    assert ended.returncode == 2
    assert re.search("rank 0: the weights in w.pt are of another model: they lack 0.bias", ended.stderr)
    assert "Traceback" not in ended.stderr
