"""Accuracy of asynchronous training on digits: 4 ranks, and 16 and 64 workers on a virtual clock.

A virtual clock decides which worker computes which samples with which weights; the ledger is that of real training. One
device then trains what the ledger recorded, as ``evener verify --replay`` does. A quarter of the workers is three times
slower. Synchronous and asynchronous training get the same samples in the same order, and batches of 16 samples for each
worker.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset

import evener
from benchmarks.balance import Seen
from benchmarks.interleaved import paired
from benchmarks.results import Table, Value, cell, record
from benchmarks.virtual_clock import VirtualWorkers
from evener.core.config.run_config import RunConfig
from evener.core.observer import Observer
from evener.data.datasets.digits import digits
from evener.distributed.session import Session
from evener.strategies import Asynchronous
from evener.strategies.asynchronous.ledger import Ledger, Merges, Terms, ages
from evener.strategies.asynchronous.strategies import RecordedAsynchronous
from evener.training.builtin_tasks import digits as digits_task
from evener.training.engine import Engine
from evener.training.reporting.drawing import Panel, Point, svg

EACH = 16
"""Samples of a batch for each worker."""
SLOWER = 3.0
"""Times as long as the others a quarter of the workers takes."""
PASSES_EACH = 3
"""Passes over the digits for each worker: so every number of workers trains about 270 batches."""
RULES = {"buffered": (0, 4), "unbuffered": (1, -1)}
"""Of each way the options ``buffer`` and ``staleness``."""


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


OPTIMIZERS = {"SGD 0.02, momentum 0.9": momentum, "AdamW 0.002": adam}


class Trained(NamedTuple):
    """The accuracy on held-out digits after each section, in %, and the virtual time at its end."""

    accuracies: list[float]
    seconds: list[float]
    age: float = 0.0
    """The mean age of gradients, in versions of the weights."""


def perceptron(workers: int, optimizer: Any) -> evener.Task:
    """A small network. An epoch has the digits as often as a section of about 12 batches needs."""
    base = digits_task.task()
    assert base.train is not None
    return dataclasses.replace(
        base,
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        train=ConcatDataset([base.train] * max(1, workers // 8)),
        optimizer=optimizer,
        batch_size=EACH * workers,
    )


def epochs_of(workers: int) -> int:
    return PASSES_EACH * workers // max(1, workers // 8)


def rates(workers: int) -> list[float]:
    """Seconds for a sample: a second for the samples of a batch, or three."""
    return [(SLOWER if worker >= workers * 3 // 4 else 1.0) / EACH for worker in range(workers)]


def sections(workers: int, size: int, terms: Terms, epochs: int, seed: int) -> Iterator[tuple[Merges, float]]:
    """Yields what merges in each section, and how long it takes, by a virtual clock."""
    speeds: dict[int, float] = {}
    for epoch in range(epochs):
        ledger = Ledger(size, terms, range(workers), speeds)
        clock = VirtualWorkers(ledger, rates(workers), seed * 1000 + epoch)
        clock.run()
        speeds = ledger.speeds
        yield ledger.merges, clock.over


def trained(
    task: evener.Task,
    epochs: int,
    session: Session | None = None,
    observers: Sequence[Observer] = (),
    **settings: Any,
) -> list[float]:
    """Returns the accuracy after each epoch."""
    found = []
    config = RunConfig(device="cpu", epochs=epochs, **settings)
    with Engine(task, config, session=session, observers=observers) as engine:
        for batch in engine.batches():
            engine.step(batch)
            if batch.last:
                found.append(held_out_accuracy(engine.model))
    return found


@cache
def _held_out() -> tuple[Tensor, Tensor]:
    images, labels = digits(train=False).tensors
    return images, labels


@torch.no_grad()
def held_out_accuracy(model: nn.Module) -> float:
    """Returns the accuracy on the 360 digits that are held out, in %."""
    images, labels = _held_out()
    return 100 * float((model(images).argmax(dim=1) == labels).double().mean())


def synchronous(workers: int, optimizer: Any, seed: int) -> Trained:
    """Each batch takes as long as its slowest worker."""
    task, epochs = perceptron(workers, optimizer), epochs_of(workers)
    batches = math.ceil(len(task.train) / task.batch_size)  # type: ignore[arg-type]
    slowest = EACH * max(rates(workers))
    seconds = [slowest * batches * (epoch + 1) for epoch in range(epochs)]
    return Trained(trained(task, epochs, seed=seed, strategy="single"), seconds)


def asynchronous(workers: int, optimizer: Any, seed: int, way: str) -> Trained:
    """Trains on one device what workers on a virtual clock would."""
    task, epochs = perceptron(workers, optimizer), epochs_of(workers)
    size, batch = len(task.train), task.batch_size  # type: ignore[arg-type]
    buffer, staleness = RULES[way]
    terms = Terms(batch, buffer or batch, None if staleness < 0 else staleness)
    merges, taken = zip(*sections(workers, size, terms, epochs, seed), strict=True)
    strategy = RecordedAsynchronous(sync_every=math.ceil(size / batch), recorded=merges, ranks=workers)
    old = statistics.mean(age for each in merges for age in ages(each))
    seconds = [sum(taken[: epoch + 1]) for epoch in range(epochs)]
    return Trained(trained(task, epochs, seed=seed, strategy=strategy), seconds, old)


# Real ranks


def on_ranks(seeds: int, optimizer: str) -> dict[str, list[Trained]]:
    """Trains 12 epochs on the ranks of this process group, of which the last is three times slower."""
    ways: dict[str, Any] = {"synchronous": "ddp"}
    ways |= {way: Asynchronous(*rules, sync_every=12) for way, rules in RULES.items()}
    found: dict[str, list[Trained]] = {way: [] for way in ways}
    with Session(device="cpu") as session:
        task, epochs = perceptron(session.world_size, OPTIMIZERS[optimizer]), epochs_of(session.world_size)
        taken = rates(session.world_size)
        factors = ",".join(str(min(taken) / each) for each in taken)
        for seed in range(seeds):
            for way, strategy in ways.items():
                seen, settings = Seen(), {"seed": seed, "strategy": strategy, "throttle": factors}
                accuracies = trained(task, epochs, session, [seen], **settings)
                merges = [enumerate(record.merges) for record in seen.steps]
                old = [number - each[1] for section in merges for number, held in section for each in held]
                found[way].append(Trained(accuracies, [], statistics.mean(old or [0])))
    return found


# What is shown


def compare(seeds: int, workers: Sequence[int] = (4, 16, 64)) -> None:
    """Shows the accuracies, and the paired differences to the synchronous mode with their 95 % intervals."""
    columns = ["workers, optimizer", "updates", "age", "synchronous", "asynchronous", "difference"]
    record(
        "asynchronous", "accuracy on digits", Table(columns, rows(seeds, workers)), beside=f"{seeds} seeds"
    )


def rows(seeds: int, workers: Sequence[int]) -> Iterator[list[Value]]:
    for name, optimizer in OPTIMIZERS.items():
        for number in workers:
            if number == 4:
                found = evener.launch(on_ranks, seeds, name, processes=4, device="cpu")[0]
            else:
                found = {"synchronous": [synchronous(number, optimizer, seed) for seed in range(seeds)]}
                for way in RULES:
                    found[way] = [asynchronous(number, optimizer, seed, way) for seed in range(seeds)]
            together = [run.accuracies[-1] for run in found["synchronous"]]
            for way in RULES:
                ours = [run.accuracies[-1] for run in found[way]]
                age = cell(statistics.mean(run.age for run in found[way]), "versions")
                means = [cell(statistics.mean(each), "%") for each in (together, ours)]
                mean, half = paired(together, ours)
                apart = cell(mean, "points", spread=half if len(ours) > 1 else None)
                who = f"{number} ranks" if number == 4 else str(number)
                yield [f"{who}, {name}", way, age, *means, apart]


def plot(path: Path, seeds: int, workers: int = 16) -> None:
    """Draws the mean accuracy by samples and by virtual time."""
    ways: dict[str, Callable[[int], Trained]] = {
        "synchronous": lambda seed: synchronous(workers, momentum, seed),
        **{way: lambda seed, way=way: asynchronous(workers, momentum, seed, way) for way in RULES},  # type: ignore[misc]
    }
    by_samples: list[tuple[str, list[Point]]] = []
    by_time: list[tuple[str, list[Point]]] = []
    size = len(perceptron(workers, momentum).train)  # type: ignore[arg-type]
    for name, run in ways.items():
        runs = [run(seed) for seed in range(seeds)]
        means = [statistics.mean(column) for column in zip(*(each.accuracies for each in runs), strict=True)]
        times = [statistics.mean(column) for column in zip(*(each.seconds for each in runs), strict=True)]
        by_samples.append((name, [(size * (place + 1), mean) for place, mean in enumerate(means)]))
        by_time.append((name, list(zip(times, means, strict=True))))
    last = [max(line[-1][0] for _, line in lines) for lines in (by_samples, by_time)]
    panels = [
        Panel(f"accuracy by {what}", "%", lines, [(0, "0"), (end, f"{end:,.0f} {unit}")])
        for what, unit, lines, end in (
            ("samples", "samples", by_samples, last[0]),
            ("virtual time", "s", by_time, last[1]),
        )
    ]
    path.write_text(svg(f"{workers} workers, a quarter of them three times slower", panels), encoding="utf-8")
