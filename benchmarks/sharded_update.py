"""Where the optimizer's work is as large as the model's: 25M parameters with AdamW and a small batch, 2 CPU ranks.

    python -m benchmarks.sharded_update [--batches 4,64] [--turns 8] [--steps 5]

Plain DDP, with torch's usual AdamW and with its fused one, against Evener's DDP and against ranks of which each updates
its part of weights that all have in common.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

import evener
from benchmarks.communication_bound import mlp
from benchmarks.contenders import Contender, Work, ours, plain_ddp
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import record
from evener.distributed.session import Session
from evener.strategies.sharded.sharded import Sharded


@dataclass(frozen=True)
class WithAdamW(Work):
    fused: bool = False

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=self.fused or None)


def works(batches: list[int]) -> list[WithAdamW]:
    data = TensorDataset(rand(512, 1024), randint(10, (512,)))
    few = TensorDataset(rand(512, 2048), randint(10, (512,)))
    layers = [
        WithAdamW(f"25M parameters, 24 layers, batch {n}", partial(mlp, *[1024] * 25), data, n)
        for n in batches
    ]
    return [*layers, WithAdamW("25M parameters, 3 layers, batch 4", partial(mlp, 2048, 3500, 4600), few, 4)]


def fused(work: WithAdamW, session: Session) -> Iterator[None]:
    return plain_ddp(replace(work, fused=True), session)


CONTENDERS: dict[str, Contender] = {
    "plain DDP": plain_ddp,
    "plain DDP, fused": fused,  # type: ignore[dict-item]
    "Evener": ours(),
    "Evener, zero=2": ours(strategy=Sharded(zero=2)),
    "Evener, zero=2 in common": ours(strategy=Sharded(zero=2, in_common=True)),
}


def measure(batches: list[int], turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    with Session(device="cpu") as session:
        return {work.name: take_turns(CONTENDERS, work, session, turns, steps, 4) for work in works(batches)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="4,64")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    batches = [int(each) for each in arguments.batches.split(",")]
    results = evener.launch(measure, batches, arguments.turns, arguments.steps, processes=2, device="cpu")[0]
    record("sharded_update", "two CPU ranks", table(results, "plain DDP"))


if __name__ == "__main__":
    main()
