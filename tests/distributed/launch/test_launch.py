from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.components.determinism import fixed_threads
from evener.distributed.launch.launch import launch, run_job
from evener.distributed.launch.process_count import Headcount
from evener.distributed.launch.worker import BOOTSTRAP, RankCall
from evener.distributed.session import RUN_DIR, Session
from evener.distributed.watchdog.store_health import LAUNCHER_PID
from evener.errors import (
    ConfigurationError,
    InterruptedRunError,
    RankError,
    RankTimeoutError,
    StorageError,
)
from tests.distributed.processes import await_death, await_files, call, end, run, start_script

BLOCKED = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from evener.errors import EvenerError
from evener.distributed.launch.launch import launch
from evener.distributed.session import Session

def train(folder):
    with Session(device="cpu") as session:
        session.watchdog.progress("step 41 of 400")
        (Path(folder) / f"pid-{session.rank}").write_text(str(os.getpid()))
        if session.rank == 0:
            dist.all_reduce(torch.ones(1))
        while True:
            time.sleep(0.01)

try:
    launch(train, sys.argv[1], processes=2)
except EvenerError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(error.exit_status)
"""


@pytest.fixture
def blocked(tmp_path: Path) -> Any:
    """A running program and its ranks: 0 is inside a collective in C++, 1 in Python."""
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    with start_script(script, tmp_path) as program:
        await_files(*files)
        yield program, [int(file.read_text()) for file in files]
        program.kill()


def test_closures_run_on_ranks_and_results_come_back_in_order() -> None:
    scale, handlers = 10, signal.getsignal(signal.SIGTERM)

    def work(shift: int, *, factor: int) -> tuple[int, float, int, bool]:
        collects = gc.isenabled() and gc.get_freeze_count() > 100_000
        with Session(device="cpu") as session:
            total = torch.tensor([float(session.rank + 1)])
            dist.all_reduce(total)
            return session.rank * scale * factor + shift, total.item(), fixed_threads(), collects

    results = launch(work, 5, factor=2, processes=2, device="cpu")
    assert [result[:2] for result in results] == [(5, 3.0), (25, 3.0)]
    assert [result[2] for result in results] == 2 * [fixed_threads()], "the number of ranks does not matter"
    assert all(result[3] for result in results), (
        "garbage is collected, but not looked for in what was imported"
    )
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_one_process_runs_right_here() -> None:
    assert launch(lambda: os.getpid(), processes=1, device="cpu") == [os.getpid()]
    with pytest.raises(KeyError, match="as it is"):
        launch(lambda: {}["as it is"], processes=1, device="cpu")


def test_a_rank_calls_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launch(os.getpid, processes=7) == [os.getpid()]


def test_a_signal_interrupts_the_function_right_here() -> None:
    def work() -> None:
        with Session(device="cpu") as session:
            session.watchdog.progress("step 3 of 9")
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(InterruptedRunError, match="interrupted by SIGTERM at step 3 of 9") as caught:
        launch(work, processes=1, device="cpu")
    assert caught.value.exit_status == 143


def test_an_exception_is_raised_once_with_its_rank_and_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with Session(device="cpu") as session:
            if session.rank == 1:
                raise ZeroDivisionError("in the middle of it")
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match="rank 1 raised ZeroDivisionError: in the middle of it") as caught:
        call(launch, work, processes=2, device="cpu")
    assert "test_launch.py" in str(caught.value)
    assert "worker.py" not in str(caught.value)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.slow
def test_a_users_mistake_comes_back_as_what_it_is() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            raise ConfigurationError("batch size is 0")
        threading.Event().wait()

    with pytest.raises(ConfigurationError) as caught:
        call(launch, work, processes=2, device="cpu")
    assert str(caught.value) == "rank 1: batch size is 0"


def test_a_killed_rank_is_named_with_where_it_stood() -> None:
    def work() -> None:
        with Session(device="cpu") as session:
            with session.watchdog.phase("forward", step=12):
                if session.rank == 1:
                    session.watchdog._publish(session.watchdog._beat())
                    os.kill(os.getpid(), signal.SIGKILL)
            session.control.barrier()

    with pytest.raises(
        RankError, match=r"was killed by SIGKILL.*; last seen \d+\.\d s before in forward of step 12"
    ):
        call(launch, work, processes=2, device="cpu")


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_and_is_named() -> None:
    def work() -> None:
        with Session(device="cpu", timeout_seconds=3) as session:
            if session.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            with session.watchdog.wait("all-reduce", step=7):
                dist.all_reduce(torch.ones(1))

    with pytest.raises(RankTimeoutError, match=r"rank 0 has waited \d+ s in all-reduce of step 7") as caught:
        call(launch, work, processes=2, device="cpu")
    late = str(caught.value).splitlines()[1]
    assert "rank 1" in late
    assert "is stopped" in late


def test_the_limit_of_the_launcher_holds_where_a_session_has_none_of_its_own() -> None:
    def work() -> list[float]:
        limits = []
        for own in ({}, {"timeout_seconds": 45.0}):
            with Session(device="cpu", **own) as session:
                limits += [session.timeout_seconds, session.watchdog.timeout_seconds]
        return limits

    assert call(launch, work, processes=2, device="cpu", timeout_seconds=60) == [[60, 60, 45, 45]] * 2


def test_a_rank_whose_launcher_was_stopped_while_it_started_ranks_ends_without_a_word(tmp_path: Path) -> None:
    gone = [sys.executable, "-c", BOOTSTRAP, str(tmp_path / "gone")]
    found = subprocess.run(gone, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (1, "", "")


def test_modules_in_the_working_directory_do_not_take_the_place_of_pythons_own(tmp_path: Path) -> None:
    for name in ("random", "types", "json"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the user')")
    (tmp_path / "path.json").write_text(json.dumps([str(tmp_path), *sys.path]))
    begun = [sys.executable, "-c", BOOTSTRAP, "."]
    found = subprocess.run(begun, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "of the user" not in found.stderr
    assert (
        f"KeyError: '{LAUNCHER_PID}'" in found.stderr
    )  # so it came to its main, as a rank that nobody launched


def test_a_rank_that_starts_leaves_no_file_open(tmp_path: Path) -> None:
    """Which ``-W error`` and ``-X dev`` show as a traceback."""
    home = tmp_path / "evener" / "distributed" / "launch"
    home.mkdir(parents=True)
    for package in (home, home.parent, home.parent.parent):
        (package / "__init__.py").touch()
    (home / "worker.py").write_text("main = print")
    (tmp_path / "path.json").write_text(json.dumps([str(tmp_path), *sys.path]))
    words = [sys.executable, "-W", "error", "-c", BOOTSTRAP, str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == (f"{tmp_path}\n", "")


def test_a_full_temporary_directory_is_not_taken_for_what_cannot_be_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        StorageError, match="TMPDIR names, cannot be written: No space left on device; make room"
    ):
        run_job(RankCall(os.getpid, (), {}, 60), Headcount((2,)), None, tmp_path, sys.path)


def test_what_cannot_be_sent_or_started_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match="lock"):
        launch(lambda: lock, processes=2, device="cpu")
    for processes in (0, 2.5, True):
        with pytest.raises(ConfigurationError, match=rf"processes is {processes}; it must be a whole number"):
            launch(os.getpid, processes=processes)  # type: ignore[arg-type]
    for name in ("timeout_seconds", "grace_seconds"):
        for seconds in (0, float("nan"), "5", None):
            with pytest.raises(ConfigurationError, match=f"{name} is {seconds!r}"):
                launch(os.getpid, **{name: seconds})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="rendezvous is 'c10d'; give an evener"):
        launch(os.getpid, processes=2, rendezvous="c10d")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="3 is no function"):
        launch(3, processes=2)  # type: ignore[arg-type]


def test_each_process_of_mpi_starts_no_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ConfigurationError, match="would train alone"):
        launch(print, processes=2)


def test_a_killed_worker_leaves_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the path is too long for a socket, as that of a test's own directory may be."""
    place = tempfile.mkdtemp(prefix="e-")
    monkeypatch.setenv("TMPDIR", place)
    monkeypatch.setattr("tempfile.tempdir", place)

    def work() -> None:
        reading, writing = os.pipe()
        child = multiprocessing.get_context("fork").Process(
            target=lambda: (os.write(writing, get_temp_dir().encode()), os.kill(os.getpid(), signal.SIGKILL))
        )
        child.start()
        assert Path(os.read(reading, 999).decode()).is_dir()
        child.join()
        os._exit(1)  # as the watchdog ends a rank: nothing that is registered for the end is called

    with pytest.raises(RankError, match="status 1"):
        launch(work, processes=2, device="cpu")
    os.rmdir(place)  # fails if anything is left


