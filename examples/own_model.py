"""A model and data of your own: a function that returns a Task.

python examples/own_model.py
cd examples && evener train own_model:task
cd examples && evener verify own_model:task --processes 2 --shares 3,1
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import evener


class Spirals(Dataset[tuple[Tensor, Tensor]]):
    """Points (2,) on three arms of a spiral, and the number of the arm."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.arms = torch.randint(3, (size,), generator=generator)
        radius = torch.rand(size, generator=generator)
        angle = 4 * radius + 2.1 * self.arms + 0.1 * torch.randn(size, generator=generator)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)

    def __len__(self) -> int:
        return len(self.arms)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.arms[index]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))


def task(learning_rate: float = 0.02) -> evener.Task:
    """Built afresh on every rank; ``--option learning_rate=0.05`` on the command line sets the argument."""
    return evener.Task(
        name="spirals",
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=learning_rate),
        train=Spirals(600, seed=1),
        evaluate=Spirals(200, seed=2),
        metrics={"accuracy": evener.accuracy},
        batch_size=50,
        epochs=10,
    )


if __name__ == "__main__":
    trained = evener.fit(task, processes=2)
    print(f"accuracy {trained.summary.metrics['accuracy']:.3f}")
