"""What exact BatchNorm costs: a ResNet18 for CIFAR's images, 2 CPU ranks, against DDP with each rank's own statistics.

python -m benchmarks.batch_norm [--batches 4,16,64] [--turns 12] [--steps 6]

Batches are those of a rank. DDP with ``SyncBatchNorm``, the other way to exact statistics, does not run on CPUs.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.contenders import Work, ours, plain_ddp
from benchmarks.drawn import randint, randn
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import record
from evener.distributed.session import Session

RANKS = 2
WIDTHS = (64, 128, 256, 512)


class Block(nn.Module):
    """Of He et al. 2015 (arXiv:1512.03385)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.way = nn.Sequential()
        if stride > 1 or before != width:
            self.way = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.way(x))


def resnet18() -> nn.Sequential:
    """For images of 32 x 32 in ten kinds; 11.2 million parameters and 20 BatchNorms."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for place, width in enumerate(WIDTHS):
        layers += [Block(before, width, 1 + (place > 0)), Block(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def measure(batches: list[int], turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    contenders = {
        "DDP, local": plain_ddp,
        "Evener, exact": ours(),
        "Evener, local": ours(batch_norm="local"),
    }
    data = TensorDataset(randn(1024, 3, 32, 32), randint(10, (1024,)))
    works = {f"{batch} a rank": Work("ResNet18", resnet18, data, RANKS * batch) for batch in batches}
    with Session(device="cpu") as session:
        return {
            name: take_turns(contenders, work, session, turns, steps, warm_up=4)
            for name, work in works.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="4,16,64")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    found = evener.launch(measure, batches, arguments.turns, arguments.steps, processes=RANKS, device="cpu")[
        0
    ]
    record("batch_norm", "two CPU ranks", table(found, "DDP, local"))


if __name__ == "__main__":
    main()
