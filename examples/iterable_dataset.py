"""Data that comes as a stream: no length, no positions, yet each sample counts once.

A dataset with a method ``shard(index, count)`` is asked for its part, so that a rank reads only what is its own. One
without it is read by every rank, each keeping every ``world_size``-th sample.

    python examples/iterable_dataset.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import evener

Sample = tuple[Tensor, Tensor]


class Log(IterableDataset[Sample]):
    """Lines of a log, say; here they are computed."""

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def __iter__(self) -> Iterator[Sample]:
        return self.shard(0, 1)

    def shard(self, index: int, count: int) -> Iterator[Sample]:
        """Every ``count``-th line, from line ``index`` on."""
        for line in range(index, self.lines, count):
            x = torch.randn(4, generator=torch.Generator().manual_seed(line))
            yield x, x.sum(0, keepdim=True)


def task() -> evener.Task:
    return evener.Task(
        name="log",
        model=lambda: nn.Linear(4, 1),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=Log(301),
        batch_size=20,
        epochs=2,
    )


if __name__ == "__main__":
    summary = evener.fit(task, processes=1).summary
    print(f"{summary.samples} samples in {summary.steps} steps, last loss {summary.final_loss:.2e}")
