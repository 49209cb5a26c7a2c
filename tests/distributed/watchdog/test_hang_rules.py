"""What must end a run, and what must not, on heartbeats of ranks elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evener.distributed.watchdog.hang_rules import complaint, departure_message, may_look, verdict
from evener.distributed.watchdog.heartbeat import Heartbeat
from evener.distributed.watchdog.peer_state import PeerState

FAR = Heartbeat(rank=1, host="elsewhere", pid=12, count=1, time=0.0, limit=10.0)
LEFT = replace(FAR, ended=True, status=0, progress="step 3 of 16")
WAITS = replace(FAR, rank=0, phase="all-reduce", step=4, waits=True, seconds=4.0)
AT_WORK = replace(FAR, rank=2, phase="training", step=4, seconds=4.0)
STILL = replace(FAR, rank=0, phase="training", step=4, idle=11.0)


def of(here: Heartbeat, *others: Heartbeat, ago: float = 4.0) -> str | None:
    """The verdict, where those who have left did so some seconds ago."""
    standings = [PeerState(beat.rank, beat) for beat in others]
    for standing in standings:
        if standing.state == "ended":
            standing._since -= ago
    return verdict(here, standings)


def test_a_rank_that_has_left_is_told_within_a_few_heartbeats() -> None:
    assert of(WAITS, LEFT) == "left"
    assert of(WAITS, LEFT, replace(WAITS, rank=2)) == "left"
    assert may_look(replace(WAITS, limit=300.0))


@pytest.mark.parametrize(
    ("here", "others"),
    [
        (replace(WAITS, seconds=2.0), (LEFT,)),  # it may have come before it left
        (WAITS, (LEFT, AT_WORK)),  # which may be the one that is waited for
        (WAITS, (LEFT, replace(WAITS, rank=2, seconds=1.0))),
        (replace(WAITS, phase="backward"), (LEFT,)),  # its device may compute
        (replace(WAITS, waits=False), (LEFT,)),
        (WAITS, (replace(WAITS, rank=1),)),
    ],
)
def test_a_rank_that_has_left_ends_no_run_that_has_hope(
    here: Heartbeat, others: tuple[Heartbeat, ...]
) -> None:
    assert of(here, *others) is None


def test_what_a_rank_gave_before_it_left_may_be_on_its_way() -> None:
    assert of(WAITS, LEFT, ago=2.0) is None
    rest = PeerState(2, replace(WAITS, rank=2))
    rest._since -= 2.5
    left = PeerState(1, LEFT)
    left._since -= 4
    assert verdict(WAITS, [left, rest]) is None


def test_who_has_left_is_told_with_its_progress() -> None:
    words = departure_message(WAITS, [PeerState(1, LEFT), PeerState(2, AT_WORK)])
    assert (
        words == "rank 1 has left after step 3 of 16 with status 0; but rank 0 waits in all-reduce of step 4"
    )
    assert departure_message(WAITS, [PeerState(2, AT_WORK)]) == ""


def test_no_progress_on_any_rank_for_the_timeout_ends_the_run() -> None:
    assert of(STILL, replace(STILL, rank=1)) == "still"
    assert of(STILL) == "still"
    assert of(STILL, LEFT) == "still"
    others = [PeerState(1, STILL)]
    assert complaint("still", STILL, others) == "no rank has made any progress for 11 s (timeout 10 s)"
    assert complaint("still", STILL, []).startswith("this rank, the only one, has not made any progress")


@pytest.mark.parametrize(
    ("here", "others"),
    [
        (replace(STILL, idle=9.0), ()),
        (STILL, (replace(STILL, rank=1, idle=6.0),)),
        (STILL, (replace(STILL, rank=1, together="save"),)),  # which has no limit
        (replace(STILL, together="save", idle=0.0), (STILL,)),
        (replace(STILL, phase=None), ()),  # a program of the user's own, which keeps nobody waiting
    ],
)
def test_progress_on_one_rank_is_enough(here: Heartbeat, others: tuple[Heartbeat, ...]) -> None:
    assert of(here, *others) is None


@pytest.mark.parametrize("other", [{"phase": "broadcast"}, {"payload": "float32[4]"}])
def test_ranks_that_call_different_collectives_are_told_apart(other: dict[str, Any]) -> None:
    here = replace(
        WAITS, phase="all_reduce", step=None, payload="float32[3]", seconds=11.0, where=("a.py:3 in f",)
    )
    there = replace(here, rank=1, where=("a.py:7 in f",), **other)
    others = [PeerState(1, there)]
    assert verdict(here, others) == "late"
    words = complaint("late", here, others)
    assert words.startswith(
        "the ranks call different collectives: rank 0 all_reduce of float32[3], at a.py:3 in f; rank 1 "
    )
    assert there.place in words
    same = complaint("late", here, [PeerState(1, replace(here, rank=1))])
    assert same.startswith("rank 0 has waited 11 s in all_reduce of float32[3], at a.py:3 in f")


def test_ranks_that_wait_are_told_where_and_not_only_that_nothing_goes_on() -> None:
    assert of(replace(WAITS, seconds=9.0, idle=10.5), replace(STILL, rank=1)) is None
    assert of(replace(WAITS, seconds=10.5, idle=12.0), replace(STILL, rank=1)) == "late"
