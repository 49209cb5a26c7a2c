from __future__ import annotations

from dataclasses import replace

import pytest

from evener.distributed.launch.launcher_watchdog import LauncherWatchdog
from evener.distributed.watchdog.heartbeat import Heartbeat

BEAT = Heartbeat(rank=0, host="elsewhere", pid=12, count=1, time=0.0, limit=5.0)


def test_ranks_are_silent_when_all_are() -> None:
    lookout = LauncherWatchdog(dict)
    start = lookout._looked
    both = {0: BEAT, 1: replace(BEAT, rank=1)}
    assert lookout.silent_seconds(both, start) == 0
    assert lookout.silent_seconds(both, start + 4) == pytest.approx(4)
    assert lookout.silent_seconds({0: BEAT, 1: replace(BEAT, rank=1, count=2)}, start + 6) == 0
    assert lookout.silent_seconds({0: BEAT, 1: replace(BEAT, rank=1, count=2)}, start + 7) == pytest.approx(1)


def test_a_rank_that_is_to_come_or_has_left_is_not_silent() -> None:
    lookout = LauncherWatchdog(dict)
    start = lookout._looked
    for second in range(5):
        assert lookout.silent_seconds({0: BEAT, 1: None}, start + second) == 0
        assert lookout.silent_seconds({0: replace(BEAT, ended=True)}, start + second) == 0
        assert lookout.silent_seconds({}, start + second) == 0


def test_a_launcher_that_was_stopped_has_heard_nothing() -> None:
    lookout = LauncherWatchdog(dict)
    start = lookout._looked
    assert lookout.silent_seconds({0: BEAT}, start) == 0
    assert lookout.silent_seconds({0: BEAT}, start + 3600) == 0
