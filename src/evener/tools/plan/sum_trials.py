"""Times each all-reduce with the gradients of ``ddp``, and says what a step costs with another than the default.

Only the sums are timed, not whole steps: passes and update are the same with each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from evener.collectives.registry import candidates, default, make_all
from evener.collectives.schedules.schedule import Topology
from evener.collectives.tuning.measure import device_of, time_in_turn
from evener.collectives.tuning.select import exposed_seconds
from evener.distributed.hosts import hosts_of
from evener.distributed.session import Session
from evener.tools.plan.at_scale import BACKWARD_SHARE
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts, step_time

BUDGET_SECONDS = 0.05
"""About how long each all-reduce is timed with each size."""


@dataclass(frozen=True)
class SumTimes:
    """How long each all-reduce takes for the gradients of ``ddp`` on a number of ranks."""

    ranks: int
    default: str
    bucket_nbytes: int
    """Bytes of each bucket but the last."""
    total_nbytes: int
    """Bytes of all gradients."""
    seconds: Mapping[str, Mapping[int, float]]
    """By all-reduce and by the bytes of a bucket."""

    def exposed_seconds(self, name: str, passes_seconds: float) -> float:
        """Returns the seconds that sums take after backward."""
        backward, times = BACKWARD_SHARE * passes_seconds, self.seconds[name]
        return exposed_seconds(self.bucket_nbytes, self.total_nbytes, backward, times.__getitem__)


def time_sums(session: Session, bucket_nbytes: int, total_nbytes: int) -> SumTimes:
    """Times the all-reduces that the ranks can use. All ranks must call this together."""
    group, ends = session.world, session.timeout_seconds
    assert group is not None
    topology, device = Topology(hosts_of(group)), device_of(group)
    names = candidates(topology)
    if device.type == "cpu":
        names.append("two-level" if len(topology.hosts) > 1 else "shared-memory")
    sizes = {
        min(start + bucket_nbytes, total_nbytes) - start for start in range(0, total_nbytes, bucket_nbytes)
    }
    with ExitStack() as stack:
        usual = stack.enter_context(default(group, ends)).name
        made, _ = make_all(names, group, ends)
        for each in made.values():
            stack.enter_context(each)
        found = {name: dict[int, float]() for name in made}
        for nbytes in sorted(sizes):
            buffer = torch.zeros(-(-nbytes // 4), device=device)
            took = time_in_turn([*made.values()], buffer, group, BUDGET_SECONDS)
            for name, seconds in zip(made, took, strict=True):
                found[name][nbytes] = seconds
    return SumTimes(session.world_size, usual, bucket_nbytes, total_nbytes, found)


def with_all_reduces(
    costs: Mapping[Candidate, StepCosts], sums: Mapping[int, SumTimes], batch_size: int
) -> dict[Candidate, StepCosts]:
    """Returns the costs, and those of ``ddp`` with each all-reduce that was timed in place of the default.

    Args:
        sums: By the number of ranks.
        batch_size: Samples of a batch, whose backward hides a part of the sums.
    """
    found = dict(costs)
    for way, usual in costs.items():
        times = sums.get(way.ranks)
        if way.strategy != "ddp" or times is None or times.default not in times.seconds:
            continue
        step = step_time(usual, batch_size)
        passes, rest = step.compute + step.waiting, usual.rest
        before = times.exposed_seconds(times.default, passes)
        for name in times.seconds:
            if name != times.default:
                more = times.exposed_seconds(name, passes) - before
                other = replace(rest, overhead_seconds=rest.overhead_seconds + more)
                found[replace(way, allreduce=name)] = replace(usual, rest=other)
    return found
