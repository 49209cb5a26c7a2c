from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

from evener.runtime.heartbeat import Heartbeat
from evener.runtime.standing import Standing, must_speak, report_on

FAR = Heartbeat(rank=1, host="elsewhere", pid=12, count=1, time=0.0)


def waiting(rank: int, seconds: float, step: int = 41) -> Heartbeat:
    return replace(FAR, rank=rank, phase="all-reduce", step=step, waits=True, seconds=seconds)


def speaks(here: Heartbeat, *others: Heartbeat) -> bool:
    return must_speak(here, [Standing(beat.rank, beat) for beat in others], 10.0, 1.0)


def test_a_wait_shorter_than_the_timeout_goes_on() -> None:
    assert not speaks(waiting(0, 9.0), replace(FAR, rank=1))


def test_a_rank_at_work_makes_the_wait_for_it_hopeless_but_not_its_own() -> None:
    at_work = replace(FAR, rank=1, phase="forward", seconds=500.0)
    assert speaks(waiting(0, 10.5), at_work)
    assert not speaks(at_work, waiting(0, 5.0))


def test_ranks_in_different_waits_never_meet() -> None:
    assert speaks(waiting(0, 10.5, step=41), waiting(1, 2.0, step=42))


def test_a_rank_that_has_just_come_is_not_missing() -> None:
    assert not speaks(waiting(0, 10.5), waiting(1, 0.5))


def test_all_stuck_in_one_place_is_hopeless_too() -> None:
    assert speaks(waiting(0, 10.5), waiting(1, 9.0), waiting(2, 10.4))


def test_a_rank_never_heard_of_is_missing() -> None:
    assert must_speak(waiting(0, 10.5), [Standing(1)], 10.0, 1.0)


def test_the_lowest_rank_that_waits_speaks_and_others_only_after_it_did_not() -> None:
    at_work = replace(FAR, rank=2)
    assert speaks(waiting(0, 10.5), waiting(1, 10.5), at_work)
    assert not speaks(waiting(1, 10.5), waiting(0, 10.5), at_work)
    assert speaks(waiting(1, 14.5), waiting(0, 14.5), at_work)


def test_silence_is_counted_from_the_last_new_heartbeat() -> None:
    standing = Standing(1, FAR)
    standing._since -= 5
    assert 5 <= standing.silent_seconds < 6
    standing.update(FAR)
    assert standing.silent_seconds >= 5
    assert standing.is_lost(1.0)
    standing.update(replace(FAR, count=2))
    assert standing.silent_seconds < 1
    assert not standing.is_lost(1.0)


def test_a_dead_process_of_this_machine_is_known_at_once() -> None:
    here = replace(FAR, host=socket.gethostname(), pid=os.getpid(), time=time.time())
    assert Standing(1, here).state == "running"
    gone = Standing(1, replace(here, pid=2**22 - 1))
    assert gone.state == "gone"
    assert gone.is_lost(1.0)


def test_the_report_names_the_late_ones_first() -> None:
    silent = Standing(3, replace(FAR, rank=3, phase="backward", step=40))
    silent._since -= 12
    at_work = Standing(2, replace(FAR, rank=2, phase="forward", step=41, seconds=9.0, where=("a.py:3 in f",)))
    lines = report_on(
        [Standing(0, waiting(0, 8.0)), Standing(1, waiting(1, 7.0)), at_work, silent]
    ).splitlines()
    assert lines == [
        "  rank 3 (host elsewhere, pid 12): no sign of life for 12 s; last seen in backward of step 40",
        "  rank 2 (host elsewhere, pid 12): is in forward of step 41, at a.py:3 in f, for 9 s",
        "  rank 0 (host elsewhere, pid 12): waits in all-reduce of step 41, for 8 s",
        "  rank 1 (host elsewhere, pid 12): waits in all-reduce of step 41, for 7 s",
    ]


def test_ranks_that_never_came_or_left_are_told_apart() -> None:
    report = report_on([Standing(1), Standing(2, replace(FAR, rank=2, ended=True))])
    assert "rank 1: has given no sign of life yet" in report
    assert "rank 2 (host elsewhere, pid 12): has ended on its own" in report
