"""What it costs to simulate whole steps on up to 100,000 ranks: seconds of one core, and memory.

    python -m benchmarks.plan_at_scale [--ranks 1000,10000,100000,300000] [--steps 20]

The model is that of a large language model on hosts of eight GPUs. Memory is the peak of the process so far.
"""

from __future__ import annotations

import argparse
import itertools
import math
import resource
import time

from benchmarks.results import Table, Value, cell, record
from evener.tools.plan.at_scale import ScaleModel, steps_at_scale

DAY = 86_400.0
MODEL = ScaleModel(
    compute_seconds=4.0,
    spread=0.09,
    slow_probability=1e-5,
    slow_factor=1.5,
    gradient_nbytes=16e9,
    ranks_of_host=8,
    inside=(3e-6, 400e9),
    between=(10e-6, 200e9),
    overlap=0.9,
    device_mttf_seconds=16_384 * 54 * DAY / 466,
    checkpoint_stall_seconds=5.0,
    recovery_seconds=600.0,
)
ALGORITHMS = ("ring", "tree", "ring-tree")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1000,10000,100000,300000")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    columns = ["ranks, all-reduce", "CPU", "over n log2 n", "memory"]
    columns += ["simulated: step p50", "waiting", "communication", "goodput"]
    found = itertools.product(map(int, options.ranks.split(",")), ALGORITHMS)
    record("plan_at_scale", "one process", Table(columns, (row(*each, options.steps) for each in found)))


def row(ranks: int, algorithm: str, steps: int) -> list[Value]:
    began = time.process_time()
    cost = steps_at_scale(MODEL, ranks, algorithm, steps)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    parts = cost.waiting_share, cost.communication_share, cost.goodput
    own = [cell(seconds, "s"), cell(1e6 * seconds / (ranks * math.log2(ranks)), "us"), cell(peak, "MB")]
    return [
        f"{ranks:,}, {algorithm}",
        *own,
        cell(cost.step_seconds[1], "s"),
        *(cell(100 * part, "%") for part in parts),
    ]


if __name__ == "__main__":
    main()
