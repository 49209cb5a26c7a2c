"""What a step costs each of thousands of ranks that tell each other of it: by rows of all, and by sums.

    python -m benchmarks.many_ranks [--ranks 64,256,1024,4096] [--steps 60]

One rank on one core, to which a made-up network gives at once what the others would say. Measured is the processor's
time of what this rank does besides training: its row is posted, what all have said is read, and the balancer learns and
decides; of every step, those in which it fits lines or looks at what is to be gained among them. Networks are left out:
what they carry in a step is counted.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from unittest import mock

import numpy as np

from benchmarks.results import Table, Value, cell, record
from evener.balance import BySpeed
from evener.balance.by_speed_large import BySpeedOfMany
from evener.distributed.control_channel import Pending, Rows
from evener.distributed.mesh import Layout, Mesh
from evener.hardware.memory.step_usage import NOTHING
from evener.training.step.exchange import ByRows, BySums, GatheredStep
from evener.training.step.step import RankStats

OWN = 3
SAMPLES = 32


class _Network:
    """Of ``ranks`` that say what this one says, each with a time of its own."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self.numbers = ranks, 0
        self.seconds = np.ones(ranks)

    def exchange(self, values: Sequence[float]) -> Rows:
        self.numbers += len(values) * self._ranks
        at = RankStats._fields.index("compute_seconds")
        rows = [[*values[:at], seconds, *values[at + 1 :]] for seconds in self.seconds.tolist()]
        return Pending(lambda: rows)

    def start(self, added: Sequence[float], greatest: Sequence[float]) -> mock.Mock:
        self.numbers += len(added) + len(greatest)
        told = [self._ranks * value for value in added], list(greatest)
        return mock.Mock(wait=lambda: told)


def measured(ranks: int, steps: int, by_sums: bool) -> tuple[list[float], int]:
    """Seconds of the processor in each step, and numbers that this rank was sent."""
    mesh, network = Mesh(Layout({"data": ranks}), OWN, None, 1.0, timedelta(seconds=1)), _Network(ranks)
    speech = mock.Mock(wants_rows=False)
    telling = BySums(network, mesh, network, lambda: speech) if by_sums else ByRows(network, mesh)
    noise = np.random.default_rng(0).lognormal(0, 0.03, (steps, ranks))
    few, many = BySpeed(ranks), BySpeedOfMany(ranks, OWN)
    found = []
    for step in range(steps):
        network.seconds = 0.01 * noise[step]
        own, signal = float(network.seconds[OWN]), RankStats(SAMPLES, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
        signal = signal._replace(compute_seconds=own)
        speech.line = lambda: many.line() if many.asks else ()
        shares = (many if by_sums else few).shares(step, SAMPLES * ranks)
        speech.voice = lambda _, shares=shares, own=own: many.voice(shares[OWN], own)
        hearing = telling.start(step + 1, signal, NOTHING, None)
        gc.collect()  # what the made-up network leaves is not collected in what is measured
        began = time.process_time()
        heard: GatheredStep = hearing()
        if by_sums:
            assert heard.speeds is not None
            many.hear(step, shares, own, heard.speeds, heard.lines)
        else:
            assert heard.rows is not None
            few.observe(step, shares, heard.rows.compute_seconds)
        found.append(time.process_time() - began)
    return found, network.numbers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="64,256,1024,4096")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    columns = [f"{by}: {of}" for by in ("rows", "sums") for of in ("mean", "most", "numbers a step")]

    def row(ranks: int) -> list[Value]:
        cells: list[Value] = []
        for by_sums in (False, True):
            seconds, numbers = measured(ranks, options.steps, by_sums)
            times = [cell(1e3 * each, "ms") for each in (statistics.fmean(seconds), max(seconds))]
            cells += [*times, cell(numbers // options.steps)]
        return [str(ranks), *cells]

    rows = map(row, map(int, options.ranks.split(",")))
    record("many_ranks", "one rank's own time in a step", Table(["ranks", *columns], rows))


if __name__ == "__main__":
    main()
