from __future__ import annotations

import os

import pytest

from evener.distributed.launch.start_watch import Starts
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.stall import FIRST_SECONDS

BEAT = Heartbeat(rank=0, host="here", pid=12, count=1, time=0.0)


def test_a_start_that_takes_long_is_told_and_one_that_does_not_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FIRST_SECONDS, "10")
    starts, pids = Starts(), {0: os.getpid(), 1: os.getpid()}
    for second in range(10):
        starts.report_missing(pids, {0: BEAT, 1: None}, float(second))
    assert capsys.readouterr().err == ""
    starts.report_missing(pids, {0: BEAT, 1: None}, 11.0)
    assert capsys.readouterr().err.startswith("evener: waiting for 11 s for the start of rank 1: Python")


def test_a_rank_that_was_started_again_is_waited_for_from_then_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FIRST_SECONDS, "10")
    starts, pid = Starts(), os.getpid()
    starts.report_missing({0: pid}, {0: None}, 0.0)
    starts.report_missing({0: pid}, {0: BEAT}, 5.0)
    starts.report_missing({0: pid + 1}, {0: None}, 11.0)
    assert capsys.readouterr().err == ""
