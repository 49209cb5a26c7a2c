from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

import pytest

from evener.distributed.hosts import host_token
from evener.distributed.watchdog.hang_rules import may_look, verdict
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.peer_state import PeerState, late_rank, report_on, should_look
from evener.distributed.watchdog.store_health import LAUNCHER_PID

FAR = Heartbeat(rank=1, host="elsewhere", pid=12, count=1, time=0.0, limit=10.0)


def waiting(rank: int, seconds: float, step: int = 41) -> Heartbeat:
    return replace(FAR, rank=rank, phase="all-reduce", step=step, waits=True, seconds=seconds)


def speaks(here: Heartbeat, *others: Heartbeat) -> bool:
    return verdict(here, [PeerState(beat.rank, beat) for beat in others]) == "late"


def test_a_wait_shorter_than_the_timeout_goes_on() -> None:
    assert not speaks(waiting(0, 9.0), replace(FAR, rank=1))


def test_a_rank_at_work_makes_the_wait_for_it_hopeless_but_not_its_own() -> None:
    at_work = replace(FAR, rank=1, phase="forward", seconds=500.0)
    assert speaks(waiting(0, 10.5), at_work)
    assert not speaks(at_work, waiting(0, 5.0))


def test_the_rank_that_others_wait_for_is_the_one_that_does_not_wait() -> None:
    at_work = replace(FAR, rank=2, phase="forward", seconds=500.0)
    waits = [PeerState(rank, waiting(rank, 9.0)) for rank in (1, 3)]
    assert late_rank([*waits, PeerState(2, at_work)]) == 2
    assert late_rank([*waits, PeerState(4)]) == 4  # has never been heard of
    assert late_rank(waits) is None
    assert late_rank([]) is None


def test_ranks_in_different_waits_never_meet() -> None:
    assert speaks(waiting(0, 10.5, step=41), waiting(1, 2.0, step=42))


def test_a_rank_that_has_just_come_is_not_missing() -> None:
    assert not speaks(waiting(0, 10.5), waiting(1, 0.5))


def test_all_stuck_in_one_place_is_hopeless_too() -> None:
    assert speaks(waiting(0, 10.5), waiting(1, 9.0), waiting(2, 10.4))


def test_a_rank_never_heard_of_is_missing() -> None:
    assert verdict(waiting(0, 10.5), [PeerState(1)]) == "late"


def test_the_lowest_rank_that_waits_speaks_and_others_only_after_it_did_not() -> None:
    at_work = replace(FAR, rank=2)
    assert speaks(waiting(0, 10.5), waiting(1, 10.5), at_work)
    assert not speaks(waiting(1, 10.5), waiting(0, 10.5), at_work)
    assert speaks(waiting(1, 14.5), waiting(0, 14.5), at_work)


def test_a_rank_alone_waits_for_nobody() -> None:
    assert verdict(waiting(0, 500.0), []) is None


def saving(rank: int, **changes: object) -> Heartbeat:
    """In a block that all ranks do together, where rank 0 writes and the others wait in a barrier."""
    base = replace(FAR, rank=rank, together="checkpoint of step 41", seconds=500.0)
    there = {"phase": "checkpoint", "step": 41} if rank == 0 else {"phase": "barrier", "waits": True}
    return replace(base, **(there | changes))  # type: ignore[arg-type]


def together(other: PeerState, here: Heartbeat, since: float) -> bool:
    """Whether the rank of ``here`` ends the run, if ``other`` has looked as it does now for ``since`` seconds."""
    other.compare(here)
    if other._apart_since is not None:
        other._apart_since -= since
    other.compare(here)
    return verdict(here, [other, PeerState(7, saving(7))]) == "apart"


def test_what_all_do_together_takes_as_long_as_it_takes() -> None:
    assert not together(PeerState(0, saving(0)), saving(1), since=5000.0)
    assert not together(PeerState(1, saving(1)), saving(0), since=5000.0)


def test_a_rank_that_is_elsewhere_for_the_timeout_ends_it() -> None:
    for elsewhere in (replace(FAR, phase="forward"), waiting(1, 500.0), saving(1, together="evaluation")):
        assert not together(PeerState(1, elsewhere), saving(0), since=9.0)
        assert together(PeerState(1, elsewhere), saving(0), since=10.5)


def test_a_rank_that_is_lost_for_the_timeout_ends_it() -> None:
    silent = PeerState(1, saving(1))
    silent._since -= 12
    assert not together(silent, saving(0), since=9.0)
    silent._since -= 12
    assert together(silent, saving(0), since=10.5)
    assert together(PeerState(1), saving(0), since=10.5)


def test_a_rank_that_came_back_starts_anew() -> None:
    standing = PeerState(1, replace(FAR, phase="forward"))
    assert together(standing, saving(0), since=10.5)
    standing.update(saving(1, count=2))
    standing.compare(saving(0))
    assert standing.apart_seconds == 0
    standing.update(replace(FAR, count=3))
    standing.compare(saving(0))
    assert standing.apart_seconds < 1
    standing.compare(waiting(0, 1.0))
    assert standing.apart_seconds == 0


