"""What the best way of a plan costs on many ranks: stragglers, failures and checkpoints."""

from __future__ import annotations

from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.tools.plan.at_scale import CostAtScale, ScaleModel, steps_at_scale
from evener.tools.plan.cluster import Cluster
from evener.tools.plan.message_times import WHOLE
from evener.tools.plan.result import Way
from evener.tools.plan.work import StepWork

MANY = 64
"""With more ranks, a plan simulates whole steps of the best way."""
SLOW_PROBABILITY, SLOW_FACTOR = 1e-5, 1.5
"""How often a rank is slow in a step, and how many times as long it takes then: round figures."""


def cost_at_scale(work: StepWork, way: Way, cluster: Cluster, batch_size: int) -> CostAtScale:
    """Simulates whole steps of a way on all its ranks.

    Raises:
        ValueError: If the ranks of a replica are neither a part of a machine nor whole machines.
    """
    data, failures = work.layout.data_axis(0), cluster.failures
    costs, time = way.costs, way.time
    share = max(time.shares)
    sums, team = costs.rest(batch_size), set(data.team)
    nbytes = sum(
        WHOLE[each.kind] / 2 * each.nbytes
        for each in work.ranks[0].messages
        if len(each.ranks) > len(team) or not team.issuperset(each.ranks)
    )
    inside, between = cluster.machines[0].inside, cluster.between
    model = ScaleModel(
        compute_seconds=time.compute + time.bubble + time.update + costs.blocking(share),
        spread=failures.spread,
        slow_probability=SLOW_PROBABILITY,
        slow_factor=SLOW_FACTOR,
        gradient_nbytes=nbytes * len(data.team),
        ranks_of_host=len(cluster.machines[0].cards),
        inside=(inside.latency_seconds, inside.bytes_per_second),
        between=(between.latency_seconds, between.bytes_per_second),
        overlap=1 - costs.exposed / sums if sums else 0.0,
        device_mttf_seconds=failures.mean_days_of_a_device * 86_400,
        checkpoint_stall_seconds=failures.checkpoint_stall_seconds,
        recovery_seconds=failures.recovery_seconds,
        ranks_of_replica=len(data.team),
        samples_of_replica=batch_size / data.degree,
    )
    named = way.candidate.allreduce or ""
    return steps_at_scale(model, work.layout.world_size, named if named in ALGORITHMS else "ring-tree")
