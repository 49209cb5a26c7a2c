"""Tasks of seven features, which two to six ranks cannot divide into equal parts, and a step by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from evener.core.task.task import Task
from evener.data.batch import Batch
from evener.training.engine import Engine
from tests.tasks import _task, classes, draws

FEATURES, SAMPLES = 7, 41


def data() -> TensorDataset:
    return TensorDataset(draws(SAMPLES, FEATURES), classes(SAMPLES, 3))


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 3)
    )


def task(model: Any = deep, **parts: Any) -> Task:
    return _task(**({"model": model, "train": data(), "evaluate": data()} | parts))


def plain() -> Task:
    return task()


def normalised() -> Task:
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), evener.nn.Dropout(0.4), nn.Linear(8, 3)
    )
    return task(layers, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))


def penalised() -> Task:
    """A norm is no sum over the elements: no rank could tell its part from its slice."""
    return task(
        penalty=lambda model: 0.1 * sum((p.norm() for p in model.parameters()), start=torch.zeros(()))
    )


def step_by_hand(engine: Engine, batch: Batch) -> float:
    """Returns the mean loss."""
    micro = batch.micro_batches[0]
    total = nn.functional.cross_entropy(engine.model(micro.inputs), micro.targets, reduction="sum")
    mean = engine.backward(total, micro.size)
    engine.update()
    return mean
