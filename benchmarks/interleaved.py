"""Measuring in turns: A B C A B C ..., medians over the turns, ratios within one run.

Machines are noisy, so a time by itself says little; two times that were taken in alternation, within a fraction of a
second of each other, say something about each other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender, Work
from benchmarks.results import Cell, Table, Value, cell, spread
from evener.distributed.session import Session


@dataclass(frozen=True)
class Timing:
    """Seconds of one step, the slowest rank's, for every turn."""

    turns: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.turns)


def take_turns(
    contenders: Mapping[str, Contender],
    work: Work,
    session: Session,
    turns: int,
    steps: int,
    warm_up: int = 10,
) -> dict[str, Timing]:
    """Each contender takes ``steps`` steps a turn, in alternation; on all ranks at once."""
    running = {name: contender(work, session) for name, contender in contenders.items()}
    for name in running:
        _steps(running[name], warm_up)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(turns):
        for name, source in running.items():
            seconds[name].append(_slowest(_steps(source, steps)) / steps)
    for source in running.values():
        source.close()  # type: ignore[attr-defined]
    return {name: Timing(values) for name, values in seconds.items()}


def _steps(source: Iterator[None], steps: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        next(source)
    return time.perf_counter() - began


def _slowest(seconds: float) -> float:
    value = torch.tensor([seconds])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def table(results: Mapping[str, Mapping[str, Timing]], reference: str) -> Table:
    """A row a workload: the time of a step and the ratio to the reference, paired turn by turn."""
    names = list(next(iter(results.values())))
    rows: list[list[Value]] = [
        [name, *(timed(timing, timings[reference]) for timing in timings.values())]
        for name, timings in results.items()
    ]
    return Table(["workload", *names], rows, f"time over that of {reference}")


def timed(timing: Timing, reference: Timing) -> Cell:
    """The median of the turns in ms, and of their ratios."""
    around = None if timing is reference else spread(_ratios(timing, reference))
    return cell(1e3 * timing.median, "ms", ratio=ratio(timing, reference), spread=around)


def ratio(timing: Timing, reference: Timing) -> float:
    """Median of the ratios of turns that were next to each other; below 1 is faster than the reference."""
    return statistics.median(_ratios(timing, reference))


def _ratios(timing: Timing, reference: Timing) -> list[float]:
    return [a / b for a, b in zip(timing.turns, reference.turns, strict=True)]


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences second - first of pairs, and half the length of its 95 % interval by Student's t."""
    apart = [b - a for a, b in zip(first, second, strict=True)]
    if len(apart) < 2:
        return apart[0], math.inf
    z, free = statistics.NormalDist().inv_cdf(0.975), len(apart) - 1
    quantile = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return statistics.mean(apart), quantile * statistics.stdev(apart) / len(apart) ** 0.5