def test_who_saves_is_missing_for_who_waits_elsewhere() -> None:
    assert speaks(waiting(0, 10.5), saving(1))


def test_the_one_that_waits_longest_looks_and_of_several_the_lowest() -> None:
    def looks(here: Heartbeat, looker: Heartbeat) -> bool:
        return should_look(here, PeerState(looker.rank, looker))

    assert should_look(waiting(5, 4.0), PeerState(-1))
    assert looks(waiting(5, 4.0), waiting(5, 3.0))
    assert looks(waiting(0, 4.0), waiting(1, 5.0))
    assert not looks(waiting(1, 5.0), waiting(0, 4.0))
    assert looks(waiting(1, 9.0), waiting(0, 4.0))
    assert not looks(waiting(0, 4.0), waiting(1, 9.0))
    assert not looks(saving(1), saving(0, seconds=0.0))


def test_another_looks_when_the_looker_is_silent_or_has_left() -> None:
    silent = PeerState(0, waiting(0, 9.0))
    silent._since -= 4
    assert should_look(waiting(1, 9.0), silent)
    assert should_look(waiting(1, 9.0), PeerState(0, replace(waiting(0, 9.0), ended=True)))


def test_nobody_looks_without_a_reason() -> None:
    assert not may_look(waiting(0, 3.0))
    assert may_look(waiting(0, 4.0))
    assert not may_look(replace(FAR, phase="forward", seconds=500.0))
    assert may_look(saving(0, seconds=0.0))


def test_silence_is_counted_from_the_last_new_heartbeat() -> None:
    standing = PeerState(1, FAR)
    standing._since -= 5
    assert 5 <= standing.silent_seconds < 6
    standing.update(FAR)
    assert standing.silent_seconds >= 5
    assert standing.is_lost
    standing.update(replace(FAR, count=2))
    assert standing.silent_seconds < 1
    assert not standing.is_lost


def test_silence_is_measured_in_heartbeats_which_a_short_limit_brings_closer_together() -> None:
    short, long = (PeerState(1, replace(FAR, limit=limit)) for limit in (1.0, 10.0))
    for standing, is_silent in ((short, True), (long, False)):
        standing._since -= 1.5
        assert standing.is_silent == is_silent
        assert ("no sign of life" in standing.describe()) == is_silent
        assert standing.lateness[0] != is_silent


def test_a_dead_process_of_this_machine_is_known_at_once() -> None:
    here = replace(FAR, host="here", token=host_token(), pid=os.getpid(), time=time.monotonic())
    assert PeerState(1, here).state == "running"
    gone = PeerState(1, replace(here, pid=2**22 - 1))
    assert gone.state == "gone"
    assert gone.is_lost


def test_a_process_of_a_container_of_the_same_name_is_not_looked_for_here() -> None:
    beside = replace(FAR, host=socket.gethostname(), token="another", pid=2**22 - 1)
    assert PeerState(1, beside).state == "running"
    assert not PeerState(1, beside).is_lost


def test_the_report_names_the_late_ones_first() -> None:
    silent = PeerState(3, replace(FAR, rank=3, phase="backward", step=40))
    silent._since -= 12
    at_work = PeerState(
        2, replace(FAR, rank=2, phase="forward", step=41, seconds=9.0, where=("a.py:3 in f",))
    )
    lines = report_on(
        [PeerState(0, waiting(0, 8.0)), PeerState(1, waiting(1, 7.0)), at_work, silent]
    ).splitlines()
    assert lines == [
        "  rank 3 (host elsewhere, pid 12): no sign of life for 12 s; last seen in backward of step 40",
        "  rank 2 (host elsewhere, pid 12): is in forward of step 41, at a.py:3 in f, for 9 s",
        "  rank 0 (host elsewhere, pid 12): waits in all-reduce of step 41, for 8 s",
        "  rank 1 (host elsewhere, pid 12): waits in all-reduce of step 41, for 7 s",
    ]


def test_ranks_that_never_came_or_left_are_told_apart() -> None:
    report = report_on([PeerState(1), PeerState(2, replace(FAR, rank=2, ended=True))])
    assert "rank 1: has given no sign of life yet" in report
    assert "rank 2 (host elsewhere, pid 12): has left on its own" in report


def test_a_world_size_that_is_too_large_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    asks = "rank 1: has given no sign of life yet; is it started? WORLD_SIZE is 2"
    assert asks in report_on([PeerState(1)])
    monkeypatch.setenv(LAUNCHER_PID, "1")
    assert asks not in report_on([PeerState(1)])


def test_a_clock_that_is_set_makes_nobody_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(FAR, host="here", token=host_token(), pid=os.getpid(), time=time.monotonic())
    standing = PeerState(1, here)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert standing.silent_seconds < 5
    assert not standing.is_lost
