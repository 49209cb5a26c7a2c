"""Reads the Python stack of another process on this host, by sending it signals.

A thread needs Python's interpreter lock (GIL) to read the stacks of its own process, and a call in native code may hold
the lock forever. So there are two signals. The handler of the first is a Python function, which the main thread runs
between two instructions. Who does not answer is in native code, and gets the second signal, whose handler is written in
C (:mod:`faulthandler`) and needs no lock::

    rank 0, a thread ─── signal ───▶ rank 1, wherever it is: writes its stacks into a file in memory
                     ◀── reads /proc/PID/fd/N ──┘

The second signal alone would not do: it also arrives in the middle of an instruction, while the interpreter's frames
change, and about one in 300 crashed a process that was computing in Python. For the same reason it shows the main
thread only: others may be running.

A forked child (a DataLoader worker) inherits the handlers, and writes into the same file. The signals are real-time
signals, since users and schedulers use SIGUSR1 and SIGUSR2. They would end a process without the handlers, so they are
sent only if the kernel reports that the process catches them.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from evener.files import PACKAGE

_NATIVE_SIGNAL = int(getattr(signal, "SIGRTMIN", 34)) + 11
_PYTHON_SIGNAL = _NATIVE_SIGNAL + 1
_NAME = "evener-stacks"
_ANSWER_SECONDS = 2.0
_PYTHON_SECONDS = 0.3
"""Who runs Python code answers within milliseconds."""
_QUIET_SECONDS = 0.03
"""An answer is written in many small pieces. It is complete when nothing was added for this time."""
_SHOWN_FRAMES = 12
_SHOWN_WORKERS = 3
_SHOWN_THREADS = 3
_OWN = str(PACKAGE / "distributed") + os.sep
_WAITING_FOR_WORKER = os.path.join("torch", "utils", "data", "dataloader.py")
_WORKER_LOOP = " in _worker_loop"
_WAITING_FOR_WORK = (f"{os.sep}multiprocessing{os.sep}", f"{os.sep}selectors.py")

_files: list[BinaryIO] = []
_crashes: list[BinaryIO] = []


def listen(*_: object) -> None:
    """Installs the signal handlers in this process and in processes that it forks later. Linux only."""
    if not _files and hasattr(os, "memfd_create"):
        file = open(os.memfd_create(_NAME), "ab", buffering=0)  # noqa: SIM115
        _files.append(file)
        faulthandler.register(_NATIVE_SIGNAL, file, all_threads=False)
        if threading.current_thread() is threading.main_thread():  # Python permits it nowhere else
            signal.signal(_PYTHON_SIGNAL, _write_stacks)


def _write_stacks(*_: object) -> None:
    faulthandler.dump_traceback(_files[0], all_threads=True)


def record_crash(path: Path) -> None:
    """Makes this process write its stacks to a file if native code crashes. Does nothing if faulthandler is enabled
    already, which then prints them.
    """
    if not faulthandler.is_enabled():
        file = path.open("ab", buffering=0)
        faulthandler.enable(file, all_threads=True)
        _crashes.append(file)


def crash_in(path: Path) -> str:
    """Returns the main thread's stack as `record_crash` wrote it, preceded by a newline; empty if there is none."""
    try:
        frames = _main_thread(path.read_text(errors="replace"))
    except OSError:
        return ""
    return f"\n{_lines(frames, '      ')}" if frames else ""


def stack_of(pid: int) -> list[str]:
    """Returns the frames of a process's main thread, innermost first; empty if the process does not answer."""
    return _main_thread(_asked(pid))


def threads_of(pid: int) -> str:
    """Describes the innermost frames of a process's threads, one frame a line. Evener's own threads are left out."""
    found = _threads(_asked(pid))
    others, main = found[:-1], found[-1:]
    own = [frames for frames in others if not any(_OWN in frame for frame in frames)]
    shown = [*own[:_SHOWN_THREADS], *main]
    return "\n".join(
        f"      thread {number} is at\n{_lines(frames, '        ')}" for number, frames in enumerate(shown, 1)
    )


def _asked(pid: int) -> str:
    """Sends the signals and returns the process's answer; empty if it does not answer, has ended, or belongs to another
    user.
    """
    answer = ""
    with suppress(OSError, ValueError, KeyError):
        place = _file_of(pid)
        if place is None:
            return ""
        with place.open("rb") as file, _alone(file):
            file.seek(0, os.SEEK_END)
            for number, seconds in ((_PYTHON_SIGNAL, _PYTHON_SECONDS), (_NATIVE_SIGNAL, _ANSWER_SECONDS)):
                if not answer and _listens(pid, number):
                    os.kill(pid, number)
                    answer = _answer(file, seconds)
    return answer


