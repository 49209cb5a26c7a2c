"""A lean run trains the same, and watches neither gradients nor memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.errors import ConfigurationError, DivergenceError
from evener.training.engine import Engine
from tests import tasks
from tests.engines import Weights, assert_same
from tests.observers import Remembering

STRATEGIES = [
    {"strategy": "ddp"},
    {"strategy": "ddp", "allreduce": "ring", "clip_norm": 0.1},
    {"strategy": "sharded", "strategy_option": ("zero=2",)},
    {"strategy": "sharded", "strategy_option": ("zero=3",)},
    {"strategy": "pipeline", "micro_batch": 4},
]


def trained(name: str, **settings: Any) -> tuple[Weights, list[Any]]:
    seen = Remembering()
    config = RunConfig(dtype="float64", device="cpu", epochs=1, **settings)
    with Engine(getattr(tasks, name)(), config, observers=[seen]) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return {name: value.clone() for name, value in engine.state_dict()["model"].items()}, seen.steps


class Breaks(torch.autograd.Function):
    """A gradient that is not finite in the third step, behind a loss that is."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Breaks.calls += 1
        return gradient * (float("nan") if Breaks.calls == 3 else 1.0)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = Breaks.apply(self.inner(x))
        scores: Tensor = self.outer(hidden)
        return scores


def broken(lean: bool) -> str:
    Breaks.calls = 0
    data = TensorDataset(torch.rand(40, 3), torch.zeros(40, dtype=torch.long))
    task = Task(
        model=Breaking,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        train=data,
        batch_size=8,
    )
    with Engine(task, device="cpu", lean=lean) as engine:
        try:
            for batch in engine.batches():
                engine.step(batch)
        except DivergenceError as error:
            return str(error)
    return "nothing was said"


def test_what_is_not_finite_is_found_by_the_loss_of_the_next_step() -> None:
    assert "a gradient is not finite in step 2" in broken(lean=False)
    assert "the loss is nan in step 3 on rank 0" in broken(lean=True)


@pytest.mark.parametrize("settings", STRATEGIES)
def test_a_lean_run_trains_the_same(ranks: Any, settings: dict[str, Any]) -> None:
    usual = ranks(2).run(trained, "plain", **settings)[0]
    weights, steps = ranks(2).run(trained, "plain", lean=True, **settings)[0]
    assert_same(weights, usual[0], 0.0)
    assert [step.loss for step in steps] == [step.loss for step in usual[1]]
    assert all(step.memory_peak and step.memory_held for step in usual[1])
    assert not any(step.memory_peak or step.memory_held or step.memory_parts for step in steps)
    assert all(any(step.compute_seconds) for step in steps), "times are known all the same"


@pytest.mark.parametrize(
    "settings", [{"non_finite": "skip"}, {"non_finite": "restore"}, {"precision": "fp16"}, {"exact": "bits"}]
)
def test_a_lean_run_decides_nothing_by_gradients(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ConfigurationError, match=f"lean looks at no gradient, and {name}={value} decides"):
        RunConfig(lean=True, **settings)
    RunConfig(lean=True)
