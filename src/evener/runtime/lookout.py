"""The launcher's own watch over its ranks, for the hang in which no rank can speak.

A call in native code that holds Python's lock silences the watchdog of its rank. While one rank is left that waits, it
names the silent one; where all ranks of this machine are silent, or stopped, only the launcher can.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from evener.errors import RankTimeoutError
from evener.runtime.heartbeat import Heartbeat
from evener.runtime.stacks import stacks_of
from evener.runtime.standing import Standing, report_on

_LOOK_SECONDS = 1.0
_GAP_SECONDS = 5.0
_PATIENCE_SECONDS = 3.0
"""While any rank can speak, it shall: it knows more."""

Beats = Mapping[int, Heartbeat | None]
"""Of each rank of this machine whose process runs, by rank; None before its first."""


class Lookout:
    """Ends ranks that have all been silent for as long as each of them would wait for others.

    Args:
        beats: The last heartbeats.
    """

    def __init__(self, beats: Callable[[], Beats]) -> None:
        self._beats = beats
        self._silent: dict[int, tuple[tuple[int, int], float]] = {}
        self._looked = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-lookout", daemon=True)
        self.found: RankTimeoutError | None = None
        """What it has ended them for."""

    def __enter__(self) -> Lookout:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def silent_seconds(self, beats: Beats, now: float) -> float:
        """For how long no rank has given a sign of life; 0 while any is still to come, or has left on its own."""
        if now - self._looked > _GAP_SECONDS:  # this process was stopped: nobody has listened
            self._silent.clear()
        self._looked = now
        if not beats:
            return 0.0
        return min(self._silence(rank, beat, now) for rank, beat in beats.items())

    def _silence(self, rank: int, beat: Heartbeat | None, now: float) -> float:
        if beat is None or beat.ended:
            return 0.0
        last, since = self._silent.get(rank, ((0, 0), now))
        if last != (beat.pid, beat.count):
            self._silent[rank], since = ((beat.pid, beat.count), now), now
        return now - since

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            beats = self._beats()
            seconds = self.silent_seconds(beats, time.monotonic())
            last = [beat for beat in beats.values() if beat is not None]
            if last and seconds >= max(beat.limit for beat in last) + _PATIENCE_SECONDS:
                self._end(last, seconds)
                return

    def _end(self, beats: list[Heartbeat], seconds: float) -> None:
        stacks = {beat.rank: stacks_of(beat.pid) for beat in beats}
        limit = max(beat.limit for beat in beats)
        self.found = RankTimeoutError(
            f"no rank of this machine has given a sign of life for {seconds:.0f} s (timeout {limit:g} s): they are in "
            "native code that holds Python's lock, or stopped\n"
            + report_on([Standing(beat.rank, beat) for beat in beats], stacks)
        )
        for beat in beats:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, signal.SIGKILL)
