"""Which trials a plan makes on each number of ranks, in which order, and how long they may take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from evener.core.config.run_config import RunConfig
from evener.tools.plan.candidates import Candidate, candidates_of

Round = list[tuple[Candidate, int]]
"""Trials one after the other: candidates of one number of ranks, each with a batch size."""
START_SECONDS = 4.0
"""About how long it takes to start ranks and to import PyTorch."""
SMALLER, LARGER = 4, 2
"""A batch of a quarter of the size is tried, too, and one of twice the size. What is asked for lies between them, or
not far beyond."""
UNPLANNED = 6
"""About how many more trials are made on each number of ranks, because some were unclear."""
LEAST_STEPS, MOST_STEPS = 4, 40


def rounds_of(ranks: int, config: RunConfig, batch_size: int) -> list[Round]:
    """Returns the trials on a number of ranks, in rounds: the batch and a larger one, a smaller one, the batch once
    more. So if there is no time for all, each way is tried with three sizes before any is repeated. The first way is
    tried with the batch once more at the end of a round."""
    found, smaller = candidates_of(ranks, config), max(ranks, batch_size // SMALLER)
    usual, again = [(each, batch_size) for each in found], (found[0], batch_size)
    larger = [(each, LARGER * batch_size) for each in found]
    rounds = [[*chain.from_iterable(zip(usual, larger, strict=True)), again], [*usual, again]]
    return [rounds[0], *([(each, smaller) for each in found],) * (smaller < batch_size), rounds[1]]


def seconds_of_first(todo: Sequence[Sequence[Round]], seconds: float, cores: int) -> float:
    """Returns the part of the time that the trials on the first number of ranks get, after all have started: in
    proportion to the number of trials, of which about half of the time grows with the ranks that share a core."""
    work = [
        (sum(map(len, rounds)) + UNPLANNED) * (1 + max(1.0, rounds[0][0][0].ranks / cores))
        for rounds in todo
        if rounds[0]
    ]
    return max(0.0, seconds * 2 / 3, seconds - START_SECONDS * len(work)) * work[0] / sum(work)


def steps_in(seconds: float, each: float) -> int:
    """Returns how many steps a trial takes in some seconds."""
    return min(MOST_STEPS, max(LEAST_STEPS, round(seconds / max(each, 1e-6))))
