"""Asynchronous training beside data parallelism and local steps: speed, deaths, and accuracy at equal samples.

    python -m benchmarks.asynchronous [--only throughput|stalls|kills|accuracy] [--seeds 10] [--turns 3] [--plot FILE]

==========  ==========================================================================================================
throughput  two ranks, of which one sleeps so that it is three times slower
stalls      four ranks; one pass in twenty, at random, takes ten times as long
kills       ranks that are killed: :mod:`benchmarks.asynchronous_kills`
accuracy    4 ranks, and 16 and 64 workers on a virtual clock: :mod:`benchmarks.asynchronous_accuracy`
==========  ==========================================================================================================

Speeds are measured in turns, in one process group, from one meeting of the ranks to another. *Sum of speeds* is what
the ranks reach if each trains alone, all at the same time: none waits for another and none sends anything.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from benchmarks import asynchronous_accuracy, asynchronous_kills
from benchmarks.balance import model, throttled
from benchmarks.contenders import Contender, Work, ours, plain_ddp
from benchmarks.drawn import rand, randint
from benchmarks.results import Table, cell, record, spread
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.strategies import Asynchronous, LocalSgd

BATCHES = 100
"""Batches of an epoch, of a section, and of a round of local steps. A turn has as many, or ``FEWER`` of single ones."""
FEWER = 30
BATCH_SIZE = 256
"""With it a range takes about 60 ms, so that messages and updates weigh little, as with real models."""
SUM_SECONDS = 8.0
FACTORS = (1.0, 1 / 3)
SUM = "sum of speeds"
STALLS_EACH, LONGER = 20, 10


class Sleeping(nn.Sequential):
    """A network whose pass takes a millisecond for a sample, and ten times that in one of twenty passes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self._draw = random.Random(int(os.environ["RANK"]))
        self._passes = self._stalls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            place = self._passes % STALLS_EACH
            if place == 0:
                self._stalls = self._draw.randrange(STALLS_EACH)
            self._passes += 1
            time.sleep(1e-3 * len(inputs) * (LONGER if place == self._stalls else 1))
        scores: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return scores


def alone(batch_size: int, **settings: object) -> Contender:
    """This rank by itself, with the threads that it has among the others."""

    def contender(work: Work, session: Session) -> Iterator[None]:
        threads = torch.get_num_threads()
        with Session("cpu", environment=Environment()) as own:
            torch.set_num_threads(threads)
            yield from ours(strategy="single", **settings)(replace(work, batch_size=batch_size), own)

    return contender


def samples_a_second(
    contenders: dict[str, tuple[Contender, int]], work: Work, sum_batch: int, turns: int, session: Session
) -> dict[str, list[float]]:
    """Returns the speed of all ranks together in each turn.

    Args:
        contenders: Of each the number of batches in its steps.
        sum_batch: The number of samples in a batch of this rank alone: as in its ranges among the others.
    """
    running = {name: (contender(work, session), size) for name, (contender, size) in contenders.items()}
    found: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(turns + 1):
        for name, (steps, size) in running.items():
            dist.barrier()
            began, batches = time.perf_counter(), 0
            while time.perf_counter() - began < SUM_SECONDS if name == SUM else batches < max(size, FEWER):
                next(steps)
                batches += size
            seconds = time.perf_counter() - began
            size_of_batch = sum_batch if name == SUM else work.batch_size
            speed = torch.tensor(batches * size_of_batch / seconds)
            dist.all_reduce(speed, dist.ReduceOp.SUM if name == SUM else dist.ReduceOp.MIN)
            if turn:  # the first is for warming up
                found[name].append(float(speed))
    for steps, _ in running.values():
        steps.close()  # type: ignore[attr-defined]
    return found


def throughput(turns: int) -> dict[str, list[float]]:
    """Two ranks, of which one is three times slower."""
    with Session(device="cpu") as session:
        data = TensorDataset(rand(BATCHES * BATCH_SIZE, 3, 16, 16), randint(10, (BATCHES * BATCH_SIZE,)))
        work = Work("3:1", model, data, batch_size=BATCH_SIZE)
        factor = FACTORS[session.rank]
        own = round(BATCH_SIZE * factor / sum(FACTORS))
        unequal = ",".join(map(str, FACTORS))
        by_hand = Work("3:1", throttled(factor), data, BATCH_SIZE)
        contenders: dict[str, tuple[Contender, int]] = {
            "plain DDP": (lambda _, session: plain_ddp(by_hand, session), 1),
            "ddp, balance auto": (ours(balance="auto", throttle=unequal), 1),
            "local_sgd, 3:1": (
                ours(strategy=LocalSgd(sync_every=BATCHES), balance="3,1", throttle=unequal),
                BATCHES,
            ),
            "asynchronous": (ours(strategy=Asynchronous(sync_every=BATCHES), throttle=unequal), BATCHES),
            SUM: (alone(own, throttle=str(factor)), 1),
        }
        return samples_a_second(contenders, work, own, turns, session)


def stalls(turns: int) -> dict[str, list[float]]:
    """Four ranks that stall at random."""
    with Session(device="cpu") as session:
        data = TensorDataset(rand(BATCHES * BATCH_SIZE, 64), randint(10, (BATCHES * BATCH_SIZE,)))
        work, own = Work("stalls", Sleeping, data, BATCH_SIZE), BATCH_SIZE // session.world_size
        contenders: dict[str, tuple[Contender, int]] = {
            "plain DDP": (plain_ddp, 1),
            "ddp, balance auto": (ours(balance="auto"), 1),
            "local_sgd": (ours(strategy=LocalSgd(sync_every=BATCHES), balance="equal"), BATCHES),
            "asynchronous": (ours(strategy=Asynchronous(sync_every=BATCHES)), BATCHES),
            SUM: (alone(own), 1),
        }
        return samples_a_second(contenders, work, own, turns, session)


def show_speeds(
    kind: str, measure: Callable[[int], dict[str, list[float]]], turns: int, processes: int
) -> None:
    """Shows medians, and medians of the parts of the sum of speeds."""
    found = evener.launch(measure, turns, processes=processes, device="cpu")[0]
    rows = []
    for name, values in found.items():
        parts = [a / b for a, b in zip(values, found[SUM], strict=True)]
        speed = cell(statistics.median(values), "samples/s", spread=spread(values))
        rows.append([name, speed, cell(statistics.median(parts), spread=spread(parts))])
    record("asynchronous", kind, Table(["strategy", "speed", "of the sum of speeds"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=("throughput", "stalls", "kills", "accuracy"))
    parser.add_argument("--workers", default="4,16,64", help="for the accuracy")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the accuracies, .svg")
    given = parser.parse_args()
    if given.only in (None, "throughput"):
        show_speeds("two ranks, 3:1", throughput, given.turns, processes=2)
    if given.only in (None, "stalls"):
        show_speeds("four ranks that stall", stalls, given.turns, processes=4)
    if given.only in (None, "kills"):
        asynchronous_kills.compare()
    if given.only in (None, "accuracy"):
        asynchronous_accuracy.compare(given.seeds, [int(number) for number in given.workers.split(",")])
    if given.plot:
        asynchronous_accuracy.plot(given.plot, given.seeds)


if __name__ == "__main__":
    main()
