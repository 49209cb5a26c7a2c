"""Task with real handwritten digits, which come with the package. Trains in a few seconds."""

from __future__ import annotations

import torch
from torch import nn

from evener.core.losses import accuracy
from evener.core.task.task import Task
from evener.data.datasets.digits import digits


def task() -> Task:
    """Returns the task: a small convolutional network on 1,437 images of 8x8 pixels, evaluated on 360 others."""
    return Task(
        name="digits",
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=1e-2),
        train=digits(train=True),
        evaluate=digits(train=False),
        metrics={"accuracy": accuracy},
        batch_size=64,
        epochs=20,
    )


def model() -> nn.Module:
    """Returns a model that maps images (N, 1, 8, 8) to scores of the ten classes (N, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
