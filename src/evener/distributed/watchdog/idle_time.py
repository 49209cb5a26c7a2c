"""Measures for how long a rank has made no progress.

Within Evener's own phases (a step, loading, evaluation) a mark is progress: a phase, micro-batch or wait that begins or
ends. A user's program marks nothing and may compute for hours; there any processor time used by the process or its
children is progress.

::

    in a phase     ── mark ── mark ── (endless loop) ─────────────▶ idle since the last mark
    elsewhere      ── computes ───────────── (blocked) ───────────▶ idle since it last computed
"""

from __future__ import annotations

import time

import psutil

from evener.distributed.processes import children_cpu_seconds

_BUSY_SHARE = 0.02
"""Least part of a core that counts as computing. The watchdog itself, and threads that poll, use less."""
_LOOK_AT_CHILDREN_SECONDS = 4.0
"""Child processes are examined only after the process was idle for this long, because that costs milliseconds."""
_GAP_BEATS = 5


class Activity:
    """Tracks the last progress of this process. The watchdog's thread calls `update` at every heartbeat."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._looked = self._marked = self._computed = now
        self._marks = -1
        self._cpu_seconds = time.process_time()
        self._children: tuple[float, float] | None = None

    def update(self, marks: int, interval_seconds: float, debugs: bool = False) -> None:
        """Takes the number of marks so far. A debugger that waits for input (``debugs``) counts as progress."""
        now = time.monotonic()
        # After a gap this thread was stopped with the process, or could not get the GIL: progress is unknown.
        slept = now - self._looked > _GAP_BEATS * interval_seconds + 1
        if marks != self._marks or debugs or slept:
            self._marks, self._marked = marks, now
        if slept or debugs or self._computes(now):
            self._computed = now
        self._looked = now

    def idle_seconds(self, in_phase: bool) -> float:
        """Returns the seconds since the last progress, by the rules for a phase or for the user's program."""
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
