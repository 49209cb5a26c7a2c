from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.distributed.environment import detect
from evener.distributed.failure import Failure
from evener.distributed.launch.launch import launch
from evener.distributed.launch.process_count import Headcount, dead
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.session import RUN_DIR
from evener.errors import RankError
from tests.distributed.processes import call


@pytest.mark.parametrize(
    ("counts", "deaths", "starts"),
    [
        ((4, 3, 2), (1, 1, 1), (4, 3, 2, 2)),
        ((4, 3, 2), (2, 1), (4, 2, 2)),
        ((4, 3, 2), (4,), (4, 2)),
        ((4, 3, 2), (0, 0), (4, 4, 4)),
        ((4, 2), (1, 1), (4, 2, 2)),
        ((6, 4), (1, 1), (6, 4, 4)),
        ((6, 4), (3,), (6, 4)),
        ((3,), (1, 2), (3, 3, 3)),
    ],
)
def test_the_table(counts: tuple[int, ...], deaths: tuple[int, ...], starts: tuple[int, ...]) -> None:
    headcount = Headcount(counts)
    found = [headcount.start]
    for number in deaths:
        found.append(headcount.after(found[-1], number))
    assert tuple(found) == starts


@given(st.sets(st.integers(1, 9), min_size=1), st.data())
def test_there_are_never_more_and_always_an_allowed_number(counts: set[int], data: st.DataObject) -> None:
    headcount = Headcount(tuple(sorted(counts, reverse=True)))
    ranks = data.draw(st.sampled_from(headcount.counts))
    number = data.draw(st.integers(0, ranks))
    after = headcount.after(ranks, number)
    assert after in counts
    assert after <= ranks
    assert after <= ranks - number or after == min(counts)


def test_it_is_said_where_the_number_can_change() -> None:
    assert Headcount((3, 2, 1)).description(2) == ", with 2 ranks"
    assert Headcount((3, 2, 1)).description(1) == ", with 1 rank"
    assert Headcount((3,)).description(3) == ""


def failures(*kinds: str) -> dict[int, Failure]:
    return {rank: Failure(rank, kind, "", time=float(rank)) for rank, kind in enumerate(kinds)}


@pytest.mark.parametrize(
    ("kinds", "roots", "cause", "number"),
    [
        (("ended", "killed", "ended"), {1}, 1, 1),
        (("killed", "killed", "ended"), {0, 1}, 0, 2),
        (("communication", "killed", "ended"), {0, 1}, 1, 1),
        (("communication", "error", "interrupted"), {0}, 1, 1),  # the others were quicker to fail
        (("exit", "error", "error"), {0}, 0, 1),  # what the others raised when they were asked to end
        (("communication", "ended", "ended"), {0}, 0, 0),  # a rank that hangs is no device that is lost
    ],
)
def test_who_has_died(kinds: tuple[str, ...], roots: set[int], cause: int, number: int) -> None:
    found = failures(*kinds)
    assert dead(found, roots, found[cause]) == number


def place_or_death() -> tuple[int, int]:
    here = detect()
    if here.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return here.rank, here.world_size


@pytest.mark.slow
def test_results_are_those_of_the_last_start(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = call(
        launch,
        place_or_death,
        processes=Headcount((3, 2)),
        rendezvous=Rendezvous(max_restarts=1),
        device="cpu",
    )
    assert found == [(0, 2), (1, 2)]
    assert "restart 1 of 1, with 2 ranks" in capfd.readouterr().err


def result_then_exit() -> str:
    here = detect()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return "of the last start" if here.rank else sys.exit(0)
    written = Path(os.environ[RUN_DIR]) / "result-0"
    while here.rank == 1 and not written.exists():
        time.sleep(0.05)
    if here.rank == 1:
        raise ValueError("for a second start")
    return "of the first start"


@pytest.mark.slow
def test_a_result_of_an_earlier_start_is_not_that_of_the_last() -> None:
    with pytest.raises(RankError, match="ended with status 0 before its function returned"):
        call(
            launch,
            result_then_exit,
            processes=Headcount((2, 2)),
            rendezvous=Rendezvous(max_restarts=1),
            device="cpu",
        )
