"""Runs a command of the user's every few seconds, which says whether this host is about to be taken away.

Clouds announce the end of a spot machine in ways of their own, most of them at an address of the local network. The
exit status of the command is the answer: 0 means that the host goes away soon. Then this process gets SIGTERM, as a
scheduler would send it: the run saves, and the host leaves it if others can go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from evener.core.stdio import to_stderr
from evener.core.text import printable, shortened

PERIOD_SECONDS = 5.0
_LIMIT_SECONDS = 10.0
"""Longest time that the command may take."""
_CANNOT_RUN = (126, 127)
"""Exit statuses by which a shell says that a command cannot be run."""


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def error_of(command: str) -> str | None:
    """Runs the command once.

    Returns:
        None if the host goes away; empty text if it stays; otherwise what is wrong with the command.
    """
    with subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        killer = threading.Timer(_LIMIT_SECONDS, _kill, (process.pid,))
        killer.start()
        try:
            said = process.communicate()[1].decode(errors="replace").strip()
        finally:
            late = not killer.is_alive()
            killer.cancel()
    status = process.returncode
    if late:
        return f"took longer than {_LIMIT_SECONDS:g} s"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status in _CANNOT_RUN:
        return f"cannot be run (status {status}): {shortened(said)}"
    return "" if status else None


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextmanager
def watching(
    command: str | None,
    act: Callable[[], object] = _end_this_process,
    period_seconds: float = PERIOD_SECONDS,
) -> Iterator[None]:
    """Runs the command every few seconds during the block, in a thread.

    Args:
        command: A command of the shell; None for none.
        act: Called once when the command says that the host goes away.
        period_seconds: Time from the end of one command to the next.
    """
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(command, act, period_seconds, over), name="evener-notice", daemon=True
    )
    if command is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(command: str, act: Callable[[], object], period_seconds: float, over: threading.Event) -> None:
    told = False
    while not over.is_set():
        try:
            error = error_of(command)
        except OSError as failure:
            error = f"cannot be run: {failure}"
        if error is None:
            if not over.is_set():
                to_stderr(f"evener: {printable(command)!r} says that this host is about to be taken away")
                act()
            return
        if error and not told:
            told = True
            to_stderr(
                f"evener: the notice command {printable(command)!r} {printable(error)}; the run goes on"
            )
        over.wait(period_seconds)
