"""For how long a rank has made no progress.

Within Evener's own phases (a step, loading, evaluation) progress is what marks it: a phase, a micro-batch, a wait that
begins or ends. A program of the user's own marks nothing and may compute for hours; there progress is that the process,
or one that it has started, computes at all.

::

    in a phase     ── mark ── mark ── (endless loop) ─────────────▶ idle since the last mark
    elsewhere      ── computes ───────────── (blocked) ───────────▶ idle since it last computed
"""

from __future__ import annotations

import time

import psutil

from evener.distributed.processes import children_cpu_seconds

_BUSY_SHARE = 0.02
"""Of a core. The watchdog itself, and threads that poll, take less."""
_LOOK_AT_CHILDREN_SECONDS = 4.0
"""Looking costs milliseconds: only after the process has been idle for so long."""
_GAP_BEATS = 5


class Activity:
    """Told by the watchdog's thread at every heartbeat what has been marked."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._looked = self._marked = self._computed = now
        self._marks = -1
        self._cpu_seconds = time.process_time()
        self._children: tuple[float, float] | None = None

    def look(self, marks: int, interval_seconds: float, debugs: bool = False) -> None:
        """Takes in the number of marks so far. A debugger that waits for a person is progress."""
        now = time.monotonic()
        # This thread was stopped with the process, or without Python's lock: nobody knows what was in between.
        slept = now - self._looked > _GAP_BEATS * interval_seconds + 1
        if marks != self._marks or debugs or slept:
            self._marks, self._marked = marks, now
        if slept or debugs or self._computes(now):
            self._computed = now
        self._looked = now

    def idle_seconds(self, in_phase: bool) -> float:
        """Since the last progress, within a phase or in the user's own program."""
        last = self._marked if in_phase else max(self._marked, self._computed)
        return time.monotonic() - last

    def _computes(self, now: float) -> bool:
        cpu_seconds, elapsed = time.process_time(), now - self._looked
        busy = cpu_seconds - self._cpu_seconds > _BUSY_SHARE * elapsed
        self._cpu_seconds = cpu_seconds
        if busy or now - self._computed < _LOOK_AT_CHILDREN_SECONDS:
            return busy
        return self._children_compute(now)

    def _children_compute(self, now: float) -> bool:
        before, self._children = self._children, (now, children_cpu_seconds(psutil.Process()))
        if before is None or now - before[0] > 2 * _LOOK_AT_CHILDREN_SECONDS:
            return False
        return self._children[1] - before[1] > _BUSY_SHARE * (now - before[0])
