from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from evener.distributed.session import Session
from evener.distributed.watchdog import stall
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.peer_state import PeerState
from evener.distributed.watchdog.stall import (
    FIRST_SECONDS,
    Reminder,
    Stall,
    is_stalled,
    live_line,
    stall_message,
)
from tests.ranks import RankPool

FAR = Heartbeat(rank=0, host="elsewhere", pid=12, count=1, time=0.0, still=20.0)
WAITS = replace(FAR, phase="all-reduce", step=4, waits=True, seconds=12.0)
LATE = replace(FAR, rank=1, where=("loop.py:3 in export", "loop.py:9 in main"))


@pytest.fixture(autouse=True)
def ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FIRST_SECONDS)


def words(here: Heartbeat, *others: Heartbeat) -> str:
    return stall_message(here, [PeerState(beat.rank, beat) for beat in others])


def test_who_waits_for_whom_and_where() -> None:
    waits = "rank 0 waits in all-reduce of step 4"
    assert (
        words(WAITS, LATE)
        == f"no progress for 12 s: {waits} for rank 1 (in its program, at loop.py:3 in export)"
    )
    assert words(WAITS, replace(LATE, ended=True, status=0)).endswith(
        f"{waits} for rank 1 (left with status 0)"
    )
    assert stall_message(WAITS, [PeerState(1)]).endswith(f"{waits} for rank 1 (no sign of life yet)")


@pytest.mark.parametrize(("limit", "said"), [(1.0, "no sign of life for 2 s"), (10.0, "in its program")])
def test_silence_is_measured_in_heartbeats(limit: float, said: str) -> None:
    silent = PeerState(1, replace(LATE, limit=limit))
    silent._since -= 1.5
    assert f" for rank 1 ({said}" in stall_message(WAITS, [silent])
    assert ("rank 1 no sign of life" in live_line(WAITS, [silent])) == (limit == 1.0)
    waits = PeerState(1, replace(WAITS, rank=1, limit=limit))
    waits._since -= 1.5
    assert ("ranks 0, 1 wait" in stall_message(WAITS, [waits])) == (limit == 10.0)


def test_a_rank_that_computes_is_said_to_compute() -> None:
    at_work = replace(LATE, still=0.0, phase="training", step=4)
    assert words(WAITS, at_work).startswith("still computing after 12 s: rank 0 waits")
    assert words(WAITS, at_work).endswith(
        " for rank 1 (computing in training of step 4, at loop.py:3 in export)"
    )
    alone = replace(at_work, rank=0, idle=11.0)
    assert (
        words(alone)
        == "still computing after 11 s: rank 0 (computing in training of step 4, at loop.py:3 in export)"
    )


def test_a_call_in_which_a_device_may_compute_is_no_wait() -> None:
    backward = replace(WAITS, phase="backward", step=None)
    assert words(backward, replace(WAITS, rank=1)).endswith(
        "waits in all-reduce of step 4 for rank 0 (in backward)"
    )


def test_ranks_in_one_place_are_told_together_and_many_are_counted() -> None:
    others = [replace(WAITS, rank=rank) for rank in range(1, 64)]
    assert words(WAITS, *others) == (
        "no progress for 12 s: ranks 0, 1, 2, 3, 4, 5 and 58 others wait in all-reduce of step 4"
    )


def test_a_rank_is_stalled_after_ten_seconds_in_a_wait_or_a_phase_and_never_in_its_own_program() -> None:
    assert is_stalled(WAITS)
    assert not is_stalled(replace(WAITS, seconds=9.0))
    assert is_stalled(replace(FAR, phase="training", idle=10.0))
    assert not is_stalled(replace(FAR, phase=None, idle=1000.0))


def test_standard_error_hears_of_it_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(stall.time, "monotonic", lambda: now[0])
    reminder = Reminder()
    for second in range(0, 131):
        now[0] = 100.0 + second
        reminder.say(second, lambda: "who waits")
    assert capsys.readouterr().err == 3 * "evener: who waits\n"


def test_a_live_line_shows_it_until_something_moves(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    told = Stall()
    told.show = shown.append
    for beat in (WAITS, WAITS, replace(WAITS, seconds=0.0), replace(WAITS, seconds=1.0)):
        told.tell(beat, [PeerState(1, LATE)], speaks=False)
    line = "no progress for 12 s: rank 1 at loop.py:3 in export, its program; rank 0 waits in all-reduce of step 4"
    assert shown == [line, line, ""]
    assert capsys.readouterr().err == ""


def test_a_line_of_80_columns_says_where_the_late_rank_is() -> None:
    late = replace(
        LATE, still=0.0, phase="loading a batch", step=5, where=("my_own_task.py:133 in __getitem__",)
    )
    assert live_line(WAITS, [PeerState(1, late)])[:80].startswith(
        "still computing after 12 s: rank 1 at my_own_task.py:133 in __getitem__, "
    )
    assert live_line(WAITS, [PeerState(1, replace(LATE, ended=True, status=0))]).startswith(
        "no progress for 12 s: rank 1 left with status 0; rank 0 waits in"
    )
    assert live_line(WAITS, [PeerState(1)]).startswith("no progress for 12 s: rank 1 no sign of life yet; ")


def test_what_is_said_aloud_replaces_a_live_line_which_is_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(stall.sys, "stderr", screen)
    told = Stall()
    told.show = lambda line: print(line, end="", file=screen)
    told.tell(WAITS, [PeerState(1, LATE)], speaks=True)
    live = live_line(WAITS, [PeerState(1, LATE)])
    assert screen.getvalue() == f"\r\x1b[Jevener: {words(WAITS, LATE)}\n{live}"


def late_rank() -> str:
    """Rank 1 comes late to a barrier; what rank 0 shows and says."""
    os.environ[FIRST_SECONDS] = "0.2"
    said: list[str] = []
    print_to_stderr, Reminder.say = Reminder.say, lambda self, seconds, told, over=False: said.append(told())  # type: ignore[assignment,method-assign]
    try:
        with Session(device="cpu", timeout_seconds=60) as session:
            session.control.barrier()
            if session.rank == 1:
                session.watchdog._stop.wait(4.5)
            session.control.barrier()
    finally:
        os.environ[FIRST_SECONDS] = "inf"
        Reminder.say = print_to_stderr  # type: ignore[method-assign]
    return "\n".join(said)


def test_the_rank_that_waits_names_the_one_that_does_not_come(ranks: Callable[[int], RankPool]) -> None:
    said = ranks(2).run(late_rank)[0]
    assert "rank 0 waits in barrier" in said
    assert re.search(r" for rank 1 \((computing )?in its program, at test_stall.py:\d+ in late_rank\)", said)
