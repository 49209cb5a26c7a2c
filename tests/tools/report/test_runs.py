"""Reports of real runs of one process: whole, resumed, ended by an error, and with an observer's note."""

from __future__ import annotations

from pathlib import Path

import pytest

import evener
from evener.core.records import StepRecord
from evener.distributed.environment import usable_cores
from evener.tools.report import report_of
from tests import tasks


def train(run_dir: Path, **settings: object) -> None:
    evener.fit(tasks.plain, processes=1, device="cpu", run_dir=run_dir, show=False, **settings)  # type: ignore[arg-type]


def test_a_whole_run(tmp_path: Path) -> None:
    train(tmp_path / "run", epochs=4)
    report = report_of(tmp_path / "run")
    assert (report.identity.state, report.identity.steps, report.identity.samples) == ("finished", 16, 4 * 47)
    assert (report.identity.total_steps, report.identity.epochs, report.identity.batch_size) == (16, 4, 13)
    assert report.identity.command == (
        "evener train tests.tasks:plain --processes 1 --batch-size 13 --epochs 4 --device cpu"
    )
    assert [point.step for point in report.evaluations] == [4, 8, 12, 16]
    assert report.evaluations[-1].metrics.keys() == {"loss", "accuracy"}
    goodput = report.goodput
    assert goodput.startup is not None
    assert goodput.startup < 60
    assert 0 < goodput.compute < goodput.total
    assert goodput.evaluation > 0
    assert goodput.waiting == 0
    (rank,) = report.ranks
    assert rank.forward is not None
    assert rank.backward is not None
    assert rank.forward + rank.backward == pytest.approx(rank.compute, rel=1e-4)
    assert rank.threads in range(1, usable_cores() + 1)
    assert (rank.workers, rank.device) == (0, "cpu")
    assert report.memory[0].peak > 0
    assert len(report.attempts) == 1


def test_a_run_that_goes_on_has_two_starts(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=6)
    train(tmp_path / "run", epochs=3, resume=tmp_path / "run")
    report = report_of(tmp_path / "run")
    assert [(attempt.step, attempt.lost_steps, attempt.reason) for attempt in report.attempts] == [
        (0, 0, ""),
        (6, 0, ""),
    ]
    assert (report.identity.steps, report.identity.state) == (12, "finished")
    assert [event.kind for event in report.events if event.kind != "note"] == ["restart"]


def test_a_run_that_begins_anew_forgets_the_earlier_one(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=6)
    train(tmp_path / "run", steps=2, overwrite=True)
    assert len(report_of(tmp_path / "run").attempts) == 1


class Falls(evener.Observer):
    """Ends a run with an error."""

    def step(self, record: StepRecord) -> None:
        if record.step == 5:
            raise ValueError("what went wrong")


def test_an_error_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="what went wrong"):
        train(tmp_path / "run", observers=[Falls()])
    report = report_of(tmp_path / "run")
    assert report.identity.state == "broken off"
    (cause,) = (cause for cause in report.verdict.causes if cause.kind == "error")
    assert cause.words == f"after {report.identity.steps} steps: what went wrong"
    train(tmp_path / "run", resume=tmp_path / "run")
    resumed = report_of(tmp_path / "run")
    assert resumed.identity.state == "finished"
    (cause,) = (each for each in resumed.verdict.causes if each.kind == "error")
    assert cause.words == f"after {report.identity.steps} steps: what went wrong (the run went on after it)"
