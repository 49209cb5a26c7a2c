"""Whole programs as a user starts them, with what they print and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cloudpickle

from tests.distributed import forked

R = TypeVar("R")

DRIVER = """
import sys
from evener.errors import EvenerError
from evener.distributed.launch.script import run_script
try:
    run_script(sys.argv[2], sys.argv[3:], processes=2, timeout_seconds=float(sys.argv[1]), device="cpu")
except EvenerError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(error.exit_status)
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """A Python program in a session of its own, with pipes; it ends at SIGHUP even if the tests run under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which the program inherits
    try:
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_variables(),
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGHUP, before)


def _variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def start_command(*arguments: str | Path, program: Callable[[], object] = forked.command) -> forked.Fork:
    """``evener`` with the arguments, which finds PyTorch imported: see :mod:`tests.distributed.forked`."""
    return _fork(program, "evener", *arguments)


def start_module(*arguments: str | Path) -> forked.Fork:
    """``python -m`` with the arguments, in the same way."""
    return _fork(forked.module, "-m", *arguments)


def start_script(*arguments: str | Path) -> forked.Fork:
    """``python`` with the arguments, in the same way."""
    return _fork(forked.script, *arguments)


def call(function: Callable[..., R], *args: Any, timeout: float = 150, **settings: Any) -> R:
    """What the function returns or raises in a program that finds PyTorch imported, as do the ranks it launches.

    What they print is printed here.
    """
    with tempfile.TemporaryDirectory(prefix="evener-call-") as directory:
        path = Path(directory) / "call"
        path.write_bytes(cloudpickle.dumps((function, args, settings)))
        ended = end(_fork(forked.call, path), timeout)
        sys.stdout.write(ended.out)
        sys.stderr.write(ended.err)
        assert ended.status == 0
        result, error = cloudpickle.loads(path.read_bytes())
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _fork(program: Callable[[], object], *words: str | Path) -> forked.Fork:
    return forked.Fork(program, [str(word) for word in words], _variables())


def end(process: subprocess.Popen[str], timeout: float = 60) -> Ended:
    """Waits for the program; kills it, with its process group, if it hangs."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Ended(process.returncode, out, err)


def run(*arguments: str | Path) -> Ended:
    return end(start(*arguments))


def drive(script: Path, *arguments: str, timeout_seconds: float = 60) -> Ended:
    """``run_script`` on two CPU ranks, in a program that ends as the command would."""
    return run("-c", DRIVER, str(timeout_seconds), script, *arguments)


def drive_fork(script: Path, *arguments: str, timeout_seconds: float = 60) -> Ended:
    """The same in a program that finds PyTorch imported, as do its ranks."""
    return end(_fork(_be_driver, "-c", str(timeout_seconds), script, *arguments))


def _be_driver() -> None:
    exec(DRIVER, vars(sys.modules["__main__"]))


def await_files(*paths: Path, timeout: float = 180) -> None:
    deadline = time.monotonic() + timeout
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, f"no {paths}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def await_death(pids: list[int], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.05)
