"""The values that a plan in words shows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from evener.balance.time_model import Line
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts, step_time
from evener.tools.plan.result import TrainingPlan, Way
from evener.tools.plan.text import plan_text, seconds_text


def way(ranks: int, seconds: float, strategy: str = "ddp", **others: object) -> Way:
    costs = StepCosts((Line(seconds, 0.0),) * ranks, ranks, sizes=(64,), rest=Line(seconds / 10, 0.0))
    return Way(Candidate(ranks, strategy), step_time(costs, 64), costs, **others)  # type: ignore[arg-type]


def plan(*ways: Way, **others: object) -> TrainingPlan:
    return TrainingPlan("task", 64, 6400, 3, ways, devices=("cpu",) * 2, **others)  # type: ignore[arg-type]


WAYS = way(2, 0.2), way(2, 0.3, "sharded"), way(1, 0.4, "single")


def test_the_fastest_ways_are_shown_with_times_and_speeds() -> None:
    text = plan_text(plan(*WAYS), top=2)
    rows = [line.split("--strategy ") for line in text.splitlines() if "--strategy" in line]
    assert [row[1] for row in rows] == ["ddp --processes 2", "sharded --processes 2"]
    first = rows[0][0].split()
    assert (first[0], first[1]) == ("220", "ms")
    low, high = (float(each) for each in re.findall(r"([\d.]+) ms", rows[0][0])[1:])
    assert low < 220 < high
    assert first[-1] == str(round(64 / 0.22))


def test_terms_and_shares_are_shown_on_request() -> None:
    one = WAYS[0]
    assert " 20 ms" not in plan_text(plan(one))
    shown = plan_text(plan(one), explain=True)
    assert "200 ms" in shown
    assert " 20 ms" in shown
    assert "32 + 32" in shown


def test_what_does_not_fit_has_its_bytes_and_comes_after_what_does() -> None:
    text = plan_text(plan(WAYS[0], way(2, 0.1, "tensor", needed=3 * 2**30, limit=2**30)))
    assert "2.01 GiB" in text  # one percent of the limit stays free
    assert text.index("ddp --processes 2") < text.index("tensor --processes 2")


def test_the_curve_and_the_costs_of_an_epoch() -> None:
    text = plan_text(plan(*WAYS, price_per_hour=360.0))
    assert "1: 1.00x" in text
    assert "2: 2.00x" in text
    assert "22 s" in text  # 100 steps of 220 ms
    assert "66 s" in text
    assert "6.60" in text  # 66 s at 0.1 a second


def test_a_run_of_some_steps_takes_their_time() -> None:
    found = plan(*WAYS, price_per_hour=360.0, steps=10)
    assert "3 epochs 66 s" in plan_text(replace(found, steps=1000)), "what ends first"
    found = replace(found, epochs=None)
    assert "an epoch takes 22 s, 10 steps 2.2 s, without" in plan_text(found)
    assert "costs 0.22" in plan_text(found)
    assert "\n10 steps 2.2 s, without" in plan_text(replace(found, samples=None)), "a stream has no epoch"


def test_reasons_and_notes_are_shown_once() -> None:
    refused = {"tensor --processes 2": "odd width", "tensor --processes 3": "odd width"}
    text = plan_text(plan(*WAYS, refused=refused, left_out={"layers": "slow"}, notes=("busy",)))
    assert text.count("odd width") == 1
    assert all(word in text for word in ("tensor --processes 2", "tensor --processes 3", "slow", "busy"))


def test_another_algorithm_is_shown_only_where_it_is_faster() -> None:
    slow, fast = (way(2, seconds, "asynchronous", algorithm="late gradients") for seconds in (0.3, 0.1))
    assert "asynchronous" not in plan_text(plan(*WAYS, slow))
    assert "asynchronous" in plan_text(plan(*WAYS, fast))


def test_a_plan_without_a_way_that_fits_can_be_shown() -> None:
    text = plan_text(plan(replace(WAYS[0], needed=2, limit=1)))
    assert "ddp --processes 2" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2e-5, "20 us"),
        (0.01234, "12.3 ms"),
        (5.0, "5 s"),
        (119.0, "119 s"),
        (600.0, "10 min"),
        (9000.0, "2.5 h"),
        (864000.0, "10 days"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
