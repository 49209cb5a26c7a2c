"""Local steps beside data parallelism on 2 CPU ranks: bytes on the wire, speed on unequal and stalling ranks, accuracy.

    python -m benchmarks.local_steps [--seeds 10] [--only bytes|speed|accuracy]

Bytes are those that the loopback interface counts, with gloo. Speeds are emulated by sleeping. Accuracy is that of a
small network on digits after the same number of samples, with paired seeds: replicas train the same on any number of
ranks, so 16 of them run on one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.communication_bound import mlp
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import paired
from benchmarks.results import Table, Value, cell, record, spread
from evener.components.fragments import cut_into_fragments
from evener.core.config.run_config import RunConfig
from evener.distributed.session import Session
from evener.strategies import DiLoCo, LocalSgd
from evener.training.builtin_tasks import digits
from evener.training.engine import Engine

LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
BATCHES = 100


class Stalling(nn.Sequential):
    """A network whose pass takes ten times as long now and then, on one rank or the other."""

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.05 if self.training and random.random() < 0.05 else 0.005)
        return super().forward(inputs)


def _task(model: Any, data: TensorDataset, batch_size: int) -> evener.Task:
    return evener.Task(
        model=model,
        train=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=adam,
        batch_size=batch_size,
    )


# Bytes

SENDERS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "diloco, sync_every=100": {"strategy": DiLoCo(sync_every=100)},
    "diloco, int8": {"strategy": DiLoCo(sync_every=100), "compress": "int8"},
    "diloco, top-k": {"strategy": DiLoCo(sync_every=100), "compress": "top-k"},
    "diloco, 4 fragments": {"strategy": DiLoCo(sync_every=100, num_fragments=4)},
}


def layered() -> nn.Module:
    """A network of layers of equal size, for a fragment has whole parameters."""
    return mlp(512, *[700] * 8)


def sent_nbytes() -> dict[str, tuple[float, float]]:
    """Bytes of 100 batches, and of the greatest message of a merge or a step, for each way."""
    found = {}
    data = TensorDataset(rand(BATCHES * 8, 512), randint(10, (BATCHES * 8,)))
    with Session(device="cpu") as session:
        for name, settings in SENDERS.items():
            config = RunConfig(allreduce="native", epochs=2, check_replicas=0, **settings)
            task = _task(layered, data, 8)
            with Engine(task, config, session=session) as engine:
                batches, before = engine.batches(), 0
                for batch in batches:
                    if batch.epoch == 1 and not before:
                        session.control.gather_objects(None)
                        before = int(LOOPBACK.read_text())
                    engine.step(batch)
                session.control.gather_objects(None)
                found[name] = float(int(LOOPBACK.read_text()) - before), _greatest(engine)
    return found


def _greatest(engine: Engine) -> float:
    """Bytes that the largest merge hands to the all-reduce; with ddp those of a step."""
    rounds = engine.learner.rounds
    parts = cut_into_fragments(
        list(engine.model.parameters()), rounds.fragments if rounds else 1, "num_fragments"
    )
    return 4.0 * max(sum(p.numel() for p in each) for each in parts)


# Speed


def stalling() -> nn.Module:
    return Stalling(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def wide() -> nn.Module:
    return mlp(512, 512, 512)


def _samples_a_second(settings: dict[str, Any], model: Any, session: Session) -> float:
    data = TensorDataset(rand(4096, 512), randint(10, (4096,)))
    random.seed(session.rank)
    config = RunConfig(epochs=2, check_replicas=0, batch_size=64, **settings)
    with Engine(_task(model, data, 64), config, session=session) as engine:
        done, began = 0, 0.0
        for batch in engine.batches():
            if batch.epoch == 1 and not began:
                began = time.perf_counter()
            engine.step(batch)
            done += batch.size * bool(began)
        return done / (time.perf_counter() - began)


def speeds(turns: int) -> dict[str, dict[str, list[float]]]:
    """Samples a second of each way, in turns."""
    unequal = {"throttle": "1,0.33"}
    ways: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {
        "3:1": {
            "ddp, equal shares": ({"strategy": "ddp", "balance": "equal", **unequal}, wide),
            "ddp, auto": ({"strategy": "ddp", "balance": "auto", **unequal}, wide),
            "local_sgd, 3:1": ({"strategy": LocalSgd(sync_every=16), "balance": "3,1", **unequal}, wide),
        },
        "stalls": {
            "ddp": ({"strategy": "ddp", "balance": "equal"}, stalling),
            "local_sgd": ({"strategy": LocalSgd(sync_every=64), "balance": "equal"}, stalling),
        },
    }
    found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in ways[kind]} for kind in ways}
    with Session(device="cpu") as session:
        for _ in range(turns):
            for kind, contenders in ways.items():
                for name, (settings, model) in contenders.items():
                    found[kind][name].append(_samples_a_second(settings, model, session))
    return found


# Accuracy


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def accuracy(strategy: Any, replicas: int, seed: int, optimizer: Any) -> float:
    """Accuracy on held-out digits after 12 epochs in batches of 16 samples for each replica."""
    base = digits.task()
    task = evener.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        train=base.train,
        evaluate=base.evaluate,
        metrics=base.metrics,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        batch_size=16 * replicas,
    )
    with Engine(task, RunConfig(device="cpu", epochs=12, seed=seed, strategy=strategy)) as engine:
        for batch in engine.batches():
            engine.step(batch)
        return 100 * engine.evaluate()["accuracy"]


def accuracies(seeds: int) -> Iterator[list[Value]]:
    """Accuracies, and the paired difference to the synchronous mode with its 95 % interval."""
    for replicas in (4, 16):
        for name, kind in (("local_sgd", LocalSgd), ("diloco", DiLoCo)):
            strategy = kind(sync_every=8, replicas=replicas)
            pairs = [
                (accuracy("single", replicas, seed, adam), accuracy(strategy, replicas, seed, adam))
                for seed in range(seeds)
            ]
            together, local = zip(*pairs, strict=True)
            mean, half = paired(together, local)
            apart = cell(mean, "points", spread=half if seeds > 1 else None)
            means = [cell(statistics.mean(each), "%") for each in (together, local)]
            yield [f"{replicas} replicas, `{name}`, `sync_every=8`", *means, apart]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=("bytes", "speed", "accuracy"))
    arguments = parser.parse_args()
    if arguments.only in (None, "bytes"):
        found = evener.launch(sent_nbytes, processes=2, device="cpu")[0]
        whole, largest = found["ddp"]
        rows = [
            [name, cell(nbytes / 1e6, "MB"), f"1/{whole / nbytes:.0f}", cell(most / largest)]
            for name, (nbytes, most) in found.items()
        ]
        columns = ["strategy", f"sent in {BATCHES} batches", "of ddp", "largest message, of ddp's"]
        record("local_steps", "bytes", Table(columns, rows))
    if arguments.only in (None, "speed"):
        rows = []
        for kind, by_name in evener.launch(speeds, arguments.turns, processes=2, device="cpu")[0].items():
            first = statistics.median(next(iter(by_name.values())))
            for name, values in by_name.items():
                middle = statistics.median(values)
                speed = cell(
                    middle, "samples/s", ratio=middle / first, spread=spread([v / first for v in values])
                )
                rows.append([f"{kind}: {name}", speed])
        record("local_steps", "speed", Table(["ranks, strategy", "speed"], rows, "speed over the first's"))
    if arguments.only in (None, "accuracy"):
        columns = ["replicas", "synchronous", "local", "difference"]
        table = Table(columns, accuracies(arguments.seeds))
        record("local_steps", "accuracy on digits", table, beside=f"{arguments.seeds} seeds")


if __name__ == "__main__":
    main()