def stacks_of(pid: int) -> str:
    """Describes the innermost frames of a process's main thread, one frame a line. Adds the stacks of its DataLoader
    workers if it waits for them.
    """
    frames = stack_of(pid)
    text = _lines(frames, "      ")
    if any(_WAITING_FOR_WORKER in frame for frame in frames):
        text += workers_of(pid)
    return text


def workers_of(pid: int) -> str:
    """Describes the stacks of the busy DataLoader workers of the process ``pid``, preceded by a newline."""
    stacks = {child: stack_of(child) for child in _children(pid)}
    stacks = {
        child: frames for child, frames in stacks.items() if any(_WORKER_LOOP in frame for frame in frames)
    }
    busy = {child: frames for child, frames in stacks.items() if not _is_idle(frames)}
    if stacks and not busy:
        return f"\n      its {len(stacks)} DataLoader workers are idle"
    shown = list(busy.items())[:_SHOWN_WORKERS]
    return "".join(
        f"\n      its DataLoader worker (pid {child}){_stopped(child)} is at\n{_lines(frames, '        ')}"
        for child, frames in shown
    ) + _silent_workers(pid, stacks)


def _silent_workers(pid: int, answered: dict[int, list[str]]) -> str:
    """Describes the stopped child processes, which gave no stack."""
    silent = [child for child in _children(pid) if child not in answered and _stopped(child)]
    return "".join(f"\n      its child (pid {child}){_stopped(child)}" for child in silent[:_SHOWN_WORKERS])


def _stopped(pid: int) -> str:
    with suppress(psutil.Error):
        if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return " is stopped (SIGSTOP, or a debugger)"
    return ""


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def _is_idle(frames: Sequence[str]) -> bool:
    """Returns True if a worker waits for work."""
    loop = next(index for index, frame in enumerate(frames) if _WORKER_LOOP in frame)
    return all(any(part in frame for part in _WAITING_FOR_WORK) for frame in frames[:loop])


def _lines(frames: Sequence[str], indent: str) -> str:
    shown = [f"{indent}{frame}" for frame in frames[:_SHOWN_FRAMES]]
    more = len(frames) - len(shown)
    return "\n".join([*shown, *([f"{indent}... and {more} more frames"] if more else [])])


def _file_of(pid: int) -> Path | None:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            if os.readlink(entry).startswith(f"/memfd:{_NAME}"):
                return entry
    return None


def _listens(pid: int, number: int) -> bool:
    """Returns True if the process catches the signal and is not stopped: a stopped one would answer too late."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    caught = int(status["SigCgt"], 16) >> (number - 1) & 1
    return bool(caught) and status["State"].split()[0] not in "tT"


@contextmanager
def _alone(file: BinaryIO) -> Iterator[None]:
    """Locks the answer file: without the lock, two readers at the same time would read each other's answer.

    Raises:
        BlockingIOError: If the lock is not free within 2 seconds.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_QUIET_SECONDS)
    yield  # closing the file releases the lock


def _answer(file: BinaryIO, seconds: float) -> str:
    """Returns what is added to the file, if that begins within ``seconds``."""
    deadline, answer, last = time.monotonic() + seconds, b"", time.monotonic()
    while time.monotonic() < deadline and not (answer and time.monotonic() - last > _QUIET_SECONDS):
        time.sleep(0.002)
        if piece := file.read():
            answer, last = answer + piece, time.monotonic()
            deadline = last + _ANSWER_SECONDS
    return answer.decode(errors="replace")


def _main_thread(answer: str) -> list[str]:
    """Returns frames such as ``File "train.py", line 3 in f`` of the oldest thread, which comes last."""
    return [[], *_threads(answer)][-1]


def _threads(answer: str) -> list[list[str]]:
    blocks = [block.splitlines() for block in answer.split("\n\n") if "  File " in block]
    return [[line.strip() for line in block if _is_frame(line)] for block in blocks]


def _is_frame(line: str) -> bool:
    """Returns True for a frame of the process, and False for the handler that wrote it down."""
    return line.startswith("  File ") and not line.startswith(f'  File "{__file__}"')
