"""Stopping a rank that may not be listening.

Python runs a signal handler between two instructions of the main thread, and a main thread inside a C++ wait
gets to none. But the interpreter's own handler, in C, writes the signal's number to a file descriptor
wherever the main thread is (`signal.set_wakeup_fd`). A thread reads it and, when the main thread has not
ended by itself in time, ends the process.

    SIGTERM ─┬─ main thread in Python ─▶ InterruptedRunError ─▶ records written, files closed, exit
             └─ thread ── grace ──────────────────────────────▶ exit, wherever the main thread is
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from evener.errors import InterruptedRunError

GRACE_SECONDS = 3.0
"""How long a rank that was asked to stop may take to end by itself."""

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, so that a killed launcher leaves no ranks
    behind.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def raising(signals: list[signal.Signals], describe: Callable[[], str]) -> Iterator[None]:
    """Raises `InterruptedRunError` in the main thread at the first of these signals; the next are ignored.

    Args:
        describe: Says where the run stands, for the message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not asked:
            asked.append(number)
            error = InterruptedRunError(interruption(number, describe()), number)
            vars(error)["time"] = time.time()
            raise error

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interruption(number: int, place: str) -> str:
    """In words: ``interrupted by SIGINT at step 41 of 400``."""
    name = signal.Signals(number).name
    return f"interrupted by {name} at {place}" if place else f"interrupted by {name} before any progress"


def enforce(on_expiry: Callable[[int], None], grace_seconds: float = GRACE_SECONDS) -> None:
    """Ends this process ``grace_seconds`` after SIGINT or SIGTERM, if it then still runs and Python handles
    the signal.

    Args:
        on_expiry: Called with the number of the signal just before.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(target=_expire, args=(read, on_expiry, grace_seconds), daemon=True)
    thread.start()
    os.register_at_fork(after_in_child=_forget)


def _expire(read: int, on_expiry: Callable[[int], None], grace_seconds: float) -> None:
    while (number := os.read(read, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
        continue
    time.sleep(grace_seconds)
    on_expiry(number)
    os._exit(128 + number)


def _forget() -> None:
    """A forked child (a DataLoader's worker) is not the rank: its signals are its own."""
    signal.set_wakeup_fd(-1)
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
