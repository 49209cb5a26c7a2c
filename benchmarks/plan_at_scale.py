"""What it costs to simulate whole steps on up to 100,000 ranks: seconds of one core, and memory.

    python -m benchmarks.plan_at_scale [--ranks 1000,10000,100000,300000] [--steps 20]

The model is that of a large language model on hosts of eight GPUs. Memory is the peak of the process so far.
"""

from __future__ import annotations

import argparse
import math
import resource
import time

from benchmarks.interleaved import machine
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
    print(machine())
    print(
        "| ranks | all-reduce | CPU seconds | us / (n log2 n) | MB | step p50 | waiting | communication | goodput |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks in map(int, options.ranks.split(",")):
        for algorithm in ALGORITHMS:
            began = time.process_time()
            cost = steps_at_scale(MODEL, ranks, algorithm, options.steps)
            seconds = time.process_time() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            cells = [
                f"{ranks:,}",
                algorithm,
                f"{seconds:.2f}",
                f"{1e6 * seconds / (ranks * math.log2(ranks)):.1f}",
                f"{peak:.0f}",
                f"{cost.step_seconds[1]:.2f} s",
                f"{cost.waiting_share:.1%}",
                f"{cost.communication_share:.1%}",
                f"{cost.goodput:.1%}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
