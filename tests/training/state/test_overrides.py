"""A run that goes on says where its task differs from that of the checkpoint, and uses what is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener.errors import ConfigurationError
from evener.training.engine import Engine
from evener.training.fit import fit
from tests import tasks

SCHEDULERS = torch.optim.lr_scheduler


def task(lr: float = 0.1, momentum: float = 0.9, scheduler: Any = None, **parts: Any) -> Any:
    return tasks._task(
        optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum), scheduler=scheduler, **parts
    )


def rates(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "records.jsonl").read_text().splitlines())
    return [line["lr"] for line in lines if line["kind"] == "step"]


def notes(run_dir: Path) -> str:
    lines = map(json.loads, (run_dir / "records.jsonl").read_text().splitlines())
    return "\n".join(line["words"] for line in lines if line["kind"] == "note")


def going_on(run_dir: Path, first: Any, then: Any, **settings: Any) -> tuple[str, list[float]]:
    """What was said of a run that went on from step 4 of 8, and the rates of its steps."""
    how: dict[str, Any] = {"processes": 1, "device": "cpu", "show": False}
    fit(first, run_dir=run_dir, steps=4, **how)
    fit(then, run_dir=run_dir, steps=8, resume=run_dir, **how, **settings)
    said = notes(run_dir)
    fit(then, run_dir=run_dir, steps=9, resume=run_dir, **how, **settings)
    again = notes(run_dir).replace(said, "", 1)
    assert ("is the task's" in again) is False, "what was overridden once is the run's own"
    return said, rates(run_dir)


def test_other_rates_and_momenta_are_told_and_not_used(tmp_path: Path) -> None:
    said, found = going_on(tmp_path, task(), task(lr=0.01, momentum=0.5))
    assert "lr of the optimizer is the checkpoint's, 0.1, and not the task's, 0.01: --override lr" in said
    assert "momentum of the optimizer is the checkpoint's, 0.9, and not the task's, 0.5" in said
    assert found == [0.1] * 9
    assert notes(tmp_path).count("--override lr takes the task's") == 2, "in every run that goes on so"


def test_what_is_overridden_is_used(tmp_path: Path) -> None:
    said, found = going_on(tmp_path, task(), task(lr=0.01, momentum=0.5), override=("lr",))
    assert "lr of the optimizer is the task's, 0.01, and was 0.1 until now" in said
    assert "momentum of the optimizer is the checkpoint's, 0.9" in said
    assert found == [0.1] * 4 + [0.01] * 5
    with Engine(task(lr=0.01, momentum=0.5), device="cpu", override=("momentum",)) as engine:
        with pytest.warns(UserWarning, match="momentum of the optimizer is the task's"):
            engine.load(tmp_path)
        (group,) = engine.learner.optimizer.param_groups
        assert (group["lr"], group["momentum"]) == (0.01, 0.5)


def halving(factor: float) -> Any:
    return lambda optimizer: SCHEDULERS.ExponentialLR(optimizer, factor)


def cycle(most: float) -> Any:
    return lambda optimizer: SCHEDULERS.OneCycleLR(optimizer, most, total_steps=20)


def lambdas(begin: float) -> Any:
    return lambda optimizer: SCHEDULERS.LambdaLR(optimizer, lambda n: begin * 0.9**n)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"scheduler": halving(0.5)}, {"scheduler": halving(0.5), "lr": 0.2}),
        ({"scheduler": halving(0.5)}, {"scheduler": halving(0.9)}),
        ({"scheduler": cycle(0.5)}, {"scheduler": cycle(0.7)}),
        ({"scheduler": lambdas(1.0)}, {"scheduler": lambdas(0.5)}),
        ({"scheduler": halving(0.5)}, {"scheduler": None}),
        ({"scheduler": None}, {"scheduler": halving(0.5)}),
        ({"scheduler": halving(0.5)}, {"scheduler": cycle(0.7)}),
    ],
    ids=["lr", "factor", "cycle", "lambda", "none-now", "none-then", "another"],
)
def test_a_rate_and_its_scheduler_are_as_if_they_had_been_from_the_beginning(
    tmp_path: Path, first: Any, then: Any
) -> None:
    fit(
        task(**then, scheduler_interval="step"),
        run_dir=tmp_path / "whole",
        steps=9,
        processes=1,
        device="cpu",
        show=False,
    )
    before = task(**first, scheduler_interval="step")
    said, found = going_on(
        tmp_path / "run", before, task(**then, scheduler_interval="step"), override=("scheduler",)
    )
    assert "is the task's" in said
    assert found[4:] == pytest.approx(rates(tmp_path / "whole")[4:], rel=1e-12)


def test_a_scheduler_of_another_kind_needs_a_choice(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"with the scheduler ExponentialLR, and the task has None.*--override scheduler",
    ):
        going_on(tmp_path, task(scheduler=halving(0.5)), task())
    said, _ = going_on(tmp_path / "b", task(scheduler=halving(0.5)), task(scheduler=halving(0.7)))
    assert (
        "the scheduler.gamma is the checkpoint's, 0.5, and not the task's, 0.7: --override scheduler" in said
    )


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def test_another_loss_and_frozen_layers_are_told_and_used(tmp_path: Path) -> None:
    said, _ = going_on(tmp_path, task(), task(model=frozen, loss=nn.CrossEntropyLoss(label_smoothing=0.1)))
    assert (
        "Task.loss.label_smoothing is 0.1, and was 0.0 when the checkpoint was made: the task's is used"
        in said
    )
    assert "0.weight, 0.bias are not trained any more: the task's choice is used" in said


def with_dropout(rate: float) -> Any:
    return lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(rate))


def test_another_layer_without_weights_is_told(tmp_path: Path) -> None:
    said, _ = going_on(tmp_path, task(model=with_dropout(0.1)), task(model=with_dropout(0.2)))
    told = (
        "module 1 is Dropout(p=0.2, inplace=False), and was Dropout(p=0.1, inplace=False) when the checkpoint"
    )
    assert told in said


def test_the_same_task_says_nothing_and_a_state_in_memory_is_compared_too(tmp_path: Path) -> None:
    said, _ = going_on(tmp_path, task(scheduler=halving(0.5)), task(scheduler=halving(0.5)))
    assert "task's" not in said
    with Engine(task(), device="cpu", steps=1) as engine:
        state = engine.state_dict()
    with Engine(task(lr=0.3), device="cpu", override="lr") as engine:  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match=r"lr of the optimizer is the task's, 0\.3"):
            engine.load_state_dict(state)
        assert engine.learner.optimizer.param_groups[0]["lr"] == 0.3
    with pytest.raises(
        ConfigurationError, match=r"override names rate; the task's optimizer and scheduler have .*lr"
    ):
        Engine(task(), device="cpu", override=("rate",))
