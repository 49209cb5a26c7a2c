"""A calibration learns from runs: what they took beside what it had predicted goes into its costs.

Each run counts as much as the trials, term by term: after ``n`` runs, the costs of a way are the geometric mean of what
the trials and each run have found. A run on a busy machine is noted and does not count.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from evener.distributed.environment import usable_cores
from evener.tools.plan.calibration import Calibration, PastRun
from evener.tools.plan.comparison import ComparedStep
from evener.tools.plan.costs import StepCosts
from evener.tools.plan.plan import BUSY

MOST = 2.0
"""The largest factor by which a run changes a term."""
LEAST_PART = 0.05
"""A term that is less than this part of the step stays as it is."""


def load_now() -> float:
    """Returns the number of other programs that want to compute at this moment. Where the system does not tell, it is
    the mean of the last minute."""
    try:
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        return max(0.0, float(running) - 1)
    except (OSError, IndexError, ValueError):
        return os.getloadavg()[0]


def is_busy(load: float) -> bool:
    """Returns True if so many other programs want to compute that times are uncertain."""
    return load > BUSY * usable_cores()


def with_run(calibration: Calibration, found: ComparedStep, batch_size: int, load: float) -> Calibration:
    """Returns the calibration after a run.

    Args:
        found: The run beside the prediction of ``calibration``.
        load: The number of programs that wanted to compute before it began.
    """
    counts = not is_busy(load)
    run = PastRun(found.candidate.words, batch_size, found.predicted.seconds, found.seconds, load, counts)
    runs = (*calibration.runs, run)
    if not counts:
        return replace(calibration, runs=runs)
    before = 1 + sum(each.counts and each.options == run.options for each in calibration.runs)
    costs = _learned(calibration.costs[found.candidate], found, 1 / (before + 1))
    return replace(calibration, runs=runs, costs=calibration.costs | {found.candidate: costs})


def _learned(costs: StepCosts, found: ComparedStep, weight: float) -> StepCosts:
    """Returns the costs, of which each term has gone a part ``weight`` of the way to what was found."""

    def factor(name: str, measured: float) -> float:
        predicted = found.predicted.terms[name]
        if predicted < LEAST_PART * found.predicted.seconds or measured < LEAST_PART * found.seconds:
            return 1.0
        return float(min(MOST, max(1 / MOST, measured / predicted)) ** weight)

    terms = found.terms
    passes, messages = (factor(name, terms[name]) for name in ("compute", "communication"))
    return replace(
        costs,
        compute=tuple(line.scaled(passes) for line in costs.compute),
        rest=costs.rest.scaled(messages),
        piece=costs.piece * messages,
        input=costs.input.scaled(factor("input", terms["input"])),
    )
