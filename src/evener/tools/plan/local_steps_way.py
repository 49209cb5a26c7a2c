"""What local steps would take in place of a sum of gradients in each step. That is another algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from evener.balance.time_model import Line
from evener.core.config.run_config import RunConfig
from evener.errors import EvenerError
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import NOTHING, StepCosts, StepTime
from evener.tools.plan.result import Way
from evener.training.factory import check_division

SYNC_EVERY = 50
"""The number of batches after which replicas merge."""
WORTH_IT = 0.8
"""The part of the fastest way's time that another algorithm must not take more than, to be worth a look."""
MORE_SPREAD = 0.1
"""What it adds to the relative standard deviation that steps of this kind were not tried."""

Timed = Callable[[StepCosts, Candidate], StepTime]


def by_local_steps(way: Way, timed: Timed, alone: Line = NOTHING) -> Way:
    """Returns a way of data parallelism with merges of weights in place of sums of gradients.

    Args:
        timed: Predicts the time of a step with given costs.
        alone: What comes after the passes of a single device, its update for example, which stays in each step.
    """

    def rarely(whole: float, stays: float) -> float:
        whole = max(0.0, whole)
        stays = max(0.0, min(whole, stays))
        return stays + (whole - stays) / SYNC_EVERY

    rest = way.costs.rest
    costs: StepCosts = replace(
        way.costs,
        rest=Line(
            rarely(rest.overhead_seconds, alone.overhead_seconds),
            rarely(rest.seconds_per_sample, alone.seconds_per_sample),
        ),
        exposed=way.costs.exposed / SYNC_EVERY,
        hidden=0.0,
        spread=math.hypot(way.costs.spread, MORE_SPREAD) if way.costs.is_measured else way.costs.spread,
        sizes=(),
    )
    candidate = replace(way.candidate, strategy="diloco", options=(f"sync_every={SYNC_EVERY}",))
    return Way(
        candidate, timed(costs, candidate), costs, algorithm=f"replicas merge every {SYNC_EVERY} batches"
    )


def fastest_by_local_steps(ways: Sequence[Way], config: RunConfig, timed: Timed) -> Way | None:
    """Returns the fastest way with local steps, by what was measured of data parallelism. None if it is not much faster
    than all ``ways``, or if the settings do not go with it."""
    alone = next((way.costs.rest for way in ways if way.candidate.ranks == 1), None)
    if alone is None:
        return None
    found = [by_local_steps(way, timed, alone) for way in ways if way.candidate.strategy == "ddp"]
    limit = WORTH_IT * min(way.time.seconds for way in ways)
    for way in sorted(found, key=lambda each: each.time.seconds):
        if way.time.seconds > limit:
            break
        try:
            asked = config.replace(strategy="diloco", strategy_option=way.candidate.options, mesh=None)
            check_division(asked, way.candidate.ranks)
        except EvenerError:
            continue
        return way
    return None
