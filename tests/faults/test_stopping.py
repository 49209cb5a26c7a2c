"""A run that is asked to stop, in every way in which machines and people ask."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from evener import checkpoint
from tests.distributed.processes import await_death, await_files, end, start_command
from tests.faults import tasks
from tests.faults.running import Fault, rows, suffer

SAVED = r"\d, saved. Continue: evener train \S+ (\S+ )*--resume \S+"
INT, TERM, USR1, HUP, QUIT = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT
ONCE = (
    Fault("Ctrl-C", "runs", 130, ("interrupted by SIGINT at step", SAVED), 15, signals=((0.5, INT),)),
    Fault("SIGUSR1", "runs", 138, ("interrupted by SIGUSR1 at step", SAVED), 15, signals=((0.5, USR1),)),
    Fault("SIGHUP", "runs", 129, ("interrupted by SIGHUP at step", SAVED), 15, signals=((0.5, HUP),)),
    Fault("SIGQUIT", "runs", 131, ("interrupted by SIGQUIT at step", SAVED), 15, signals=((0.5, QUIT),)),
    Fault(
        "SIGTERM with workers that load data",
        "runs",
        143,
        ("interrupted by SIGTERM at step", SAVED),
        15,
        arguments=("--workers", "1"),
        signals=((0.5, TERM),),
    ),
    Fault(
        "SIGTERM while a slow disk saves",
        "slow_disk",
        143,
        ("interrupted by SIGTERM at step", SAVED),
        25,
        arguments=("--save-every", "2steps"),
        signals=((1.0, TERM),),
    ),
)


@pytest.mark.parametrize("fault", rows(*ONCE, slow=("Ctrl-C", "SIGTERM with workers that load data")))
def test_it_saves_where_it_stands(fault: Fault, tmp_path: Path) -> None:
    suffer(fault, tmp_path)
    stood = checkpoint.find(tmp_path / "run").rest["progress"]["steps"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["interrupted"], summary["steps"]) == (True, stood)


@pytest.mark.slow
def test_local_steps_end_with_the_round_in_which_the_signal_came(tmp_path: Path) -> None:
    options = ("--strategy", "diloco", "--strategy-option", "sync_every=10", "--epochs", "2")
    words = ("interrupted by SIGTERM at step 1, saved", SAVED)
    suffer(
        Fault("TERM", "tests.faults.tasks_asynchronous:slow", 143, words, 15, options, ((0.3, TERM),)),
        tmp_path,
    )


@pytest.mark.slow
def test_the_launcher_passes_on_the_second_signal(tmp_path: Path) -> None:
    """To a rank that does not end, here because it holds the interpreter."""
    fault = Fault(
        "Ctrl-C twice",
        "stuck_in_native_code",
        130,
        ("asked the ranks to save and end, within 20 s", "interrupted by SIGINT"),
        15,
        signals=((0.5, INT), (1.0, INT)),
        never=("Traceback", "saved in"),
    )
    suffer(fault, tmp_path)


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_ended_when_the_grace_is_over(tmp_path: Path) -> None:
    fault = Fault(
        "SIGTERM and stuck",
        "stuck_in_native_code",
        143,
        ("interrupted by SIGTERM",),
        15,
        arguments=("--grace-seconds", "4"),
        signals=((0.5, TERM),),
        never=("Traceback", "saved in"),
    )
    suffer(fault, tmp_path)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    """As a machine of several is told that it will be taken away."""
    os.environ["EVENER__TESTS_FAULT"] = str(tmp_path / "fault")
    pair = ("--processes", "2", "--device", "cpu", "--run-dir", str(tmp_path / "run"))
    program = start_command("train", "tests.faults.tasks:runs", *pair)
    await_files(tmp_path / "fault")
    ranks = program.ranks()
    os.kill(ranks[1], TERM)
    ended = end(program, 60)
    assert ended.status == 143, ended.err
    assert "interrupted by SIGTERM" in ended.err
    assert checkpoint.find(tmp_path / "run").rest["progress"]["steps"] >= 3
    await_death(ranks)


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_rank_and_the_last_checkpoint(tmp_path: Path) -> None:
    os.environ["EVENER__TESTS_FAULT"] = str(tmp_path / "fault")
    pair = ("--processes", "2", "--device", "cpu", "--run-dir", str(tmp_path / "run"))
    program = start_command("train", "tests.faults.tasks:runs", *pair, "--save-every", "2steps")
    await_files(tmp_path / "fault", tmp_path / "run" / "checkpoints" / "latest")
    ranks = program.ranks()
    program.kill()
    end(program, 30)
    await_death(ranks)
    assert checkpoint.find(tmp_path / "run").rest["progress"]["steps"] >= 2


# Going on after a death


@pytest.mark.slow
def test_a_rank_that_dies_is_replaced_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, ranks: Any
) -> None:
    """The weights are bit for bit those of a run without the death, and no step is there twice."""
    fault = Fault(
        "killed and replaced",
        "killed_once",
        0,
        (r"rank 1 \(pid \d+\) was killed by SIGKILL", "restart 1 of 2", "goes on after step [123] of"),
        60,
        arguments=("--max-restarts", "2", "--save-every", "1steps", "--recover", "file"),
    )
    suffer(fault, tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["weights_digest"] == ranks(2).run(tasks.digest, tasks.undisturbed)[0]
    lines = map(json.loads, (tmp_path / "run" / "records.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(16))


@pytest.mark.slow
def test_what_every_start_would_meet_again_is_no_reason_to_start_again(tmp_path: Path) -> None:
    fault = Fault(
        "wrong setting and restarts",
        "undisturbed",
        2,
        ("the metrics are loss, accuracy",),
        15,
        arguments=("--max-restarts", "2", "--keep-best", "f1"),
        never=("Traceback", "restart 1"),
    )
    suffer(fault, tmp_path)


def test_a_moment_has_passed() -> None:
    """Signals of one kind that come later than the shortest gap are two: the rows above rely on it."""
    from evener.distributed.signals import Deferral

    deferral = Deferral(1.0)
    assert deferral.hears(INT)
    assert deferral.hears(INT)
    deferral.time = time.monotonic() - 1
    assert not deferral.hears(INT)
