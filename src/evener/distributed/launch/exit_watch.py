"""Detects ranks that have done their work but whose process does not end: reports them, and later kills them.

At exit a process joins its threads and calls the functions registered with ``atexit``. A thread that never ends would
keep the process, and so the whole run, from ending::

    rank 1   work ─ last heartbeat ─ waits for a thread ................. killed
    launcher         ── 10 s ──▶ names rank, threads, stacks ── limit ──▶ an error that says so

A script under ``evener run`` may leave a thread that is part of its work. For such a process, only time without use of
the processor counts. The process of the command itself has no launcher, and watches itself (`leaving`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress

from evener.core.collector import collector_paused
from evener.core.stacks import threads_of
from evener.distributed.processes import cpu_seconds
from evener.distributed.watchdog.heartbeat import Heartbeat, awaited_threads
from evener.distributed.watchdog.stall import Reminder, first_word_seconds
from evener.errors import RankError

_BUSY_SECONDS = 0.02
"""Processor time in a second above which a process counts as working. A thread that polls uses less."""


class Ends:
    """Tracks ranks that have left while their processes still run. The launcher's watchdog calls it once a second."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._worked: dict[int, tuple[float, float]] = {}
        self._reminder = Reminder()

    def reason_to_end(self, left: Collection[Heartbeat], now: float) -> RankError | None:
        """Returns the error for which the processes of these ranks must be killed. Returns None if they need not be.

        Args:
            left: The last heartbeats of ranks that have left.
            now: Time of the monotonic clock, in seconds.
        """
        self._since = {beat.pid: self._since.get(beat.pid, now) for beat in left}
        over = [beat for beat in left if self._still_seconds(beat, now) >= beat.limit]
        if over:
            return RankError(
                f"{self.message(over, now)}\nIt was killed for that. Its work was done, and stays."
            )
        if left:
            seconds = now - min(self._since.values())
            self._reminder.say(seconds, lambda: self.message(left, now))
        return None

    def message(self, left: Collection[Heartbeat], now: float) -> str:
        """Describes each rank with the threads that it waits for, and their stacks."""
        return "\n".join(
            f"{beat.who} has left{beat.exit_status_text}, but its process has not ended for "
            f"{now - self._since[beat.pid]:.0f} s: {_waits_for(beat.threads)}\n{threads_of(beat.pid)}".rstrip()
            for beat in left
        )

    def _still_seconds(self, beat: Heartbeat, now: float) -> float:
        if not beat.works_on:
            return now - self._since[beat.pid]
        used, (before, since) = cpu_seconds(beat.pid), self._worked.get(beat.pid, (0.0, now))
        if beat.pid not in self._worked or used - before > _BUSY_SECONDS * max(1.0, now - since):
            self._worked[beat.pid] = used, now
        return now - self._worked[beat.pid][1]


def leaving(limit_seconds: float) -> None:
    """Starts a thread that reports why this process, whose work is done, does not end, and ends it after a time limit.

    Args:
        limit_seconds: The time limit.
    """
    thread = threading.Thread(target=_leave, args=(limit_seconds,), name="evener-leaving", daemon=True)
    thread.start()


def _leave(limit_seconds: float) -> None:
    began, first = time.monotonic(), min(first_word_seconds(), limit_seconds)
    for seconds, end in ((first, ""), (limit_seconds - first, "\nIt is ended for that.")):
        time.sleep(seconds)
        with suppress(OSError, ValueError):
            passed = time.monotonic() - began
            message = f"the command is done, but its process has not ended for {passed:.0f} s"
            reason = _waits_for(awaited_threads())
            print(f"evener: {message}: {reason}\n{_own_threads()}{end}", file=sys.stderr, flush=True)
    os._exit(1)


def _own_threads() -> str:
    """Returns the stacks of the non-daemon threads, including the main thread."""
    with collector_paused():  # as in `MainThread.take_sample`
        frames = sys._current_frames()
        shown = [thread for thread in threading.enumerate() if not thread.daemon and thread.ident in frames]
        return "\n".join(
            f"  {thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident or 0])).rstrip()
            for thread in shown
        )


def _waits_for(threads: Collection[str]) -> str:
    names = ", ".join(map(repr, threads))
    message = f"the thread{'s' * (len(threads) > 1)} {names}, which should end or be daemons"
    return f"it waits for {message if names else 'what was registered with atexit'}"
