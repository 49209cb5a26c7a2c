"""A plan's curve over devices, how many are enough, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evener.balance.time_model import Line
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts, step_time
from evener.tools.plan.result import TrainingPlan, Way, reason


def way(ranks: int, seconds: float, strategy: str = "ddp", **others: object) -> Way:
    costs = StepCosts((Line(seconds, 0.0),) * ranks, ranks, sizes=(64,))
    return Way(Candidate(ranks, strategy), step_time(costs, 64), costs, **others)  # type: ignore[arg-type]


def plan(*ways: Way) -> TrainingPlan:
    ordered = sorted(ways, key=lambda each: (not each.fits, each.time.seconds))
    return TrainingPlan("task", 64, 1000, 2, tuple(ordered))


def test_the_curve_has_the_fastest_way_of_each_number() -> None:
    found = plan(way(1, 0.8, "single"), way(2, 0.4), way(2, 0.5, "sharded"), way(4, 0.25)).curve()
    assert [(each.ranks, each.way.candidate.strategy) for each in found] == [
        (1, "single"),
        (2, "ddp"),
        (4, "ddp"),
    ]
    assert [each.speedup for each in found] == pytest.approx([1.0, 2.0, 3.2])
    assert [each.added for each in found] == pytest.approx([0.0, 1.0, 0.3])


@pytest.mark.parametrize(
    ("seconds", "enough"),
    [
        ((1.0, 0.5, 0.49), 2),  # the 3rd adds 2 %
        ((1.0, 0.5, 0.34), 3),
        ((0.5, 0.7, 0.9), 1),  # one is the fastest
        ((1.0, 1.1, 0.5), 3),  # the 2nd is a loss that the 3rd makes up for
        ((1.0,), 1),
    ],
)
def test_how_many_devices_are_enough(seconds: tuple[float, ...], enough: int) -> None:
    found = plan(*(way(1 + place, took) for place, took in enumerate(seconds))).enough()
    assert found is not None
    assert found.ranks == enough


def test_ways_that_do_not_fit_come_last_and_are_not_chosen() -> None:
    large, small = way(2, 0.1, needed=200, limit=100), way(2, 0.4, "sharded", needed=90, limit=100)
    found = plan(large, small)
    assert found.ways == (small, large)
    assert found.best is small
    assert [each.way for each in found.curve()] == [small]


def test_a_way_fits_if_a_little_stays_free() -> None:
    assert way(1, 0.1).fits
    assert way(1, 0.1, needed=99, limit=101).fits
    assert not way(1, 0.1, needed=100, limit=100).fits


def test_another_algorithm_is_not_chosen() -> None:
    other = way(4, 0.1, "asynchronous", algorithm="late gradients")
    assert plan(other, way(2, 0.4)).best == way(2, 0.4)
    assert plan(other).best is None
    assert plan(other).enough() is None


def test_an_epoch_has_a_smaller_last_batch() -> None:
    found = plan(way(1, 0.5))
    assert found.epoch_seconds(found.ways[0]) == pytest.approx(0.5 * 16)
    assert replace(found, samples=None).epoch_seconds(found.ways[0]) is None


def test_the_json_of_a_plan_can_be_read_back() -> None:
    found = plan(way(1, 0.8, "single"), way(2, 0.4), way(2, 0.2, "tensor", needed=3, limit=2))
    read = json.loads(json.dumps(found.as_json()))
    assert read == found.as_json()
    assert [each["ranks"] for each in read["ways"]] == [2, 1, 2]
    assert [each["fits"] for each in read["ways"]] == [True, True, False]
    assert read["enough"] == 2
    first = read["ways"][0]
    assert sum(first["terms"].values()) == pytest.approx(first["seconds"]["p50"])
    assert list(first["seconds"].values()) == sorted(first["seconds"].values())


def test_the_reason_has_the_part_that_computes_and_the_missing_bytes() -> None:
    costs = StepCosts((Line(0.03, 0.0), Line(0.03, 0.0)), 2, rest=Line(0.01, 0.0), sizes=(64,))
    found = Way(Candidate(2, "ddp"), step_time(costs, 64), costs, needed=3 * 2**20, limit=2**20)
    assert "75%" in reason(found)
    assert "25%" in reason(found)
    assert "2.01 MiB" in reason(found)  # one percent of the limit stays free
    assert not replace(found, needed=2**20).fits
    assert replace(found, needed=2**20).lacking == 2**20 - int(0.99 * 2**20)
