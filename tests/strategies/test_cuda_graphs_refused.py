"""What a CUDA graph cannot repeat is refused by name, and trains as ever."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evener
from evener.components.cuda_graphs.recorder import RECORDERS
from evener.core.task.task import Task
from tests import tasks
from tests.components.cuda_graphs.tape import TapeRecorder
from tests.strategies.graph_runs import (
    GRAPHS,
    assert_same_training,
    convolutions,
    engine,
    of_model,
    taped,
    trained,
)

__all__ = ["taped"]  # a fixture that all tests here use


class Counting(nn.Linear):
    """Scales with the number of its passes."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) / self.passes


class Drawing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 + random.random())


class Writing(nn.Linear):
    """Keeps an average in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.average = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.average.add_(found.detach().mean(0))
        return found - self.average


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.weight.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (of_model(partial(Counting)), "changes passes"),
        (of_model(partial(Drawing, 6, 3)), "random numbers on the host"),
        (of_model(partial(Writing)), "writes in place to average"),
        (of_model(partial(Hooked)), "weight has hooks"),
        (tasks.replaced_buffers(), "changes average"),
        (tasks.branches(), "the host waits"),
        (tasks.dropout(), "draws random numbers by the samples"),
        (tasks.sparse(), "are sparse"),
    ],
    ids=["counter", "random", "write", "hook", "buffer", "branch", "dropout", "sparse"],
)
def test_what_cannot_be_recorded_is_said_and_trains_as_ever(task: Task, words: str) -> None:
    def train(**settings: Any) -> Any:
        random.seed(0)
        return trained(task, **settings)

    (weights, losses, _), (same, same_losses, replays) = train(), train(**GRAPHS)
    assert losses == same_losses
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert replays.replayed == 0
    assert words in replays.reason


class Remembering(torch.optim.SGD):
    """Adds the difference from the gradient before, which it keeps without a copy."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                parameter.data.sub_(0.1 * gradient + 0.05 * (gradient - state.get("before", gradient)))
                state["before"] = gradient


def test_an_optimizer_that_keeps_gradients_keeps_its_own() -> None:
    task = of_model(convolutions, optimizer=Remembering)
    (weights, losses, _), (same, same_losses, replays) = trained(task), trained(task, **GRAPHS)
    assert losses == same_losses
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert "keeps gradients beyond their step" in replays.reason


def test_a_weight_of_the_loss_gets_its_gradient() -> None:
    temperature = nn.Parameter(torch.ones(()))
    loss = evener.SumLoss(
        count=len,
        total=lambda outputs, targets: F.cross_entropy(outputs * temperature, targets, reduction="sum"),
    )

    def train(**settings: Any) -> tuple[float, Any]:
        temperature.grad = None
        replays = trained(replace(tasks.plain(), loss=loss), **settings)[2]
        assert temperature.grad is not None
        return temperature.grad.item(), replays

    (value, _), (same, replays) = train(), train(**GRAPHS)
    assert value == same
    assert "no parameter of the model" in replays.reason


def test_inputs_that_a_pass_overwrites_are_those_of_the_batch() -> None:
    class Centering(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(1).mul_(2))

    assert_same_training(of_model(partial(Centering, 6, 3)), 8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"update_in_backward": True}, "update_in_backward"),
        ({"micro_batch": "auto"}, "micro_batch=auto"),
        ({"exact": "bits"}, "exact=bits"),
        ({"recompute": "blocks"}, "recompute"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_graphs_are_named(settings: dict[str, Any], words: str) -> None:
    block = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())  # noqa: E731
    blocks = of_model(lambda: nn.Sequential(nn.Sequential(block(), block()), nn.Linear(6, 3)))
    with engine(blocks, **settings, **GRAPHS) as made:
        assert words in made.learner.replays.reason  # type: ignore[union-attr]


def test_a_device_without_graphs_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RECORDERS, "cpu")
    with engine(tasks.plain(), **GRAPHS) as made:
        assert made.learner.replays.reason == "a device of type cpu has none"  # type: ignore[union-attr]


def test_without_the_setting_there_are_none() -> None:
    with engine(tasks.plain()) as made:
        assert made.learner.replays is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("not permitted")])
def test_a_recording_that_fails_leaves_the_training_alone(error: Exception) -> None:
    task = of_model(convolutions)
    weights, losses, _ = trained(task)
    with mock.patch.object(TapeRecorder, "record", side_effect=error):
        same, same_losses, replays = trained(task, **GRAPHS)
    assert losses == same_losses
    assert all(torch.equal(value, same[name]) for name, value in weights.items())
    assert replays.reason == f"{type(error).__name__}: {error}"
