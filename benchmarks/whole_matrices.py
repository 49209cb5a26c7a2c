"""An optimizer of whole matrices, Muon, at owners against the update on every rank: 2 CPU ranks, 16 matrices.

    python -m benchmarks.whole_matrices [--width 512] [--turns 8] [--steps 3]

The first table has the time of a step whose samples are few, so that the update is most of it. The second has the
processor time of each rank's own update where one owner is to have three quarters of the cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.contenders import Contender, Work, ours
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import Table, cell, record
from evener.components.optim.owners import update_cost
from evener.core.config.run_config import RunConfig
from evener.distributed.session import Session
from evener.strategies.sharded.sharded import Sharded

LAYERS, BATCH = 15, 4


class WithMuon(Work):
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=1e-3)


def matrices(width: int) -> nn.Module:
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width, bias=False), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, 10, bias=False))


def work_of(width: int) -> WithMuon:
    data = TensorDataset(rand(256, width), randint(10, (256,)))
    return WithMuon(
        f"Muon, {LAYERS} matrices of {width} x {width}, batch {BATCH}", partial(matrices, width), data, BATCH
    )


CONTENDERS: dict[str, Contender] = {
    "every rank (ddp)": ours(),
    "owners, zero=1": ours(strategy=Sharded(zero=1)),
    "owners, zero=2": ours(strategy=Sharded(zero=2)),
    "gathered, zero=3": ours(strategy=Sharded(zero=3)),
}


def measure(width: int, turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    with Session(device="cpu") as session:
        work = work_of(width)
        return {work.name: take_turns(CONTENDERS, work, session, turns, steps, 3)}


def own_update(width: int, steps: int) -> tuple[float, float]:
    """Part of the cost that this rank updates, and the seconds of a processor that its own part takes (median)."""
    work, seconds, began = work_of(width), list[float](), [0.0]
    task = evener.Task(
        model=work.model, loss=nn.CrossEntropyLoss(), optimizer=work.optimizer, train=work.data
    )
    strategy = Sharded(zero=2, shard_sizes="3,1")
    config = RunConfig(device="cpu", batch_size=BATCH, epochs=10**6, steps=steps, strategy=strategy)
    with evener.Engine(task, config) as engine:
        learner = engine.learner
        learner.optimizer.register_step_pre_hook(lambda *_: began.__setitem__(0, time.thread_time()))
        learner.optimizer.register_step_post_hook(lambda *_: seconds.append(time.thread_time() - began[0]))
        for batch in engine.batches():
            engine.step(batch)
        here = learner.held_state().whole_updates
        costs = {name: update_cost(tuple(value.shape)) for name, value in learner.tensors().items()}
    part = sum(costs[name] for name, is_here in here.items() if is_here) / sum(costs.values())
    return part, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    common = {"processes": 2, "device": "cpu"}
    results = evener.launch(measure, arguments.width, arguments.turns, arguments.steps, **common)[0]
    record("whole_matrices", "two CPU ranks", table(results, "every rank (ddp)"))
    found = evener.launch(own_update, arguments.width, arguments.turns * arguments.steps, **common)
    rows = [
        [f"rank {rank}", cell(part), cell(1e3 * seconds, "ms")] for rank, (part, seconds) in enumerate(found)
    ]
    columns = ["owner", "part of the cost", "its own update, of a processor"]
    record("whole_matrices", "owners of parts 3,1", Table(columns, rows))


if __name__ == "__main__":
    main()
