"""A model of few weights and many activations, trained where memory is short."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from evener.strategies.single import Single
from evener.strategies.steppers.plain import Plain
from evener.training.engine import Engine
from tests.comparing import worst
from tests.tasks import classes, draws

WIDTH, LAYERS, SAMPLES, BATCH = 512, 10, 96, 24


class Wide(nn.Module):
    """Of small weights, and many activations: ``LAYERS`` numbers of 8 bytes a sample for each of ``WIDTH``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, WIDTH), evener.nn.Dropout(0.2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.up(x))
        for _ in range(LAYERS):
            x = torch.tanh(x)
        outputs: Tensor = self.down(x)
        return outputs


def task(model: Any = Wide, **parts: Any) -> evener.Task:
    data = TensorDataset(draws(SAMPLES, 4), classes(SAMPLES, 3))
    usual: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "batch_size": BATCH,
        "epochs": 4,
    }
    return evener.Task(model=model, train=data, evaluate=data, **(usual | parts))


def room_for(samples: int) -> int:
    """Weights, gradients, the optimizer's state and what an update makes in passing, and so many samples."""
    return 8 * sum(8 * p.numel() for p in Wide().parameters()) + samples * (LAYERS + 4) * WIDTH * 8


ROOMY, TIGHT = room_for(2 * BATCH), room_for(4)


class Whole(Single):
    """One device that takes each batch as it is."""

    def stepper(self, learner: Any) -> Any:
        return Plain(learner)


def trained(**settings: Any) -> dict[str, Any]:
    told: list[str] = []

    class Told(evener.Observer):
        def event(self, record: Any) -> None:
            told.append(record.words)

    settings = {"dtype": "float64", "device": "cpu", "steps": 12} | settings
    with Engine(task(), observers=[Told()], **settings) as engine:
        steps = [engine.step(batch) for batch in engine.batches()]
        return {
            "losses": [step.loss for step in steps],
            "weights": {name: value.clone() for name, value in engine.learner.tensors().items()},
            "pieces": [step.pieces for step in steps],
            "retries": [step.retries for step in steps],
            "told": told,
        }


@cache
def unlimited() -> dict[str, Any]:
    """What it comes to on one device that has room."""
    return trained()


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-12)
    assert worst(one["weights"], other["weights"]) <= 1e-12
