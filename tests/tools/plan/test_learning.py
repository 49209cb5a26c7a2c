"""A calibration learns from runs on a machine that is not busy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evener.balance.time_model import Line
from evener.tools.plan.calibration import Calibration
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.comparison import ComparedStep
from evener.tools.plan.costs import StepCosts, StepTime, step_time
from evener.tools.plan.learning import MOST, load_now, with_run

DDP, SINGLE = Candidate(2, "ddp"), Candidate(1, "single")
COSTS = StepCosts(
    (Line(0.0, 0.01),) * 2, 2, rest=Line(0.1, 0.0), input=Line(0.0, 0.001), spread=0.05, sizes=(20,)
)
OTHER = StepCosts((Line(0.0, 0.01),), 1, spread=0.05, sizes=(20,))
CALIBRATION = Calibration("a task", 20, {DDP: COSTS, SINGLE: OTHER})


def step(calibration: Calibration) -> StepTime:
    return step_time(calibration.costs[DDP], 20)


def run(calibration: Calibration, compute: float, communication: float, waits: float = 0.01) -> ComparedStep:
    terms = {"compute": compute, "waiting": 0.0, "communication": communication, "input": waits}
    return ComparedStep(DDP, step(calibration), sum(terms.values()), terms, 20)


def test_a_run_counts_as_much_as_the_trials_term_by_term() -> None:
    after = with_run(CALIBRATION, run(CALIBRATION, 0.16, 0.1), 20, 0.0)
    assert step(after).compute == pytest.approx((0.1 * 0.16) ** 0.5)
    assert step(after).communication == pytest.approx(0.1)
    assert after.costs[SINGLE] == OTHER
    (noted,) = after.runs
    assert (noted.options, noted.batch_size, noted.counts) == (DDP.words, 20, True)
    assert (noted.predicted, noted.measured) == pytest.approx((0.21, 0.27))


def test_what_each_micro_batch_of_a_pipeline_adds_is_learned_too() -> None:
    calibration = replace(CALIBRATION, costs={DDP: replace(COSTS, pieces=4, piece=0.05)})
    after = with_run(calibration, run(calibration, 0.1, 1.2), 20, 0.0)
    assert step(calibration).communication == pytest.approx(0.3)
    assert step(after).communication == pytest.approx(0.3 * MOST**0.5)


def test_many_runs_lead_to_what_they_take() -> None:
    calibration, measured = CALIBRATION, [0.12, 0.14, 0.13, 0.15]
    for compute in measured:
        calibration = with_run(calibration, run(calibration, compute, 0.1), 20, 0.0)
    mean = (0.1 * 0.12 * 0.14 * 0.13 * 0.15) ** (1 / 5)
    assert step(calibration).compute == pytest.approx(mean)


def test_a_run_on_a_busy_machine_is_noted_and_changes_nothing() -> None:
    after = with_run(CALIBRATION, run(CALIBRATION, 0.3, 0.3), 20, 1000.0)
    assert after.costs == CALIBRATION.costs
    assert [(each.load, each.counts) for each in after.runs] == [(1000.0, False)]


def test_a_run_that_is_far_off_and_a_small_term_change_little() -> None:
    after = with_run(CALIBRATION, run(CALIBRATION, 5.0, 0.1, waits=0.04), 20, 0.0)
    assert step(after).compute == pytest.approx(0.1 * MOST**0.5)
    assert step(after).input == pytest.approx(0.01), "a part of less than 5 % of the step"


def test_what_was_learned_is_saved_and_files_without_it_are_read(tmp_path: Path) -> None:
    after = with_run(CALIBRATION, run(CALIBRATION, 0.16, 0.1), 20, 0.0)
    after.save(tmp_path / "plan.json")
    assert Calibration.read(tmp_path / "plan.json") == after
    values = json.loads((tmp_path / "plan.json").read_text())
    del values["runs"]
    (tmp_path / "old.json").write_text(json.dumps(values))
    assert Calibration.read(tmp_path / "old.json") == replace(after, runs=())


def test_the_load_of_now_is_a_number_of_programs() -> None:
    assert 0 <= load_now() < 10_000
