"""Reports ranks that have been started but have not sent a heartbeat yet.

A rank has no watchdog before it has imported PyTorch and loaded its job, which can take minutes on a busy machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from evener.distributed.environment import usable_cores
from evener.distributed.processes import cpu_seconds
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.stall import Reminder, format_ranks


class Starts:
    """Tracks ranks that have not sent a heartbeat. The launcher's watchdog calls it about once a second."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}
        self._reminder = Reminder()

    def report_missing(
        self, pids: Mapping[int, int], beats: Mapping[int, Heartbeat | None], now: float
    ) -> None:
        """Prints which ranks have not sent a heartbeat, if they take long.

        Args:
            pids: Process ids, by rank.
            beats: Last heartbeats, by rank; None before the first.
            now: Time of the monotonic clock, in seconds.
        """
        late = {rank: pid for rank, pid in pids.items() if beats.get(rank) is None}
        self._since = {(rank, pid): self._since.get((rank, pid), now) for rank, pid in late.items()}
        if late:
            seconds = now - min(self._since.values())
            self._reminder.say(seconds, lambda: late_start_message(late, seconds))


def late_start_message(late: Mapping[int, int], seconds: float) -> str:
    """Returns the message: which ranks are late, their processor time, and the machine's load if it is too high.

    Args:
        late: Process ids of the late ranks, by rank.
        seconds: For how long the first of them has been waited for.
    """
    each = ", ".join(f"{cpu_seconds(pid):.0f} s" for pid in late.values())
    load, cores = os.getloadavg()[0], usable_cores()
    busy = f"; {load:.1f} programs want to compute on {cores} cores" if load > cores else ""
    return (
        f"waiting for {seconds:.0f} s for the start of {format_ranks(list(late))}: Python, PyTorch and the job are "
        f"being loaded, for which {each} of processor time were had{busy}"
    )
