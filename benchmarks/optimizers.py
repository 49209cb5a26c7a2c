"""What an optimizer's state in 8 bits and updates in backward win of a step's peak, and what they cost of its time.

    python -m benchmarks.optimizers [--turns N] [--steps N]

One rank, one thread, AdamW. The contenders take turns, steps each, and ratios are those of turns next to each other.
Peaks are counted in a further step of each, by an accounting that sees all tensors. Twelve layers of a transformer,
with few samples, so that weights and what belongs to them are most of the peak.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.engines import Contender, in_turns
from benchmarks.interleaved import timed
from benchmarks.recompute import gpt
from benchmarks.results import Table, cell, record

WAYS: dict[str, dict[str, Any]] = {
    "usual": {},
    "update in backward": {"update_in_backward": True},
    "8 bits": {"optimizer_state": "8bit"},
    "both": {"update_in_backward": True, "optimizer_state": "8bit"},
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=10, metavar="N")
    parser.add_argument("--steps", type=int, default=1, metavar="N")
    given: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    running = {name: Contender(gpt(256, 16, 4), **settings) for name, settings in WAYS.items()}
    times = in_turns(running, given.turns, given.steps)
    peaks = {name: each.peak() for name, each in running.items()}
    for each in running.values():
        each.close()
    rows = [
        [
            name,
            cell(peaks[name] / 2**20, "MiB"),
            cell(peaks[name] / peaks["usual"]),
            timed(taken, times["usual"]),
        ]
        for name, taken in times.items()
    ]
    columns = ["optimizer", "peak", "of the usual", "a step"]
    record("optimizers", "one rank", Table(columns, rows, "time over that of the usual update"))


if __name__ == "__main__":
    main()