def test_a_process_that_a_rank_forks_ends_for_itself(capfd: pytest.CaptureFixture[str]) -> None:
    """Its error is shown, and is not that of the rank; what it returns is not the result of the rank."""

    def fork() -> list[int]:
        statuses = []
        for act in ("raise", "exit", "return"):
            child = os.fork()
            if child == 0 and act == "raise":
                raise ValueError("in the child")
            if child == 0 and act == "exit":
                sys.exit(5)
            if child == 0:
                return []
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        written = Path(os.environ[RUN_DIR], f"result-{os.environ['LOCAL_RANK']}").exists()
        return [*statuses, written]

    assert launch(fork, processes=2, device="cpu") == [[1, 5, 0, False]] * 2
    assert capfd.readouterr().err.count("ValueError: in the child") == 2


def test_ctrl_c_ends_all_ranks_and_says_where_the_run_stood(blocked: Any) -> None:
    program, pids = blocked
    os.killpg(program.pid, signal.SIGINT)
    status, _, err = end(program, timeout=15)
    assert (status, err.strip()) == (130, "InterruptedRunError interrupted by SIGINT at step 41 of 400")
    await_death(pids, timeout=0.1)


def test_sigterm_to_one_rank_ends_the_run(tmp_path: Path) -> None:
    """Rank 0 is inside a collective in C++, and rank 1 in Python when somebody ends it."""

    def train() -> None:
        with Session(device="cpu") as session:
            session.watchdog.progress("step 41 of 400")
            (tmp_path / f"pid-{session.rank}").write_text(str(os.getpid()))
            if session.rank == 0:
                dist.all_reduce(torch.ones(1))
            await_files(tmp_path / "pid-0")
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)

    with pytest.raises(InterruptedRunError) as caught:
        call(launch, train, processes=2, device="cpu")
    assert (caught.value.exit_status, str(caught.value)) == (143, "interrupted by SIGTERM at step 41 of 400")
    await_death([int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)], timeout=0.1)


def test_a_killed_launcher_leaves_no_orphans(blocked: Any) -> None:
    program, pids = blocked
    program.kill()
    await_death(pids)


@pytest.mark.slow
def test_under_torchrun_every_rank_calls_the_function(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from evener.distributed.launch.launch import launch\n"
        "from evener.distributed.session import Session\n"
        "def work():\n"
        "    with Session(device='cpu') as session:\n"
        "        return session.control.gather_objects(session.rank)\n"
        "print('result', launch(work, processes=9))\n"
    )
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    ended = run(*arguments)
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == ["result [[0, 1]]"] * 2
