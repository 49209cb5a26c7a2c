"""Models in which something is not finite at a given place, for tests of what is said and done about it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.task.task import Task
from tests.tasks import draws

SAMPLES, BATCH = 40, 8


def broken(x: Tensor, marks: Tensor) -> Tensor:
    """``x``, to the last bit; the gradient of marked samples is NaN, for that of a root is infinite at 0."""
    sound = (marks < 99)[:, None].to(x)
    return x + (torch.sqrt(x * 0 + sound) - sound)


class Brittle(nn.Module):
    """A sample that begins with 100 has a gradient that is not finite from ``inner`` on; one with 200 a loss."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(self.first(x.clamp(max=1))))
        scores: Tensor = self.outer(broken(hidden, x[:, 0]))
        return scores + torch.where(x[:, :1] > 199, math.nan, 0.0)


def data(bad: dict[int, float] | None = None, samples: int = SAMPLES) -> TensorDataset:
    """Samples of which those that are named begin with the given number."""
    inputs = draws(samples, 3).float()
    for sample, value in (bad or {}).items():
        inputs[sample, 0] = value
    return TensorDataset(inputs, torch.arange(samples) % 2)


def brittle(bad: dict[int, float] | None = None, norm: bool = False, **parts: Any) -> Task:
    usual: dict[str, Any] = {
        "model": lambda: Brittle(norm=norm),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "train": data(bad),
        "batch_size": BATCH,
        "epochs": 2,
    }
    return Task(**(usual | parts))
