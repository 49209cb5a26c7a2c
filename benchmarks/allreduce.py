"""All-reduces against gloo's own, size by size, on the ranks of this machine.

    python -m benchmarks.allreduce [--processes 2] [--sizes 4K:64M:4]

Prints the ratio of gloo's time to each one's (above 1 is faster than gloo), the choice of ``auto`` against the best,
and for shared memory how much of the machine's copying speed it reaches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from benchmarks.results import Table, Value, cell, record
from evener.collectives.tuning.bench import Row
from evener.tools.bench import bench_all_reduce, parse_sizes
from evener.training.reporting.chart import size_text

PEER = "native"


def copy_seconds(nbytes: int, rounds: int = 7) -> float:
    """Median time in which one thread copies ``nbytes``."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def table(rows: list[Row], processes: int) -> Table:
    """A row a size, times in us and gloo's time over it."""
    names, made = list(dict.fromkeys(row.algorithm for row in rows)), []
    for size in dict.fromkeys(row.size for row in rows):
        times = {row.algorithm: row.time for row in rows if row.size == size}
        cells = [cell(1e6 * times[name], "us", ratio=times[PEER] / times[name]) for name in names]
        best = min(seconds for name, seconds in times.items() if name != "auto")
        auto = cell(times["auto"] / best) if "auto" in times else None
        made.append([size_text(size), *cells, auto, _limit(times, size, processes)])
    return Table(["size", *names, "auto / best", "shared memory / copies"], made, "gloo's time over it")


def _limit(times: dict[str, float], size: int, processes: int) -> Value:
    """Time over that of the bytes which an all-reduce in two shots must move through memory: in, out, and the sum."""
    if "shared-memory" not in times:
        return None
    cores = min(processes, len(os.sched_getaffinity(0)))
    copies = copy_seconds(size) * (5 * processes + 1) / (2 * cores)
    return cell(times["shared-memory"] / copies)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sizes", default="4K:64M:4")
    parser.add_argument("--algorithms")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.algorithms.split(",") if arguments.algorithms else None
    result = bench_all_reduce(
        parse_sizes(arguments.sizes), names, processes=arguments.processes, device="cpu"
    )
    if result.wrong:
        raise SystemExit(f"{result.wrong} elements of the sums are wrong")
    record("allreduce", f"{arguments.processes} ranks", table(result.rows, arguments.processes))


if __name__ == "__main__":
    main()
