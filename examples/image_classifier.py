"""Handwritten digits by a residual network with BatchNorm, on ranks of unequal speed.

The strategy is `ddp`: every rank holds the whole network, which is small, and takes samples by its speed. BatchNorm
normalizes by the samples of all ranks, so that it does not matter how many of them a rank has. Rank 1 is slowed down
here on purpose; its share of each batch becomes smaller.

    python examples/image_classifier.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import evener
from evener.training.builtin_tasks import digits


class Residual(nn.Module):
    """Two convolutions around which the image is carried past."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


def network() -> nn.Module:
    stem = (nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(*stem, Residual(16), nn.MaxPool2d(2), Residual(16), *head)


def task() -> evener.Task:
    shipped = digits.task()
    return evener.Task(
        name="images",
        model=network,
        loss=nn.CrossEntropyLoss(label_smoothing=0.05),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        train=shipped.train,
        evaluate=shipped.evaluate,
        metrics={"accuracy": evener.accuracy},
        batch_size=61,
        epochs=5,
    )


if __name__ == "__main__":
    summary = evener.fit(task, processes=2, strategy="ddp", balance="auto", throttle="1,0.4").summary
    print(f"accuracy {summary.metrics['accuracy']:.3f}, rank 0 took {summary.shares[0]:.2f} of the samples")
