"""A task whose optimizer's state is kept in 8 bits, as far as it is large enough."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.core.task.task import Task
from tests.tasks import classes, draws


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 10))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def task() -> Task:
    """Of 24 samples; the rows of the two larger matrices are multiples of 64 numbers, and of 256."""
    data = TensorDataset(draws(24, 64), classes(24, 10))
    return Task(
        name="wide",
        model=_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=_adamw,
        train=data,
        batch_size=8,
        epochs=3,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        scheduler_interval="step",
    )


def of_torchao(kind: str) -> Task:
    """The same with an optimizer of torchao's own."""

    def build(parameters: Any) -> torch.optim.Optimizer:
        with warnings.catch_warnings(action="ignore"):
            import torchao.optim

        made: torch.optim.Optimizer = getattr(torchao.optim, kind)(list(parameters), lr=1e-2)
        return made

    return replace(task(), optimizer=build)
