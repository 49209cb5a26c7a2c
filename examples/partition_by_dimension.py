"""Features too many for one device: each rank reads its columns of every sample, and holds their slice of the weights.

The model is a wide and a deep part that read the same features. On one device it is an ordinary model; with
``strategy="dimension"`` its FeatureParallelLinear layers are divided over the ranks, and trained to the same weights.

    python examples/partition_by_dimension.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import evener

WIDTH, SAMPLES = 2000, 600


class Clicks(Dataset[Any]):
    """Which of many pages a user has seen, and whether he bought.

    ``columns`` makes the data set of some columns alone. Here they are drawn, one by one; yours may lie in a memory map
    or in a file for each column. Without this method, whole samples are read and cut.
    """

    def __init__(self, start: int = 0, stop: int = WIDTH) -> None:
        self.start, self.stop = start, stop
        self.pages: Tensor | None = None
        self.bought = (sum(column(index) for index in range(8)) > 1.5).long()

    def columns(self, start: int, stop: int) -> Clicks:
        return Clicks(start, stop)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.pages is None:  # of all columns on one device, else of this rank's alone
            self.pages = torch.stack([column(index) for index in range(self.start, self.stop)], dim=1)
        return self.pages[index], self.bought[index]


def column(index: int) -> Tensor:
    """Who has seen page ``index``: 0 or 1 for each user."""
    return (torch.rand(SAMPLES, generator=torch.Generator().manual_seed(index)) < 0.2).float()


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = evener.nn.FeatureParallelLinear(WIDTH, 2)
        self.deep = evener.nn.FeatureParallelLinear(WIDTH, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, pages: Tensor) -> Tensor:
        scores: Tensor = self.wide(pages) + self.out(torch.relu(self.deep(pages)))
        return scores


def task() -> evener.Task:
    return evener.Task(
        name="clicks",
        model=WideAndDeep,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        train=Clicks(),
        metrics={"accuracy": evener.accuracy},
        batch_size=100,
        epochs=5,
    )


def train() -> None:
    """Runs on every rank; ``evener.fit(task, strategy="dimension")`` is the same without a look inside."""
    with evener.Engine(task(), strategy="dimension", balance="2,1") as engine:
        for batch in engine.batches():
            engine.step(batch)
        values = engine.evaluate(engine.task.train)
        held = engine.session.control.gather_objects(engine.model.deep.weight.shape[1])
        whole = engine.state_dict()["model"]["deep.weight"]
        if engine.session.rank == 0:
            print(f"the ranks hold {held} of {whole.shape[1]} columns")
            print(f"accuracy {values['accuracy']:.3f}")


if __name__ == "__main__":
    evener.launch(train, processes=2)
