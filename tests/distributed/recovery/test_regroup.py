"""What ranks decide when one of them knows of a reason to change their number."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from evener.distributed.recovery.regroup import (
    BOUNDS,
    NOTICES,
    Bounds,
    GroupChange,
    Request,
    Stay,
    Stop,
    decision,
    is_noted,
    newcomers,
    note_change,
    noted_change,
    tell_newcomers,
)

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
ONE_TO_THREE = Bounds((3, 2, 1))
TWO_MACHINES = Bounds(least_machines=2)


def ranks(*signals: int, **first: Any) -> list[Request]:
    """Ranks of one machine with the signals that they got; the first one has further requests."""
    return [
        Request("a", signal=number, **(first if rank == 0 else {})) for rank, number in enumerate(signals)
    ]


def machines(*signals: int, keeps: int = 0, **first: Any) -> list[Request]:
    """Two ranks on each machine, of which the second one gets the signal."""
    return [
        Request(
            f"host{machine}",
            machine,
            number if rank else 0,
            keeps_store=machine == keeps,
            **(first if machine == rank == 0 else {}),
        )
        for machine, number in enumerate(signals)
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("requests", "leave", "left"),
    [
        (ranks(0, USR1, 0), (1,), 2),
        (ranks(TERM, 0, 0), (0,), 2),
        (ranks(TERM, 0, USR1), (0, 2), 1),
        (ranks(0, 0, TERM, ranks=1), (2,), 2),
    ],
)
def test_a_rank_with_a_notice_leaves(requests: list[Request], leave: tuple[int, ...], left: int) -> None:
    change = decision(requests, ONE_TO_THREE)
    assert isinstance(change, GroupChange)
    assert (change.leave, change.ranks) == (leave, left)
    assert change.signal in NOTICES
    assert f"rank {', '.join(map(str, leave))} leaves, on SIG" in change.words


@pytest.mark.parametrize(
    ("signals", "number"), [((TERM, TERM, TERM), TERM), ((0, INT, 0), INT), ((TERM, INT, 0), INT)]
)
def test_a_signal_to_all_or_of_another_kind_stops_the_run(signals: tuple[int, ...], number: int) -> None:
    assert decision(ranks(*signals), ONE_TO_THREE) == Stop(number)


def test_so_does_a_notice_to_all_machines() -> None:
    stop = decision(machines(TERM, TERM), Bounds(least_machines=1))
    assert isinstance(stop, Stop)


def test_what_would_be_left_must_suffice() -> None:
    assert decision(ranks(0, TERM, USR1), Bounds((3, 2))) == Stop(TERM, "1 rank would be left")
    found = decision(ranks(0, 0, 0, TERM), Bounds((4, 2)))
    assert isinstance(found, GroupChange)
    assert found.ranks == 2, "three cannot hold a model in two parts"
    assert decision(machines(0, USR1), TWO_MACHINES) == Stop(USR1, "1 of 2 machines would be left")


def test_a_machine_leaves_as_a_whole() -> None:
    change = decision(machines(0, 0, TERM), TWO_MACHINES)
    words = "host2 leaves with rank 4, 5, on SIGTERM"
    assert change == GroupChange((4, 5), 0, TERM, words)
    both = decision(machines(0, 0, TERM, newcomers=("d",)), TWO_MACHINES)
    assert both == GroupChange((4, 5), 0, TERM, f"{words}; d comes")


def test_the_machine_with_the_store_cannot_leave_alone() -> None:
    stop = decision(machines(0, 0, TERM, keeps=2), TWO_MACHINES)
    assert stop == Stop(TERM, "host2 keeps the store through which the machines meet")


def test_machines_that_wait_are_taken_in() -> None:
    change = decision(machines(0, 0, newcomers=("c", "d")), TWO_MACHINES)
    assert change == GroupChange(words="c, d come")
    assert decision(machines(0, 0), TWO_MACHINES) == Stay()


@pytest.mark.parametrize(
    ("have", "wanted", "found"),
    [
        (1, 3, GroupChange((), 3, words="3 instead of 1 ranks, as asked")),
        (3, 1, GroupChange((1, 2), 1, words="1 instead of 3 ranks, as asked")),
        (2, 2, Stay("the run has 2 ranks already")),
        (2, 4, Stay("the run cannot be divided over 4 ranks, but over 3, 2, 1")),
    ],
)
def test_as_many_ranks_as_a_user_asks_for(have: int, wanted: int, found: GroupChange | Stay) -> None:
    assert decision(ranks(*[0] * have, ranks=wanted), ONE_TO_THREE) == found


def test_bounds_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BOUNDS, raising=False)
    assert Bounds.from_environment() is None
    monkeypatch.setenv(BOUNDS, "")
    assert Bounds.from_environment() is None
    for bounds in (ONE_TO_THREE, Bounds(least_machines=2, keeps_store=True)):
        monkeypatch.setenv(BOUNDS, bounds.to_json())
        assert Bounds.from_environment() == bounds


def test_a_change_counts_when_all_ranks_of_the_machine_have_ended_for_it(tmp_path: Path) -> None:
    change = GroupChange((1,), 2, TERM, "rank 1 leaves")
    note_change(tmp_path, 4, 0, change)
    assert is_noted(tmp_path, 4)
    assert noted_change(tmp_path, 4, 2) is None
    note_change(tmp_path, 4, 1, change)
    assert noted_change(tmp_path, 4, 2) == change
    assert noted_change(tmp_path, 5, 2) is None, "of another start"
    assert not is_noted(tmp_path, 5)


def test_newcomers_are_told_of_until_they_are_in(tmp_path: Path) -> None:
    assert newcomers(tmp_path) == ()
    tell_newcomers(tmp_path, ["d", "c"])
    assert newcomers(tmp_path) == ("c", "d")
    tell_newcomers(tmp_path, [])
    assert newcomers(tmp_path) == ()
