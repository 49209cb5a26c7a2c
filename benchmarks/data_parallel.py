"""One process with a thread for each device, against a process for each: time per step on 2 cores.

python -m benchmarks.data_parallel [--turns 20] [--steps 10]

A rank of two takes the steps of one process alone, with both cores, while the other rests. ``torch.nn.DataParallel``
needs GPUs and is not compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.contenders import Contender, Work, ours
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import record
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.strategies.base import Strategy
from evener.strategies.single_process.data_parallel import DataParallel
from evener.training.builtin_tasks import digits
from evener.training.engine import Engine

CORES = 2
PROCESSES, THREADS, ONE = "ddp, 2 processes", "data_parallel, 2 devices", "single, 2 threads an operation"


def works() -> list[Work]:
    """From steps that are all Python to steps that are all arithmetic."""
    images, labels = rand(4096, 1, 8, 8), randint(10, (4096,))
    data = TensorDataset(images, labels)

    def deep() -> nn.Module:
        blocks = [layer for _ in range(40) for layer in (nn.Linear(32, 32), nn.Tanh())]
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *blocks, nn.Linear(32, 10))

    def wide() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10)
        )

    return [
        Work("40 small layers, batch 64", deep, data, 64),
        Work("digits CNN, batch 64", digits.model, data, 64),
        Work("digits CNN, batch 512", digits.model, data, 512),
        Work("MLP 64-1024-1024-10, batch 512", wide, data, 512),
    ]


def alone(strategy: Strategy | str) -> Contender:
    """The steps of one process with all cores."""

    def steps(work: Work, session: Session) -> Iterator[None]:
        while session.rank:
            yield
        own = torch.get_num_threads()
        with Session("cpu", environment=Environment()) as place:
            torch.set_num_threads(CORES)
            with Engine(_task(work), session=place, strategy=strategy, epochs=10**6) as engine:
                for batch in engine.batches():
                    torch.set_num_threads(CORES)
                    engine.step(batch)
                    torch.set_num_threads(own)
                    yield

    return steps


def _task(work: Work) -> evener.Task:
    return evener.Task(
        model=work.model,
        loss=nn.CrossEntropyLoss(),
        optimizer=work.optimizer,
        train=work.data,
        batch_size=work.batch_size,
    )


def measure(turns: int, steps: int) -> dict[str, dict[str, Timing]]:
    contenders = {
        PROCESSES: ours(),
        THREADS: alone(DataParallel("cpu:0,cpu:1")),
        ONE: alone("single"),
    }
    with Session(device="cpu") as session:
        return {work.name: take_turns(contenders, work, session, turns, steps) for work in works()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    results = evener.launch(measure, arguments.turns, arguments.steps, processes=CORES, device="cpu")[0]
    record("data_parallel", "two cores", table(results, PROCESSES))


if __name__ == "__main__":
    main()
