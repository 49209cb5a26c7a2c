"""Stops a rank on a signal, also if its main thread is blocked in native code.

Python runs a signal handler between two instructions of the main thread, so it never runs while the main thread is
inside a C++ wait. But the interpreter's own handler, in C, writes the signal's number to a file descriptor wherever the
main thread is (`signal.set_wakeup_fd`). A thread reads it, and ends the process if the main thread has not ended in
time.

    SIGTERM ─┬─ main thread in Python ─▶ InterruptedRunError ─▶ records written, files closed, exit
             └─ thread ── grace ─────────────────────────────▶ last words, exit, wherever the main thread is

A training run saves a checkpoint at a moment of its own choice. Within `deferring` the first signal is only remembered,
a second one raises, and the thread waits for the time that the run was given for saving.

    SIGTERM ─┬─ main thread ─▶ ... end of the step ─▶ saved, InterruptedRunError ─▶ records written, exit
             └─ thread ── the run's own grace ─────────────────────────────────▶ last words, exit

An exception raised by a signal handler may be caught on its way: native code turns it into another exception, and a
library that gathers the errors of all ranks keeps it. So the interruption is remembered (`asked`), and replaces any
other exception that ends the block afterwards.
"""

from __future__ import annotations

import ast
import ctypes
import linecache
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

from evener.core.stop_signals import STOP_SIGNALS
from evener.errors import InterruptedRunError

GRACE_SECONDS = 3.0
"""Time a rank has to end by itself after a stop signal."""

_PR_SET_PDEATHSIG = 1
_SAME_SECONDS = 0.5
"""Signals within this time count as one: a terminal's or scheduler's signal may reach a process in two ways."""

_asked: InterruptedRunError | None = None
_blocks = 0
_deferral: Deferral | None = None
_last_words: list[Callable[[], None]] = []


class Deferral:
    """State of `deferring`: whether the run was asked to stop, and by which signal."""

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.number = 0
        """Number of the signal; 0 if none has arrived."""
        self.time = 0.0

    def hears(self, number: int) -> bool:
        """Records a signal. Returns True if it is the first one, or counts as the same (within half a second)."""
        now = time.monotonic()
        if self.number == 0:
            self.number, self.time = number, now
        return now - self.time < _SAME_SECONDS


def stop_signals() -> list[signal.Signals]:
    """Returns the signals of `STOP_SIGNALS` without those that are ignored, as SIGHUP is under nohup."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def asked() -> InterruptedRunError | None:
    """Returns the error that a stop signal has raised in a block that still runs. Returns None if there is none."""
    return _asked


def asked_to_stop() -> int:
    """Returns the number of the signal that a block of `deferring` has got; 0 if there is none."""
    return 0 if _deferral is None else _deferral.number


def check() -> None:
    """Raises the error of `asked` again, if there is one: it may have been caught on its way."""
    if _asked is not None:
        raise _asked


@contextmanager
def last_words(say: Callable[[], None]) -> Iterator[None]:
    """Registers ``say`` for the block: the thread of `enforce` calls it before it ends the process."""
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.remove(say)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies, so that a killed launcher leaves no ranks behind."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def raising(signals: list[signal.Signals], describe: Callable[[], str]) -> Iterator[None]:
    """Raises `InterruptedRunError` in the main thread on the first of these signals; later ones are ignored.

    If that error was turned into another exception on its way, the block raises it anyway.

    Args:
        signals: The signals to handle.
        describe: Returns the position of the run in words, for the message.
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
    """Returns a hook that hides an `InterruptedRunError` which a destructor cannot raise: `check` raises it again."""
    return lambda unraisable: (
        None if isinstance(unraisable.exc_value, InterruptedRunError) else hook(unraisable)
    )


def _raise(number: int, place: str) -> NoReturn:
    global _asked
    _asked = InterruptedRunError(interruption(number, place), number)
    vars(_asked).update(time=time.time(), before=_unhandled())
    raise _asked


def _unhandled() -> BaseException | None:
    """Returns the error that is on its way out while a ``finally`` or a ``with`` is left, if there is one.

    An error that an ``except`` is dealing with does not count: libraries raise and catch errors as a matter of routine.
    An ``except`` that ends with ``raise`` counts as passing the error on.
    """
    error = sys.exception()
    if error is None or error.__traceback__ is None:
        return error
    frame = error.__traceback__.tb_frame  # the one that deals with it
    return None if _is_caught(frame.f_code.co_filename, frame.f_lineno) else error


def _is_caught(file: str, line: int) -> bool:
    """Returns True if the innermost ``except`` around this line of a file does not end with ``raise``."""
    with suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse("".join(linecache.getlines(file)))
        handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
        around = [each for each in handlers if each.lineno <= line <= (each.end_lineno or line)]
        if around:
            return not isinstance(max(around, key=lambda each: each.lineno).body[-1], ast.Raise)
    return False


@contextmanager
def deferring(grace_seconds: float, describe: Callable[[], str]) -> Iterator[Deferral]:
    """Remembers the first of `stop_signals`, so that the block can stop by itself in time. A second signal raises
    `InterruptedRunError`.

    Args:
        grace_seconds: The process is ended this long after the first signal, if `enforce` was called.
        describe: Returns the position of the run in words, for the message.
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
    """Returns the message of an interruption: ``interrupted by SIGINT at step 41 of 400``."""
    name = signal.Signals(number).name
    known = f"at {place}" if place else "before any progress that Evener knows of"
    return f"interrupted by {name} {known}"


def enforce(on_expiry: Callable[[int], None], grace_seconds: float = GRACE_SECONDS) -> None:
    """Starts a thread that ends this process ``grace_seconds`` after one of `stop_signals`, if it still runs then.

    For the first signal within `deferring`, the grace time of `deferring` applies. Only signals that Python handles
    count: others are not written to the file descriptor.

    Args:
        on_expiry: Called with the number of the signal just before the process is ended.
        grace_seconds: Time from the signal to the end of the process.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(target=_expire, args=(read, on_expiry, grace_seconds), daemon=True)
    thread.start()
    os.register_at_fork(after_in_child=_forget)


def _expire(read: int, on_expiry: Callable[[int], None], grace_seconds: float) -> None:
    """Body of the thread of `enforce`. Each signal sets a deadline; the earliest applies."""
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
    """Restores default signal handling in a forked child (a DataLoader worker), which is not the rank."""
    signal.set_wakeup_fd(-1)
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
