"""Ranks that have been started and give no heartbeat yet, which the launcher tells.

A rank has no watchdog before it has imported PyTorch and loaded its job, which takes minutes on a crowded machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from evener.distributed.environment import usable_cores
from evener.distributed.processes import cpu_seconds
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.stall import Reminder, rank_words


class Starts:
    """Told about once a second which processes run, and which of them have given a heartbeat."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float] = {}
        self._reminder = Reminder()

    def look(self, pids: Mapping[int, int], beats: Mapping[int, Heartbeat | None], now: float) -> None:
        """Says which ranks are waited for, if they take long.

        Args:
            pids: Of the processes, by rank.
            now: Seconds of a clock that nobody sets.
        """
        late = {rank: pid for rank, pid in pids.items() if beats.get(rank) is None}
        self._since = {(rank, pid): self._since.get((rank, pid), now) for rank, pid in late.items()}
        if late:
            seconds = now - min(self._since.values())
            self._reminder.say(seconds, lambda: start_words(late, seconds))


def start_words(late: Mapping[int, int], seconds: float) -> str:
    """``waiting for 12 s for the start of rank 1, which has computed for 3 s; 9.1 programs share 2 cores``."""
    each = ", ".join(f"{cpu_seconds(pid):.0f} s" for pid in late.values())
    load, cores = os.getloadavg()[0], usable_cores()
    busy = f"; {load:.1f} programs want to compute on {cores} cores" if load > cores else ""
    return (
        f"waiting for {seconds:.0f} s for the start of {rank_words(list(late))}: Python, PyTorch and the job are being "
        f"loaded, for which {each} of processor time were had{busy}"
    )
