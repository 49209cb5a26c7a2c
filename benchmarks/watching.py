"""What the watching of a run costs: a step of about 5 ms with it and without, in alternation, 2 CPU ranks.

Switched are the digests of replicas, the look for numbers that are not finite, and both; ``skip`` waits for all ranks
before each update. The thread that publishes heartbeats runs beside all of them, and is told by its share of a core.

python -m benchmarks.watching [--turns 30] [--steps 40]
python -m benchmarks.watching --memory

With ``--memory``: what it costs to read a rank's memory in each step and to say what it is for, in microseconds, on one
CPU rank; as called, without a step around it.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import timeit
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.contenders import Contender, Work
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table, take_turns
from benchmarks.results import Table, cell, record
from evener.components.gradients import Unsound
from evener.core.config.run_config import RunConfig
from evener.distributed.session import Session
from evener.hardware.async_read import Readout, ReadyValue
from evener.strategies.memory_attribution import nbytes_of
from evener.strategies.memory_monitor import EVERY


class Blind(Unsound):
    """Looks at nothing."""

    def of(self, gradients: Any) -> Readout:
        return ReadyValue(0.0)

    def of_flat(self, flat: Any, gradients: Any) -> Readout:
        return ReadyValue(0.0)


def contender(blind: bool, **settings: Any) -> Contender:
    def run(work: Work, session: Session) -> Iterator[None]:
        task = evener.Task(
            model=work.model, loss=nn.CrossEntropyLoss(), optimizer=work.optimizer, train=work.data
        )
        config = RunConfig(batch_size=work.batch_size, epochs=10**6, **settings)
        engine = evener.Engine(task, config, session=session)
        if blind:
            engine.learner.unsound = Blind(())
        for batch in engine.batches():
            engine.step(batch)
            yield

    return run


CONTENDERS = {
    "unwatched": contender(True, check_replicas=0),
    "digests": contender(True),
    "finite": contender(False, check_replicas=0),
    "watched": contender(False),
    "skip": contender(False, non_finite="skip"),
}


def work() -> Work:
    """About 5 ms a step on two cores, and 0.3 million weights."""
    model = lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.Linear(256, 10))  # noqa: E731
    data = TensorDataset(rand(4096, 256), randint(10, (4096,)))
    return Work("MLP 256-512-256-10, batch 256", model, data, 256)


def heartbeat_seconds() -> float:
    """Of a core, that the thread of heartbeats has taken so far."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = [thread for thread in threading.enumerate() if thread.name == "evener-watchdog"]
    stats = [Path(f"/proc/self/task/{thread.native_id}/stat").read_text() for thread in found]
    return sum(sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in stats) / ticks


def measure(turns: int, steps: int) -> tuple[dict[str, Timing], float]:
    with Session(device="cpu") as session:
        beats, began = heartbeat_seconds(), time.perf_counter()
        timings = take_turns(CONTENDERS, work(), session, turns, steps)
        return timings, (heartbeat_seconds() - beats) / (time.perf_counter() - began)


def memory_microseconds(layers: int, rounds: int = 5) -> tuple[int, float, float]:
    """Of a model of so many layers: its parameters, the time of a step's two readings with the sums that are due in
    the mean, and of one of these sums alone."""
    model = lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))  # noqa: E731
    data = TensorDataset(rand(64, 16), rand(64, 16))
    task = evener.Task(model=model, loss=nn.MSELoss(), optimizer=torch.optim.AdamW, train=data, batch_size=16)
    with Session(device="cpu") as session, evener.Engine(task, session=session, epochs=9) as engine:
        batches = engine.batches()
        for _ in range(3):
            batch = next(batches)
            engine.step(batch)
        watch, called = engine.learner.watch, partial(nbytes_of, engine.learner)
        batches.close()

        def readings() -> None:
            for _ in range(EVERY):
                watch.begin(batch)
                watch.end(batch)

        each = min(timeit.repeat(readings, number=1, repeat=rounds)) / EVERY
        return 2 * layers, 1e6 * each, 1e6 * min(timeit.repeat(called, number=1, repeat=rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    if arguments.memory:
        rows = [
            [str(number), cell(step, "us"), cell(sums, "us")]
            for number, step, sums in map(memory_microseconds, (4, 50, 500))
        ]
        columns = ["parameters", "a step", f"all sums, every {EVERY} steps"]
        record("watching", "memory, and what it is for", Table(columns, rows))
        return
    timings, beats = evener.launch(measure, arguments.turns, arguments.steps, processes=2, device="cpu")[0]
    record("watching", "replicas and gradients", table({work().name: timings}, "unwatched"))
    share = Table(["thread", "of a core"], [["heartbeats", cell(100 * beats, "%")]])
    record("watching", "heartbeats", share)


if __name__ == "__main__":
    main()
