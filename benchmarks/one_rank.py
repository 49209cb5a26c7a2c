"""What a step on one rank costs beside a plain loop: steps of about 0.3, 1 and 10 ms, in alternation, one CPU rank.

All take as many samples in a random order, with the same model, loss and optimizer (AdamW, fused everywhere): a plain
loop over a `DataLoader`, one that picks rows of the tensors by itself, which is the leanest there is, and Evener's
engine. Told are wall time, and the processor's time of the thread that trains, which other processes on the machine
disturb less.

python -m benchmarks.one_rank [--turns 30] [--steps 50]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contenders import Work
from benchmarks.drawn import rand, randint
from benchmarks.interleaved import Timing, table
from benchmarks.results import record
from evener.core.task.task import Task
from evener.distributed.session import Session
from evener.training.engine import Engine

fused_adamw = partial(torch.optim.AdamW, fused=True)


def mlp(width: int, inputs: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 10))


def works() -> list[Work]:
    data = TensorDataset(rand(4096, 64), randint(10, (4096,)))
    return [
        Work("MLP 64-64-10, batch 16", lambda: mlp(64), data, 16),
        Work("MLP 64-512-10, batch 64", lambda: mlp(512), data, 64),
        Work("MLP 64-4096-10, batch 256", lambda: mlp(4096), data, 256),
    ]


def plain(work: Work) -> Iterator[None]:
    """The loop that one writes."""
    torch.manual_seed(0)
    model, loss = work.model(), nn.CrossEntropyLoss()
    optimizer = fused_adamw(model.parameters())
    loader = DataLoader(work.data, work.batch_size, shuffle=True)
    while True:
        for inputs, targets in loader:
            loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def lean(work: Work) -> Iterator[None]:
    """The same without a loader."""
    torch.manual_seed(0)
    model, loss = work.model(), nn.CrossEntropyLoss()
    optimizer = fused_adamw(model.parameters())
    all_inputs, all_targets = work.data.tensors  # type: ignore[attr-defined]
    while True:
        for samples in torch.randperm(len(all_targets)).split(work.batch_size):
            loss(model(all_inputs[samples]), all_targets[samples]).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def ours(work: Work, session: Session) -> Iterator[None]:
    """Evener's engine on one rank, which watches, records and tells as ever."""
    task = Task(model=work.model, loss=nn.CrossEntropyLoss(), optimizer=fused_adamw, train=work.data)
    with Engine(task, session=session, batch_size=work.batch_size, epochs=10**6) as engine:
        for batch in engine.batches():
            engine.step(batch)
            yield


def measure(work: Work, session: Session, turns: int, steps: int) -> list[dict[str, Timing]]:
    """Of all, in turns: wall time, and the thread's."""
    running: dict[str, Iterator[None]] = {
        "plain": plain(work),
        "without a loader": lean(work),
        "Evener": ours(work, session),
    }
    for source in running.values():
        _take(source, steps)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
    for _ in range(turns):
        for name, source in running.items():
            found[name].append(_take(source, steps))
    for source in running.values():
        source.close()  # type: ignore[attr-defined]
    return [
        {name: Timing([turn[kind] for turn in turns_of]) for name, turns_of in found.items()}
        for kind in (0, 1)
    ]


def _take(source: Iterator[None], steps: int) -> tuple[float, float]:
    began, own = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        next(source)
    return (time.perf_counter() - began) / steps, (time.thread_time() - own) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    with Session(device="cpu") as session:
        torch.set_num_threads(1)  # on cores that others use too, threads would wait for each other
        found = {work.name: measure(work, session, arguments.turns, arguments.steps) for work in works()}
    for kind, title in enumerate(("wall time", "the processor's time of the thread that trains")):
        record("one_rank", title, table({name: each[kind] for name, each in found.items()}, "plain"))


if __name__ == "__main__":
    main()
