"""What a run remembers beside its weights: evaluations, the best of them, and what observers keep."""

from __future__ import annotations

import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.early_stopping import EarlyStopping

import evener
from evener.checkpoint import evaluation as evaluated
from evener.checkpoint import layout as folder
from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, StepRecord
from evener.errors import ConfigurationError, InterruptedRunError
from evener.training.fit import fit
from evener.training.lifecycle.callback import Callback
from evener.training.run import Trained
from evener.training.step.step import Step
from tests import tasks
from tests.tiers import ALWAYS, NIGHTLY, spread


def alone(task: Any = tasks.plain, **settings: Any) -> Trained:
    usual = {"processes": 1, "device": "cpu", "epochs": 5, "show": False}
    return fit(task, **(usual | settings))


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "records.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


class Dies(Observer):
    """After a step, or in an evaluation."""

    def __init__(self, step: int = -1, evaluation: int = -1) -> None:
        self.at, self.evaluated = step, evaluation

    def step(self, record: StepRecord) -> None:
        if record.step + 1 == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.step == self.evaluated:
            raise RuntimeError("dies")


def worse() -> evener.Task:
    """The loss is least after the first epoch, and the learning rate then spoils everything."""
    return tasks._task(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: 1.0 if epoch < 1 else -3.0
        )
    )


@pytest.mark.parametrize("how", [{"step": 4}, {"evaluation": 4}], ids=str)
def test_an_evaluation_that_an_end_came_before_is_made_up_for(tmp_path: Path, how: dict[str, int]) -> None:
    with pytest.raises((InterruptedRunError, RuntimeError)):
        alone(worse, run_dir=tmp_path, keep_best="loss", observers=[Dies(**how)], save_mode="blocking")
    assert alone(worse, run_dir=tmp_path, keep_best="loss", resume=tmp_path).summary.steps == 20
    assert [line["step"] for line in records(tmp_path, "evaluation")] == [4, 8, 12, 16, 20]
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert best["checkpoint"] == folder.named(tmp_path / "checkpoints" / "best") == "step-00000004"


def test_a_best_whose_run_died_when_it_was_saved_stays_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"run_dir": tmp_path, "keep_best": "loss", "save_every": "3steps"}

    def die(*_: object) -> None:
        raise RuntimeError("dies")

    with monkeypatch.context() as patched:
        patched.setattr(evaluated, "mark_best", die)
        with pytest.raises(RuntimeError, match="dies"):
            alone(worse, **usual)
    place = tmp_path / "checkpoints"
    assert [folder.named(place / name) for name in ("latest", "best")] == ["step-00000004", ""]
    alone(worse, **usual, resume=tmp_path)
    assert folder.named(place / "best") == "step-00000004"
    assert (place / "step-00000004").is_dir(), "it is kept, too"


def test_an_evaluation_is_not_made_twice(tmp_path: Path) -> None:
    heard = Heard()
    alone(run_dir=tmp_path, epochs=2)
    alone(run_dir=tmp_path, epochs=3, resume=tmp_path, observers=[heard])
    assert heard.steps == [12]
    assert [line["step"] for line in records(tmp_path, "evaluation")] == [4, 8, 12]
    ended = alone(run_dir=tmp_path, epochs=3, resume=tmp_path, observers=[heard])
    assert heard.steps == [12], "a finished run that is gone on with has nothing to do"
    assert ended.summary.metrics == records(tmp_path, "evaluation")[-1]["metrics"]
    other = tasks._task(metrics={"accuracy": evener.accuracy, "again": evener.accuracy})
    alone(other, run_dir=tmp_path, epochs=3, resume=tmp_path, observers=[heard])
    assert heard.steps == [12, 12], "another metric is"


class Heard(Observer):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def evaluation(self, record: EvaluationRecord) -> None:
        self.steps.append(record.step)


def test_what_followed_a_checkpoint_is_checked(tmp_path: Path) -> None:
    kept = '{"guard": {"empty": 1}}'
    evaluated.write_evaluation(tmp_path, kept)
    assert evaluated.evaluation_of(tmp_path) == kept
    path = tmp_path / "evaluation.json"
    for content in (path.read_text().replace("1}", "2}"), "{", "[]", '{"crc32": 1, "kept": 2}'):
        path.write_text(content)
        assert evaluated.evaluation_of(tmp_path) is None
    for odd in ("x", "[]", "[" * 100_000, '{"best": 3}', '{"best": {"metric": 3}}', '{"guard": {}}'):
        path.write_text(json.dumps({"crc32": zlib.crc32(odd.encode()), "kept": odd}))
        assert evaluated.evaluation_of(tmp_path) is None, odd[:40]


def test_the_best_by_another_metric_is_looked_for_anew(tmp_path: Path) -> None:
    alone(worse, run_dir=tmp_path, keep_best="loss", epochs=2)
    alone(worse, run_dir=tmp_path, keep_best="accuracy", epochs=3, resume=tmp_path)
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "accuracy"
    assert best["checkpoint"] == "step-00000012", "the first that was compared by it"
    assert "the run kept the lowest loss until now" in str(records(tmp_path, "note"))
    alone(worse, run_dir=tmp_path, epochs=4, resume=tmp_path)
    alone(worse, run_dir=tmp_path, keep_best="accuracy", epochs=5, resume=tmp_path)
    again = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert again["value"] >= best["value"], "also when one that goes on kept none"


def test_a_run_that_begins_anew_has_no_best_of_an_earlier_one(tmp_path: Path) -> None:
    alone(run_dir=tmp_path, keep_best="loss", epochs=9)
    alone(run_dir=tmp_path, keep_best="loss", epochs=1, overwrite=True)
    assert folder.named(tmp_path / "checkpoints" / "best") == "step-00000004"


@pytest.mark.parametrize("end", spread([4, 6, 8], NIGHTLY, ALWAYS, NIGHTLY))
def test_an_early_stop_is_where_it_would_have_been(tmp_path: Path, end: int) -> None:
    def patient() -> EarlyStopping:
        return EarlyStopping(patience=2, least=0.02)

    whole = alone(epochs=30, observers=[patient()]).summary.steps
    assert 12 <= whole < 120
    with pytest.raises(InterruptedRunError):
        alone(epochs=30, run_dir=tmp_path, observers=[patient(), Dies(step=end)])
    rest = alone(epochs=30, run_dir=tmp_path, resume=tmp_path, observers=[patient()])
    assert rest.summary.steps == whole
    again = alone(epochs=30, run_dir=tmp_path, resume=tmp_path, observers=[patient()])
    assert again.summary.steps == whole, "it remembers that it has ended the run"
    first = alone(epochs=30, run_dir=tmp_path / "b", steps=whole - 4, observers=[patient()])
    assert first.summary.steps == whole - 4
    rest = alone(epochs=30, resume=tmp_path / "b", observers=[patient()])
    assert rest.summary.steps == whole, "the patience that is left is that of before"


class Counts(Callback):
    def __init__(self) -> None:
        self.count = 0

    def stepped(self, step: Step) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def end(self) -> int:
        return self.count


def test_a_callback_remembers_too(tmp_path: Path) -> None:
    assert alone(run_dir=tmp_path, steps=6, callback=Counts()).callback_result == 6
    assert alone(run_dir=tmp_path, steps=9, resume=tmp_path, callback=Counts()).callback_result == 9


class Forgets(Observer):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


def test_what_cannot_be_remembered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="state_dict of an observer or callback must hold numbers"):
        alone(run_dir=tmp_path, steps=2, observers=[Forgets()])
