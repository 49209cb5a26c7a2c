"""Makes the division of batches by the costs of their samples, after the ranks have compared some of these."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from evener.balance.shares import parse_max_shares
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Cost
from evener.data.costs import CostDivision, Costs, Fractions
from evener.distributed.control_channel import Channel
from evener.errors import ConfigurationError, DataError, EvenerError


def cost_division(costs: Costs, config: RunConfig, ranks: int, fractions: Fractions) -> CostDivision:
    """Returns how batches are divided over ``ranks`` parts by the costs of their samples.

    Raises:
        ConfigurationError: If limits of the settings do not go with costs.
    """
    multiple = config.share_multiple_of
    if (config.samples_at_once or 0) % multiple:
        raise ConfigurationError(
            f"with {costs.name} each micro-batch is divided, and {config.samples_at_once} samples are no multiple of "
            f"share_multiple_of, {multiple}: make micro_batch a multiple of it, or leave one of them out"
        )
    return CostDivision(costs, fractions, parse_max_shares(config.max_shares, ranks), multiple)


def agreed_costs(cost: Cost | None, dataset: Any, control: Channel, name: str = "Task.cost") -> Costs | None:
    """Returns the costs of the training set's samples, or None if none are given. A collective call.

    Raises:
        TaskError: If the costs do not fit the training set.
        DataError: If one of them is not positive and finite, or not the same on all ranks; names the sample.
    """
    if cost is None:
        return None
    costs, problem = None, None
    try:
        costs = Costs(cost, dataset, name)
    except EvenerError as error:  # of this rank alone, perhaps: the others must hear of it
        problem = error
    own = str(problem) if costs is None else zlib.crc32(costs.probes.tobytes())
    found = control.gather_objects(own)
    if problem is not None:
        raise problem
    assert costs is not None
    failed = next((rank for rank, each in enumerate(found) if isinstance(each, str)), None)
    if failed is not None:
        raise DataError(f"on rank {failed}: {found[failed]}")
    if len(set(found)) > 1:
        raise DataError(_difference(costs, control.gather_objects(costs.probes.tolist())))
    return costs


def _difference(costs: Costs, probes: list[list[float]]) -> str:
    rank = next(rank for rank, each in enumerate(probes) if each != probes[0])
    at = int(np.argmax(np.array(probes[0]) != np.array(probes[rank])))
    return (
        f"{costs.name} of sample {costs.probed[at]} of the training set is {probes[0][at]:g} on rank 0, and "
        f"{probes[rank][at]:g} on rank {rank}: it must be the same on all ranks, or they would divide a batch in "
        "different ways"
    )
