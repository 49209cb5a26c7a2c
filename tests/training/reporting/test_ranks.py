from __future__ import annotations

import re

from evener.core.records import StepRecord
from evener.training.reporting.ranks import SHOWN, WINDOW, RecentSteps


def record(
    step: int, work: tuple[float, ...], shares: tuple[int, ...] = (), load: tuple[float, ...] = ()
) -> StepRecord:
    slowest = max(work)
    return StepRecord(
        step=step,
        epoch=0,
        loss=1.0,
        samples=64,
        seconds=slowest,
        shares=shares or (64 // len(work),) * len(work),
        lr=0.1,
        compute_seconds=work,
        wait_seconds=tuple(slowest - own for own in work),
        input_seconds=load or (0.0,) * len(work),
    )


def test_the_slowest_rank_and_how_long_the_others_wait() -> None:
    recent = RecentSteps()
    recent.add(record(0, (0.010, 0.040, 0.030), (10, 40, 14)))
    assert recent.slowest() == "rank 1 slowest, others wait 50%"
    assert recent.each() == (
        "rank 1 slowest, others wait 50% | "
        "rank: share work+wait+input ms | 0: 16% 10.0+30.0+0.0 | 1: 62% 40.0+0.0+0.0 | 2: 22% 30.0+10.0+0.0"
    )


def test_ranks_that_hardly_wait_are_not_called_slow() -> None:
    recent = RecentSteps()
    recent.add(record(0, (0.100, 0.098)))
    assert recent.slowest() == "no rank is slow"


def test_a_rank_that_waits_for_its_samples_is_slow() -> None:
    recent = RecentSteps()
    recent.add(record(0, (0.1, 0.1), load=(0.0, 25.0)))
    assert recent.slowest() == "rank 1 slowest (waits for samples), others wait 100%"
    recent.add(record(1, (0.1, 0.1), load=(25.0, 0.0)))
    assert recent.slowest() == "no rank is slow"


def test_old_steps_are_forgotten() -> None:
    recent = RecentSteps()
    recent.add(record(0, (9.0, 0.1)))
    for step in range(WINDOW):
        recent.add(record(step + 1, (0.1, 0.2)))
    assert recent.slowest() == "rank 1 slowest, others wait 50%"


def test_a_rank_alone_is_not_compared() -> None:
    recent = RecentSteps()
    assert not recent.several
    recent.add(record(0, (0.1,)))
    assert not recent.several


def test_of_many_ranks_the_ends_are_shown() -> None:
    recent = RecentSteps()
    recent.add(record(0, tuple(0.01 * (rank + 1) for rank in range(64))))
    entries = recent.each().split(" | ")[2:]
    assert len(entries) == SHOWN
    assert [int(entry.split(":")[0]) for entry in entries] == [0, 1, 2, 3, 60, 61, 62, 63]


def test_ranks_that_share_all_samples() -> None:
    recent = RecentSteps(parts=(0, 0))
    recent.add(record(0, (0.1, 0.2), (64,)))
    assert re.findall(r"(\d): (\d+)%", recent.each()) == [("0", "100"), ("1", "100")]


def test_ranks_that_share_the_samples_of_a_part() -> None:
    recent = RecentSteps(parts=(0, 0, 1, 1))
    recent.add(record(0, (0.1, 0.2, 0.1, 0.1), (48, 16)))
    assert re.findall(r"(\d): (\d+)%", recent.each()) == [("0", "75"), ("1", "75"), ("2", "25"), ("3", "25")]
