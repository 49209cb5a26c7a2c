"""What Evener adds to a step: time per step against plain DDP, Accelerate and Lightning Fabric, 2 CPU ranks.

python -m benchmarks.overhead [--turns 30] [--steps 20]
"""

from __future__ import annotations

import argparse

from torch import nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.contenders import PEERS, Work, ours, prepared
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import record
from evener.distributed.session import Session
from evener.training.builtin_tasks import digits


def works() -> list[Work]:
    """Small steps, where overhead shows."""
    images, labels = rand(4096, 1, 8, 8), randint(10, (4096,))
    data = TensorDataset(images, labels)
    mlp = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))  # noqa: E731
    return [
        Work("MLP 64-256-10, batch 64", mlp, data, 64),
        Work("digits CNN, batch 64", digits.model, data, 64),
        Work("digits CNN, batch 512", digits.model, data, 512),
    ]


def measure(turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    with Session(device="cpu") as session:
        contenders = {**PEERS, "Evener": ours(), "Evener, prepared": prepared}
        return {work.name: take_turns(contenders, work, session, turns, steps) for work in works()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    results = evener.launch(measure, arguments.turns, arguments.steps, processes=2, device="cpu")[0]
    record("overhead", "two CPU ranks", table(results, "plain DDP"))
    own = ("Evener", "Evener, prepared")
    beside = {name: {each: timings[each] for each in own} for name, timings in results.items()}
    record("overhead", "a prepared loop beside Evener's own", table(beside, "Evener"))


if __name__ == "__main__":
    main()
