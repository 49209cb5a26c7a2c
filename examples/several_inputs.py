"""Several inputs and several outputs, nested as you like; a loss made of two parts.

A dict of inputs becomes the model's keyword arguments. The outputs reach the loss as the model returns them.

    python examples/several_inputs.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import evener


class Houses(Dataset[tuple[dict[str, Tensor], dict[str, Tensor]]]):
    """A picture and a row of numbers; a price and a class."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(index)
        picture = torch.randn(1, 8, 8, generator=generator)
        row = torch.randn(5, generator=generator)
        return {"picture": picture, "row": row}, {"price": row.sum(), "kind": (picture.mean() > 0).long()}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.read = nn.Linear(5, 16)
        self.price, self.kind = nn.Linear(32, 1), nn.Linear(32, 2)

    def forward(self, picture: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.see(picture), self.read(row)], 1)
        return self.price(both).squeeze(1), self.kind(both)


def total(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """The sum over the samples, not their mean."""
    price, kind = outputs
    return F.mse_loss(price, targets["price"], reduction="sum") + 0.5 * F.cross_entropy(
        kind, targets["kind"], reduction="sum"
    )


def right_kind(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> evener.Sum:
    return evener.accuracy(outputs[1], targets["kind"])


def task() -> evener.Task:
    return evener.Task(
        name="houses",
        model=TwoHeads,
        loss=evener.SumLoss(count=lambda targets: len(targets["price"]), total=total),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        train=Houses(),
        evaluate=Houses(),
        metrics={"kind": right_kind},
        batch_size=30,
        epochs=3,
    )


if __name__ == "__main__":
    summary = evener.fit(task, processes=1).summary
    print(f"loss {summary.metrics['loss']:.3f}, right kind {summary.metrics['kind']:.3f}")
