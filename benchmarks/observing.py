"""What ``evener run --observe --run-dir`` adds to a step of a DDP script: with and without, in turns, one CPU rank.

python -m benchmarks.observing [--turns 12] [--steps 120]

With one rank nobody waits for another, so that all of the difference is the profiler's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.drawn import rand
from benchmarks.results import Table, cell, record
from evener.distributed.ddp_profiler.profiler import DdpProfiler
from evener.distributed.ddp_profiler.rank_file import RankFileWriter

WIDTH, BATCH = 32, 4


def step_seconds(layers: int, steps: int, profiler: AbstractContextManager[object]) -> float:
    """The median of a step of a stack of small layers, whose work is little beside Python's."""
    seconds: list[float] = []
    with profiler:
        stack = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = DistributedDataParallel(nn.Sequential(*stack))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        began = time.perf_counter()
        for (x,) in DataLoader(TensorDataset(rand(steps * BATCH, WIDTH)), batch_size=BATCH):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
    return statistics.median(seconds[len(seconds) // 4 :])


def measure(layers: int, turns: int, steps: int, directory: Path) -> tuple[float, float]:
    """Seconds of a step without the profiler, and what it adds: medians of turns."""
    plain, added = [], []
    for _ in range(turns):
        before = step_seconds(layers, steps, nullcontext())
        observed = step_seconds(layers, steps, DdpProfiler(RankFileWriter(directory).write))
        after = step_seconds(layers, steps, nullcontext())
        plain.append((before + after) / 2)
        added.append(observed - plain[-1])
    return statistics.median(plain), statistics.median(added)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for layers in (3, 12, 48):
            found = measure(layers, arguments.turns, arguments.steps, Path(directory))
            rows.append([str(2 * layers), *(cell(1e3 * each, "ms") for each in found)])
    dist.destroy_process_group()
    record("observing", "one CPU rank", Table(["parameters", "a step", "the profiler adds"], rows))


if __name__ == "__main__":
    main()
