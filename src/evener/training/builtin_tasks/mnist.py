"""MNIST: handwritten digits of 28x28 pixels, 60,000 to train on and 10,000 to evaluate on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from evener.core.losses import accuracy
from evener.core.task.task import Task
from evener.data.datasets.mnist import mnist


def task(data_dir: str | Path | None = None) -> Task:
    """Returns the task: a small convolutional network with BatchNorm.

    Args:
        data_dir: Directory that holds the four IDX files. If None, they are downloaded once.
    """
    return Task(
        name="mnist",
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        train=mnist(train=True, data_dir=data_dir),
        evaluate=mnist(train=False, data_dir=data_dir),
        metrics={"accuracy": accuracy},
        batch_size=64,
        epochs=1,
    )


def model() -> nn.Module:
    """Returns a model that maps images (N, 1, 28, 28) to scores of the ten classes (N, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
