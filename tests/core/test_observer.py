"""Who is told what of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from evener.core.observer import Observer, Observers
from evener.core.records import EvaluationRecord, StepRecord
from evener.errors import StorageError
from evener.training.fit import fit
from tests import tasks


class Noting(Observer):
    def __init__(self, told: list[str], name: str, fails: bool = False) -> None:
        self._told, self._name, self._fails = told, name, fails

    def start(self, run: Any) -> None:
        if self._fails:
            raise OSError("no room")
        self._told.append(f"{self._name} starts")

    def end(self, summary: Any) -> None:
        self._told.append(f"{self._name} ends")


def test_those_end_that_have_started() -> None:
    told: list[str] = []
    observers = Observers(
        [Noting(told, "first"), Noting(told, "second", fails=True), Noting(told, "third")], 0
    )
    with pytest.raises(OSError, match="no room"):
        observers.start(None)  # type: ignore[arg-type]
    observers.end(None)
    assert told == ["first starts", "first ends"]


def step(number: int) -> StepRecord:
    return StepRecord(number, 0, 0.5, samples=8, seconds=0.1, shares=(8,), lr=0.1)


class Failing(Observer):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def step(self, record: StepRecord) -> None:
        raise self._error

    def end(self, summary: Any) -> None:
        raise self._error


def test_an_error_says_which_observer_raised_it_and_when() -> None:
    observers = Observers([Failing(ValueError("wrong"))], 0)
    with pytest.raises(ValueError, match="wrong") as raised:
        observers.step(step(7))
    assert raised.value.__notes__ == ["raised by the observer Failing, told of step 7"]
    with pytest.raises(StorageError) as full:
        Observers([Failing(StorageError("full"))], 0).step(step(7))
    assert not hasattr(full.value, "__notes__")


def test_all_end_whatever_one_of_them_raises() -> None:
    told: list[str] = []
    observers = Observers([Failing(ValueError("wrong")), Noting(told, "second")], 0)
    observers.start(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wrong"):
        observers.end(None)
    assert told == ["second starts", "second ends"]


class Until(Observer):
    """Wants an end when it hears of a step or an evaluation, on one of the ranks."""

    everywhere = True

    def __init__(self, rank: int, at_step: int | None) -> None:
        self._wishes, self._at_step, self.told = rank, at_step, list[int]()

    def start(self, run: Any) -> None:
        self._here = int(os.environ["RANK"]) == self._wishes

    def step(self, record: StepRecord) -> None:
        self.told.append(record.step)
        if self._here and record.step == self._at_step:
            self.ends_because = "it is enough"

    def evaluation(self, record: EvaluationRecord) -> None:
        if self._here and self._at_step is None:
            self.ends_because = "it is good"

    def end(self, summary: Any) -> None:
        print(self.told)


def ended(rank: int, at_step: int | None, run_dir: Path | None) -> tuple[int, bool]:
    run = fit(
        tasks.plain, device="cpu", epochs=3, observers=[Until(rank, at_step)], show=False, run_dir=run_dir
    ).summary
    return run.steps, run.interrupted


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_after_the_same_step(ranks: Any, rank: int, tmp_path: Path) -> None:
    found = ranks(2).run(ended, rank, 1, None)
    assert found == [(4, False)] * 2
    assert ranks(2).run(ended, rank, 1, tmp_path / "run") == found
    assert "Until: it is enough" in (tmp_path / "run/records.jsonl").read_text() or rank


def test_after_an_evaluation_no_further_step_is_taken(ranks: Any) -> None:
    found = ranks(2).run(ended, 0, None, None)
    assert found == ranks(2).run(ended, 1, None, None)
    assert found[0] == found[1]
    assert 0 < found[0][0] < 20
