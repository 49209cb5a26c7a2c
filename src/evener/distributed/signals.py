"""Stopping a rank that may not be listening.

Python runs a signal handler between two instructions of the main thread, and a main thread inside a C++ wait
gets to none. But the interpreter's own handler, in C, writes the signal's number to a file descriptor
wherever the main thread is (`signal.set_wakeup_fd`). A thread reads it and, when the main thread has not
ended by itself in time, ends the process.

    SIGTERM ─┬─ main thread in Python ─▶ InterruptedRunError ─▶ records written, files closed, exit
             └─ thread ── grace ─────────────────────────────▶ last words, exit, wherever the main thread is

A run that can save where it stands wants to choose the moment. Within `deferring` the first signal is only remembered,
a second one raises, and the thread waits for as long as the run was given for saving.

    SIGTERM ─┬─ main thread ─▶ ... end of the step ─▶ saved, InterruptedRunError ─▶ records written, exit
             └─ thread ── the run's own grace ─────────────────────────────────▶ last words, exit

An exception that is raised anywhere can be caught anywhere: native code makes another one of it, and a library that
gathers the errors of all ranks keeps it. So what was asked is remembered (`asked`), and whatever else ends the block
afterwards is no news.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from evener.errors import InterruptedRunError

GRACE_SECONDS = 3.0
"""How long a rank that was asked to stop may take to end by itself."""

_PR_SET_PDEATHSIG = 1
_SAME_SECONDS = 0.5
"""Signals that follow each other faster are one: of a terminal or a job's end that reaches a process on two ways."""

_asked: InterruptedRunError | None = None
_blocks = 0
_deferral: Deferral | None = None
_last_words: list[Callable[[], None]] = []


class Deferral:
    """Whether a run was asked to stop, by which signal."""

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.number = 0
        """Of the signal; 0 for none."""
        self.time = 0.0

    def hears(self, number: int) -> bool:
        """Whether this is the first signal, or the same once more."""
        now = time.monotonic()
        if self.number == 0:
            self.number, self.time = number, now
        return now - self.time < _SAME_SECONDS


def stop_signals() -> list[signal.Signals]:
    """Those that ask a run to stop: of a person (Ctrl-C and Ctrl-\\), of a machine that is taken away, of SLURM, of a
    terminal that closes.

    One that was ignored from the start, as by nohup, stays so.
    """
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
    return [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]


def asked() -> InterruptedRunError | None:
    """What the first signal raised in a block of `raising` that still runs."""
    return _asked


def check() -> None:
    """Raises it once more, where it was caught on its way."""
    if _asked is not None:
        raise _asked


@contextmanager
def last_words(say: Callable[[], None]) -> Iterator[None]:
    """Has a thread call ``say`` if the process is ended within the block without its main thread (`enforce`)."""
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.remove(say)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies: a launcher that is killed leaves no ranks behind."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def raising(signals: list[signal.Signals], describe: Callable[[], str]) -> Iterator[None]:
    """Raises `InterruptedRunError` in the main thread at the first of these signals; the next are ignored.

    The block ends with that error, whatever became of it on its way.

    Args:
        describe: Says where the run stands, for the message.
    """
    global _asked, _blocks
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if _asked is None:
            _raise(number, describe())

    _blocks += 1
    hook, sys.unraisablehook = sys.unraisablehook, _unless_asked(sys.unraisablehook)
    before = {number: signal.signal(number, handle) for number in signals}
    changed = False
    try:
        yield
    except Exception as error:
        if _asked is None or error is _asked:
            raise
        changed = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _blocks -= 1
        sys.unraisablehook = hook
        stop, _asked = _asked, None
    if changed and stop is not None:
        raise stop


def _unless_asked(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Python shows what it cannot raise, as in a destructor; a signal that came there is raised again by `check`."""
    return lambda unraisable: (
        None if isinstance(unraisable.exc_value, InterruptedRunError) else hook(unraisable)
    )


def _raise(number: int, place: str) -> NoReturn:
    global _asked
    _asked = InterruptedRunError(interruption(number, place), number)
    vars(_asked).update(time=time.time(), before=sys.exception())
    raise _asked


@contextmanager
def deferring(grace_seconds: float, describe: Callable[[], str]) -> Iterator[Deferral]:
    """Remembers the first of `stop_signals`, for the block to stop by itself in time; a second one raises.

    Args:
        grace_seconds: After that long without an end the process is ended, where `enforce` was called.
        describe: Says where the run stands, for the message.
    """
    global _asked, _deferral
    deferral = Deferral(grace_seconds)
    if threading.current_thread() is not threading.main_thread():
        yield deferral
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not deferral.hears(number) and _asked is None:
            _raise(number, describe())

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    _deferral = deferral
    try:
        yield deferral
    finally:
        _deferral = None
        for number, handler in before.items():
            signal.signal(number, handler)
        if _blocks == 0:
            _asked = None


def interruption(number: int, place: str) -> str:
    """In words: ``interrupted by SIGINT at step 41 of 400``."""
    name = signal.Signals(number).name
    return f"interrupted by {name} at {place}" if place else f"interrupted by {name} before any progress"


def enforce(on_expiry: Callable[[int], None], grace_seconds: float = GRACE_SECONDS) -> None:
    """Ends this process ``grace_seconds`` after one of `stop_signals`, if it still runs then.

    Within `deferring` the first one leaves the time that is said there.

    Only where Python handles the signal: what is left to the system or ignored writes to no descriptor.

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
    """Each signal sets a time at which all must be over; the earliest holds."""
    deadline, asking = math.inf, {int(number) for number in stop_signals()}
    number, began = signal.SIGTERM, math.nan
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([read], [], [], None if left == math.inf else left)[0]:
            continue
        heard = os.read(read, 1)[0]
        now, first = time.monotonic(), deadline == math.inf
        if heard not in asking or now - began < _SAME_SECONDS:
            continue
        if first:
            number, began = signal.Signals(heard), now
        grace = _deferral.grace_seconds if first and _deferral is not None else grace_seconds
        deadline = min(deadline, now + grace)
    for say in reversed(_last_words):
        with suppress(Exception):
            say()
    on_expiry(number)
    os._exit(128 + number)


def _forget() -> None:
    """A forked child (a DataLoader's worker) is not the rank: its signals are its own."""
    signal.set_wakeup_fd(-1)
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
