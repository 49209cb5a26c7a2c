"""Trainings with CUDA graphs and without, for tests. On a CPU a tape of operators stands in for a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.components.cuda_graphs.recorder import RECORDERS
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.training.engine import Engine
from tests import tasks
from tests.components.cuda_graphs.tape import TapeRecorder

Weights = dict[str, Tensor]
GRAPHS = {"cuda_graphs": "auto"}


@pytest.fixture(autouse=True)
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", TapeRecorder)


def engine(task: Task, **settings: Any) -> Engine:
    return Engine(task, RunConfig(**({"device": "cpu", "strategy": "single", "epochs": 8} | settings)))


def trained(
    task: Task, after: Callable[[Engine, int], object] = lambda engine, step: None, **settings: Any
) -> tuple[Weights, list[float], Any]:
    """The weights and buffers, the losses, and what is known of the graphs. ``after`` each step something is done."""
    with engine(task, **settings) as made:
        losses = []
        for batch in made.batches():
            losses.append(made.step(batch).loss)
            after(made, made.steps_done)
        weights = {name: value.detach().clone() for name, value in made.model.state_dict().items()}
        return weights, losses, made.learner.replays


def assert_same_training(task: Task, least: int, **settings: Any) -> Any:
    """With graphs and without. At least so many passes are replayed."""
    weights, losses, _ = trained(task, **settings)
    replayed, same_losses, replays = trained(task, **settings, **GRAPHS)
    assert losses == same_losses
    assert weights.keys() == replayed.keys()
    for name, value in weights.items():
        assert torch.equal(value, replayed[name]), name
    assert replays.replayed >= least, replays.words
    return replays


def of_model(model: Callable[[], nn.Module], **parts: Any) -> Task:
    return replace(tasks.plain(), model=model, **parts)


class Odd(nn.Module):
    """A layer that is not used, one that is frozen, two parameters with one gradient, and buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.one, self.other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        found: Tensor = self.out(torch.tanh(self.used(self.frozen(x - self.average))))
        return found + (self.one + self.other)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(48, 3),
    )
