"""What `--workers auto` makes of data that have to be decoded, beside fixed numbers of workers, in alternation.

    python -m benchmarks.workers [--turns 15] [--seconds 1] [--settle 12] [--threads N]

========  =============================================================================================================
tensors   rows of tensors, which cost nothing to read: workers could only lose
pictures  pictures of 64 x 64 points that are inflated and unfiltered as a PNG is, read in a part of a step
heavy     pictures of 160 x 160 points, read in about as long as the rest of a step takes
waiting   pictures whose files come from afar: each is waited for, which takes no core
========  =============================================================================================================

One rank. Each contender trains on for ``--seconds`` a turn; ``auto`` has chosen before the first. The last column is
the number that it has chosen. A model's threads and workers share the cores: with ``--threads 1`` one is left. Told are
wall time, and the processor's time of the thread that trains, which other programs disturb less: reading there, or
what it takes to get a batch from a worker.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks.drawn import rand, randint
from benchmarks.interleaved import machine
from evener.core.task.task import Task
from evener.training.engine import Engine

_AHEAD = 5
"""Batches that two workers have read when they are asked for the next one, and one more."""
_FILLING_SECONDS = 0.4
WORKERS: tuple[int | str, ...] = (0, 1, 2, "auto")


@cache
def packed(size: int) -> list[bytes]:
    """Pictures as PNG packs them: each row less the row above, deflated."""
    drawn = np.random.default_rng(0)
    rows = np.cumsum(drawn.integers(-3, 4, (64, size, size * 3)), axis=1).astype(np.uint8)
    filtered = np.diff(rows, axis=1, prepend=np.zeros((64, 1, size * 3), np.uint8)).astype(np.uint8)
    return [zlib.compress(each.tobytes()) for each in filtered]


class Pictures(Dataset[Any]):
    """4096 of them, in ten classes; ``afar`` seconds go by before a file is there."""

    def __init__(self, size: int, afar: float = 0.0) -> None:
        self._size, self._afar = size, afar
        self._files = packed(size)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._afar)
        filtered = np.frombuffer(zlib.decompress(self._files[index % 64]), np.uint8)
        rows = np.cumsum(filtered.reshape(self._size, -1), axis=0, dtype=np.uint8)
        pixels = rows.reshape(self._size, self._size, 3).transpose(2, 0, 1).astype(np.float32)
        return torch.from_numpy((pixels - 127) / 64), index % 10


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


@dataclass(frozen=True)
class Work:
    """What is trained."""

    data: Any
    model: Any
    batch_size: int


def works() -> dict[str, Work]:
    return {
        "tensors": Work(TensorDataset(rand(4096, 256), randint(10, (4096,))), small, 64),
        "pictures": Work(Pictures(64), convolutions, 32),
        "heavy": Work(Pictures(160), convolutions, 16),
        "waiting": Work(Pictures(64, afar=0.001), convolutions, 32),
    }


class Running:
    """A training that goes on for a while, again and again."""

    def __init__(self, work: Work, workers: int | str) -> None:
        task = Task(work.model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, train=work.data)
        settings: dict[str, Any] = {"device": "cpu", "epochs": 10**6, "batch_size": work.batch_size}
        self.engine = Engine(task, workers=workers, **settings)
        self._steps = self._taken()

    def _taken(self) -> Iterator[None]:
        for batch in self.engine.batches():
            self.engine.step(batch)
            yield

    def go_on(self, seconds: float) -> tuple[float, float]:
        """Seconds of a step, and those of its thread.

        What workers read before and after it, in nobody's time, is neither merit nor burden.
        """
        for _ in range(_AHEAD):
            next(self._steps)
        began, own, steps = time.perf_counter(), time.thread_time(), 0
        while time.perf_counter() - began < seconds:
            next(self._steps)
            steps += 1
        taken = (time.perf_counter() - began) / steps, (time.thread_time() - own) / steps
        time.sleep(_FILLING_SECONDS)
        return taken

    def close(self) -> None:
        self._steps.close()  # type: ignore[attr-defined]
        self.engine.close()


Times = list[tuple[float, float]]


def measured(work: Work, turns: int, seconds: float, settle: float) -> tuple[dict[str, Times], int]:
    """Seconds of a step of each contender, turn by turn, and the number that was chosen."""
    running = {str(workers): Running(work, workers) for workers in WORKERS}
    for name, each in running.items():
        each.go_on(settle if name == "auto" else 1.0)
    found: dict[str, Times] = {name: [] for name in running}
    for _ in range(turns):
        for name, each in running.items():
            found[name].append(each.go_on(seconds))
    chosen = running["auto"].engine.feed.readers.count
    for each in running.values():
        each.close()
    return found, chosen


def cell(times: Times, reference: Times) -> str:
    ratio = statistics.median(a / b for (a, _), (b, _) in zip(times, reference, strict=True))
    wall, own = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return f"{wall:.1f} ms ({ratio:.2f}x), {own:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--settle", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default=",".join(works()))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{machine()}, {options.threads} threads")
    print("| data | " + " | ".join(f"workers {workers}" for workers in WORKERS) + " | chosen |")
    print("|---" * (len(WORKERS) + 2) + "|")
    for name in options.only.split(","):
        found, chosen = measured(works()[name], options.turns, options.seconds, options.settle)
        cells = [cell(times, found["0"]) for times in found.values()]
        print(f"| {name} | {' | '.join(cells)} | {chosen} |", flush=True)


if __name__ == "__main__":
    main()
