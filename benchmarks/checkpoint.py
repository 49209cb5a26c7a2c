"""What a checkpoint costs: the stall of training, the time until it is on the disk, and the time to load it.

    python -m benchmarks.checkpoint [--turns 5] [--megabytes 200] [--processes 2]

============  ========================================================================================================
torch.save    rank 0 writes one file of ``state_dict()`` of the model and the optimizer, the others wait at a barrier
DCP           ``torch.distributed.checkpoint.save`` of the same
DCP async     ``torch.distributed.checkpoint.async_save`` of the same
blocking      ``Engine.save(directory)``: with checksums, atomic, the one before kept
async         ``Engine.save(directory, wait=False)``: the same, while training goes on
============  ========================================================================================================

The stall is the time of the call; until it is on the disk, that and the wait for its end with nothing else to do.
Ratios are to Evener's blocking save.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import TensorDataset

import evener
from benchmarks.drawn import rand
from benchmarks.results import Table, cell, record
from evener.distributed.session import Session
from evener.training.engine import Engine

WIDTH = 1024


def task(megabytes: int) -> evener.Task:
    """An MLP with AdamW: weights and two states of 4 bytes each, so many megabytes of state together."""
    layers = max(1, round(megabytes * 1e6 / (12 * WIDTH * (WIDTH + 1))))
    data = TensorDataset(rand(64, WIDTH), rand(64, WIDTH))
    return evener.Task(
        model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
        train=data,
        batch_size=8,
    )


class Contender:
    """``save`` returns when training may go on, ``finish`` when it is on the disk."""

    def __init__(self, engine: Engine, place: Path) -> None:
        self.engine, self.place, self.number = engine, place, 0

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.engine.model, self.engine.learner.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        pass

    def load(self) -> None:
        raise NotImplementedError

    def next_place(self) -> Path:
        self.number += 1
        return self.place / f"{self.number}"


class TorchSave(Contender):
    def save(self) -> None:
        self.last = self.next_place()
        if self.engine.session.rank == 0:
            self.last.parent.mkdir(parents=True, exist_ok=True)
            with self.last.open("wb") as file:
                torch.save(self.state(), file)
                file.flush()
        barrier()

    def load(self) -> None:
        state = torch.load(self.last, weights_only=True)
        model, optimizer = self.engine.model, self.engine.learner.optimizer
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Dcp(Contender):
    def save(self) -> None:
        self.last = self.next_place()
        dcp.save(self.state(), checkpoint_id=self.last)

    def load(self) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=self.last)
        model, optimizer = self.engine.model, self.engine.learner.optimizer
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class DcpAsync(Dcp):
    def __init__(self, engine: Engine, place: Path) -> None:
        super().__init__(engine, place)
        # Its thread and the barriers of this benchmark would mix their messages in one group, and wait for ever.
        self.own = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self) -> None:
        self.last = self.next_place()
        self.pending: Any = dcp.async_save(self.state(), checkpoint_id=self.last, process_group=self.own)

    def finish(self) -> None:
        self.pending.result()


class Blocking(Contender):
    def save(self) -> None:
        self.engine.save(self.place)

    def load(self) -> None:
        self.engine.load(self.place)


class Async(Blocking):
    def save(self) -> None:
        self.engine.save(self.place, wait=False)

    def finish(self) -> None:
        self.engine.finish_saving()


CONTENDERS: dict[str, type[Contender]] = {
    "torch.save": TorchSave,
    "DCP": Dcp,
    "DCP async": DcpAsync,
    "blocking": Blocking,
    "async": Async,
}


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def seconds_of(act: Callable[[], None]) -> float:
    barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(megabytes: int, turns: int, home: Path) -> dict[str, dict[str, float]]:
    """Medians over the turns of rank 0's seconds, after a turn that does not count."""
    with Session(device="cpu") as session, Engine(task(megabytes), session=session, steps=1) as engine:
        for batch in engine.batches():
            engine.step(batch)
        running = {name: kind(engine, home / name.replace(" ", "-")) for name, kind in CONTENDERS.items()}
        rows: dict[str, dict[str, list[float]]] = {
            name: {"stall": [], "whole": [], "load": []} for name in running
        }
        for turn in range(turns + 1):
            for name, contender in running.items():
                stall = seconds_of(contender.save)
                whole = stall + seconds_of(contender.finish)
                load = seconds_of(contender.load)
                if turn:
                    for key, value in (("stall", stall), ("whole", whole), ("load", load)):
                        rows[name][key].append(value)
        return {
            name: {key: statistics.median(values) for key, values in row.items()}
            for name, row in rows.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        found = evener.launch(
            measure, given.megabytes, given.turns, Path(home), processes=given.processes, device="cpu"
        )[0]
    blocking = found["blocking"]["stall"]
    rows = [
        [
            name,
            cell(row["stall"], "s", ratio=row["stall"] / blocking),
            cell(row["whole"], "s"),
            cell(row["load"], "s"),
        ]
        for name, row in found.items()
    ]
    columns = ["way to save", "stall", "until on the disk", "load"]
    table = Table(columns, rows, "time over that of Evener's blocking save")
    record("checkpoint", f"{given.megabytes} MB of state, {given.processes} ranks", table)


if __name__ == "__main__":
    main()
