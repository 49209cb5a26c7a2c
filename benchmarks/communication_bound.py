"""Training that is bound by communication: 25M parameters and a small batch, 2 CPU ranks, against plain DDP on gloo.

    python -m benchmarks.communication_bound [--turns 10] [--steps 5]

Also models that are not bound by communication, which must lose nothing.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

from torch import nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.contenders import Contender, Work, ours, plain_ddp
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import record
from evener.distributed.session import Session
from evener.training.builtin_tasks import digits


def works() -> list[Work]:
    wide = TensorDataset(rand(512, 2048), randint(10, (512,)))
    narrow = TensorDataset(rand(512, 1024), randint(10, (512,)))
    images = TensorDataset(rand(1024, 1, 8, 8), randint(10, (1024,)))
    return [
        Work("25M parameters, 24 layers, batch 4", lambda: mlp(*[1024] * 25), narrow, 4),
        Work("25M parameters, 24 layers, batch 16", lambda: mlp(*[1024] * 25), narrow, 16),
        Work("25M parameters, 3 layers, batch 8", lambda: mlp(2048, 3500, 4600), wide, 8),
        Work("6M parameters, batch 32", lambda: mlp(2048, 2000, 900), wide, 32),
        Work("digits CNN, batch 64", digits.model, images, 64),
        Work("digits CNN, batch 512", digits.model, images, 512),
    ]


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


CONTENDERS: dict[str, Contender] = {
    "plain DDP": plain_ddp,
    "Evener": ours(),
    "Evener, native": ours(allreduce="native"),
}


def measure(turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    with Session(device="cpu") as session:
        return {work.name: take_turns(CONTENDERS, work, session, turns, steps, 4) for work in works()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    results = evener.launch(measure, arguments.turns, arguments.steps, processes=2, device="cpu")[0]
    record("communication_bound", "two CPU ranks", table(results, "plain DDP"))


if __name__ == "__main__":
    main()
