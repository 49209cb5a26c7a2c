"""Where a model is cut into stages: by what its layers take, against equal numbers of layers and against equal ranks.

    python -m benchmarks.pipeline [--stages 2 4] [--steps 20] [--turns 5]

The layers of the model differ by 10x in cost. On unequal ranks, rank 0 is emulated to run at a third of its speed; the
cut that ignores it is that of equal ranks. Each is taken in turns; a step is compared with what its schedule predicts
from the mean times of its stages. It needs a core for each stage: ranks that share one measure the machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evener
from benchmarks.drawn import randn
from benchmarks.results import Table, cell, record
from evener.distributed.session import Session
from evener.strategies.pipeline.pipeline import Pipeline, draw
from evener.strategies.pipeline.schedule import bubble, length
from evener.training.engine import Engine

WIDTH, SAMPLES, BATCH = 256, 1024, 256
COSTS = (1, 1, 1, 1, 1, 1, 1, 1, 1, 10, 1, 10, 1, 10, 10, 10)
"""Of the layers, one beside the other."""


class Layer(nn.Module):
    """As dear as ``cost`` matrices of the same width."""

    def __init__(self, cost: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, cost * WIDTH // 2), nn.Linear(cost * WIDTH // 2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def task() -> evener.Task:
    return evener.Task(
        model=lambda: nn.Sequential(*map(Layer, COSTS)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        train=TensorDataset(randn(SAMPLES, WIDTH), randn(SAMPLES, WIDTH)),
        batch_size=BATCH,
    )


def steps(engine: Engine) -> Iterator[None]:
    for batch in engine.batches():
        engine.step(batch)
        yield


def measure(throttle: str | None, schedule: str, turns: int, number: int) -> list[dict[str, Any]]:
    """For each way to cut, seconds of a step, and what its schedule predicts and measures."""
    torch.set_num_threads(1)
    with Session(device="cpu") as session, ExitStack() as stack:
        micros = 4 * session.world_size
        computed = Pipeline(schedule=schedule, microbatches=micros)
        ways: dict[str, tuple[Pipeline, str | None]] = {
            "computed": (computed, None),
            "equal numbers of layers": (
                Pipeline(schedule=schedule, microbatches=micros, balance="equal"),
                None,
            ),
        }
        if throttle is not None:
            # Fixed weights stand in the place of the measured speeds.
            ways = {
                "computed": (computed, None),
                "speed ignored": (computed, ",".join("1" * session.world_size)),
            }
        running: dict[str, tuple[Engine, Iterator[None]]] = {}
        for name, (strategy, weights) in ways.items():
            made = Engine(
                task(),
                session=session,
                strategy=strategy,
                throttle=throttle,
                balance=weights or "equal",
                epochs=10**6,
                device="cpu",
            )
            engine = stack.enter_context(made)
            running[name] = engine, steps(engine)
            list(itertools.islice(running[name][1], 3))
        return [_turns(name, *one, turns, number) for name, one in running.items()]


def _turns(name: str, engine: Engine, source: Iterator[None], turns: int, number: int) -> dict[str, Any]:
    seconds, ratios, bubbles = [], [], []
    for _ in range(turns):
        began = time.perf_counter()
        for _ in range(number):
            next(source)
        seconds.append((time.perf_counter() - began) / number)
        drawing = draw(engine.learner)
        ratios.append(length(drawing.measured) / length(drawing.predicted))
        bubbles.append((bubble(drawing.predicted), bubble(drawing.measured)))
    forward: Any = engine.model.forward
    middle = [statistics.median(column) for column in zip(*bubbles, strict=True)]
    return {
        "name": name,
        "cut": forward.stages.cut,
        "seconds": statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "bubbles": middle,
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    made = []
    for row in rows:
        step = cell(1e3 * row["seconds"], "ms", ratio=row["seconds"] / rows[0]["seconds"])
        predicted, measured = (100 * each for each in row["bubbles"])
        bubbles = cell(measured, "%", predicted=predicted)
        made.append([row["name"], str(row["cut"]), step, cell(row["ratio"]), bubbles])
    columns = ["cut", "begins at", "a step", "measured over predicted", "bubbles"]
    record("pipeline", title, Table(columns, made, "time over that of the computed cut"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    for stages in arguments.stages:
        if stages > (os.cpu_count() or 1):
            print(f"\n{stages} stages on {os.cpu_count()} cores: ranks share them, and times say little")
        slow = ",".join(["0.34", *["1"] * (stages - 1)])
        for throttle, title in ((None, "equal ranks"), (slow, "one rank at 0.34 of its speed")):
            rows = evener.launch(
                measure,
                throttle,
                arguments.schedule,
                arguments.turns,
                arguments.steps,
                processes=stages,
                device="cpu",
            )[0]
            show(f"{stages} stages, {title}", rows)


if __name__ == "__main__":
    main()
