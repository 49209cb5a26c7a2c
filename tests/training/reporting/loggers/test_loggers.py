"""What other programs are handed equals the records: TensorBoard, where it is installed, and stand-ins of others."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, RunStart, StepRecord
from evener.errors import ConfigurationError, StorageError
from evener.training.fit import fit
from evener.training.reporting.loggers.csv import CsvFile
from evener.training.reporting.loggers.mlflow import MLflow
from evener.training.reporting.loggers.scalars import needed, of_step
from evener.training.reporting.loggers.tensorboard import TensorBoard
from evener.training.reporting.loggers.trackio import Trackio
from evener.training.reporting.loggers.wandb import WandB
from tests import tasks

START = RunStart("task", {"seed": 3, "shares": [1, 2], "device": None}, 2, 8, total_steps=40, steps_done=0)
SEEN = {
    "train/loss": 0.1 + 0.2,
    "train/lr": 0.5,
    "train/step_seconds": 0.25,
    "share/rank_0": 0.75,
    "share/rank_1": 0.25,
}


def followed(observer: Observer, run: RunStart = START, failed: bool = False) -> None:
    """A step and an evaluation."""
    observer.start(run)
    done = run.steps_done
    observer.step(StepRecord(done, 0, 0.1 + 0.2, samples=8, seconds=0.25, shares=(6, 2), lr=0.5))
    observer.evaluation(EvaluationRecord(done + 1, 0, {"accuracy": 0.5}, samples=9, seconds=0.1))
    observer.end(None)


def rows(path: Path) -> list[tuple[int, str, float]]:
    with path.open(newline="") as file:
        return [(int(steps), name, float(value)) for steps, name, value in list(csv.reader(file))[1:]]


def test_a_table_holds_the_records_to_the_last_bit(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    table = CsvFile(tmp_path / "new/numbers.csv")
    fit(tasks.plain, processes=1, device="cpu", steps=4, observers=[table], show=False, run_dir=run_dir)
    records = [json.loads(line) for line in (run_dir / "records.jsonl").read_text().splitlines()]
    losses = [(r["step"] + 1, r["loss"]) for r in records if r["kind"] == "step"]
    found = rows(tmp_path / "new/numbers.csv")
    assert [(steps, value) for steps, name, value in found if name == "train/loss"] == losses
    assert len(losses) == 4


def test_a_run_that_goes_on_leaves_out_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    for done in (0, 5, 1):
        followed(CsvFile(path), RunStart("task", {}, 2, 8, total_steps=40, steps_done=done))
    assert sorted({steps for steps, _, _ in rows(path)}) == [1, 2]
    assert len(rows(path)) == 2 * (len(SEEN) + 1)


def test_a_table_holds_an_evaluation_once_though_the_run_that_goes_on_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    followed(CsvFile(path))
    found, again = rows(path), CsvFile(path)
    again.start(RunStart("task", {}, 2, 8, total_steps=40, steps_done=1))
    again.evaluation(EvaluationRecord(1, 0, {"accuracy": 0.5}, samples=9, seconds=0.1))
    assert rows(path) == found
    again.evaluation(EvaluationRecord(2, 0, {"accuracy": 0.75}, samples=9, seconds=0.1))
    again.end(None)
    assert rows(path) == [*found, (2, found[-1][1], 0.75)]


def test_a_table_of_a_killed_run_has_all_that_was_told_and_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    killed = CsvFile(path)
    killed.start(RunStart("task", {}, 2, 8, total_steps=40, steps_done=0))
    killed.step(StepRecord(1, 0, 0.25, samples=8, seconds=0.25, shares=(8,), lr=0.5))
    found = rows(path)
    assert [name for _, name, _ in found] == ["train/loss", "train/lr", "train/step_seconds"]
    with path.open("ab") as file:
        file.write(b"2,train/loss,0.1")
    again = CsvFile(path)
    again.start(RunStart("task", {}, 2, 8, total_steps=40, steps_done=5))
    assert rows(path) == found
    for each in (killed, again):
        each.end(None)


def test_a_table_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="numbers cannot be written"):
        followed(CsvFile(tmp_path))


class StandIn(ModuleType):
    """Notes every call, of wandb, trackio and mlflow alike."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> StandIn:
            self.calls.append((name, args[0] if args else None, kwargs))
            return self

        return call


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn(request.param)
    found.__spec__ = __spec__
    monkeypatch.setitem(sys.modules, request.param, found)
    return found


@pytest.mark.parametrize("library", ["wandb"], indirect=True)
def test_weights_and_biases_is_told(library: StandIn) -> None:
    followed(WandB(project="mine", mode="offline"))
    assert library.calls == [
        ("init", None, {"config": START.settings, "project": "mine", "mode": "offline"}),
        ("define_metric", "*", {"step_metric": "steps"}),
        ("log", {"steps": 1, **SEEN}, {}),
        ("log", {"steps": 1, "evaluation/accuracy": 0.5}, {}),
        ("finish", None, {"exit_code": 1}),
    ]


@pytest.mark.parametrize("library", ["trackio"], indirect=True)
def test_trackio_is_told(library: StandIn) -> None:
    followed(Trackio("mine", name="first"))
    assert library.calls == [
        ("init", None, {"config": START.settings, "project": "mine", "name": "first"}),
        ("log", SEEN, {"step": 1}),
        ("log", {"evaluation/accuracy": 0.5}, {"step": 1}),
        ("finish", None, {}),
    ]


@pytest.mark.parametrize("library", ["mlflow"], indirect=True)
def test_mlflow_is_told(library: StandIn) -> None:
    followed(MLflow("sqlite:///runs.db", run_name="mine"))
    assert library.calls == [
        ("set_tracking_uri", "sqlite:///runs.db", {}),
        ("start_run", None, {"run_name": "mine"}),
        ("log_params", {"seed": "3", "shares": "[1, 2]", "device": "null"}, {}),
        ("log_metrics", SEEN, {"step": 1}),
        ("log_metrics", {"evaluation/accuracy": 0.5}, {"step": 1}),
        ("end_run", "FAILED", {}),
    ]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    followed(TensorBoard(tmp_path))
    events = reading.EventAccumulator(str(tmp_path)).Reload()
    for name, value in {**SEEN, "evaluation/accuracy": 0.5}.items():
        assert [(e.step, e.value) for e in events.Scalars(name)] == [(1, pytest.approx(value, rel=1e-6))]


def test_a_library_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"no_such_library, .* pip install no_such_library"):
        needed("no_such_library.part")


def test_shares_are_those_of_the_cost_where_it_is_known() -> None:
    record = StepRecord(0, 0, 0.5, 4, 0.1, (1, 3), 0.1, costs=(30.0, 10.0))
    assert of_step(record)["share/rank_0"] == 0.75
