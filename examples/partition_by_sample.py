"""Data that are apart: each rank trains on the samples that it alone holds, as when hosts have different files.

The parts may be of any size. Every batch takes from each what keeps them in step, so that all end with the epoch, and
its gradient is the one of these samples together: a rank with few samples weighs no more than it has.

    python examples/partition_by_sample.py
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import Subset

import evener
from evener.data.datasets.digits import digits


def part(train: bool, rank: int, ranks: int) -> Subset:
    """What lies on this rank's disk: here twice as many digits as on that of the rank before."""
    data = digits(train=train)
    edges = [len(data) * (2**i - 1) // (2**ranks - 1) for i in range(ranks + 1)]
    return Subset(data, range(edges[rank], edges[rank + 1]))


def task() -> evener.Task:
    """Built on every rank, which the launcher tells its number, as torchrun does."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return evener.Task(
        name="digits in parts",
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        train=part(True, rank, ranks),
        evaluate=part(False, rank, ranks),  # in parts as well: each sample counts once
        metrics={"accuracy": evener.accuracy},
        partition="sample",
        batch_size=64,
        epochs=4,
    )


if __name__ == "__main__":
    summary = evener.fit(task, processes=2).summary
    shares = ", ".join(f"{share:.3f}" for share in summary.shares)
    print(f"{summary.samples} samples in {summary.steps} steps, of each batch the ranks held {shares}")
    print(f"accuracy {summary.metrics['accuracy']:.3f}")
