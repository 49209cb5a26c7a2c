"""What a step takes in one way, whatever the devices: operations, messages and bytes.

The engine takes two steps as single ranks on tensors that have shapes and no memory (:mod:`evener.tools.estimate`). So
every strategy's own code says what it computes and sends, and no formula of a strategy is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from evener.collectives.schedules.algorithms import ALGORITHMS
from evener.core.collector import older_objects_set_apart
from evener.core.config.run_config import RunConfig
from evener.core.task.task import Task
from evener.distributed.mesh import Layout
from evener.errors import ConfigurationError
from evener.strategies.interfaces import StrategySettings
from evener.tools.estimate.estimate import estimate_ranks, refuse_unknowable, settings_of_two_steps
from evener.tools.estimate.traffic import Message
from evener.tools.plan.candidates import Candidate
from evener.torch_internals.dispatch import refusals_not_logged
from evener.training.factory import strategy_of

MOST_STAGES = 16
"""Pipelines with more stages are not estimated: each stage is taken by itself."""


@dataclass(frozen=True)
class RankWork:
    """What one rank does in a step."""

    samples: int
    """Samples of its share."""
    flops: Mapping[str, int]
    """Floating-point operations of its passes, by the type in which they are computed, such as ``bfloat16``."""
    operators: int
    """The number of operators of its passes."""
    moved: int
    """Bytes that these operators read and write."""
    messages: tuple[Message, ...]
    parameters: int
    """Bytes of weights that it holds."""
    optimizer: int
    """Bytes of optimizer state that it holds."""
    needed: int
    """Bytes of memory that it needs."""


@dataclass(frozen=True)
class StepWork:
    """What the ranks of one replica do in a step. All other ranks do the same."""

    candidate: Candidate
    layout: Layout
    ranks: tuple[RankWork, ...]
    """One rank, or with a pipeline one for each stage."""


def knowable(candidate: Candidate) -> Candidate:
    """Returns the candidate with stages of equal numbers of layers, if stages would be cut by measured times, and with
    the default all-reduce: Evener's others send the same gradients, and hold a few buckets at most."""
    candidate = replace(candidate, allreduce=None)
    if candidate.strategy == "pipeline" and not candidate.options:
        return replace(candidate, options=("balance=equal",))
    return candidate


def work_of(
    task: Task, candidate: Candidate, config: RunConfig, batch_size: int, kind: str, rank: int = 0
) -> StepWork:
    """Returns what a step takes.

    Args:
        kind: The kind of device, for which sizes are rounded.
        rank: The rank that is looked at, unless there are several stages.

    Raises:
        ConfigurationError: If the strategy cannot train the task, or it cannot be known before a run.
    """
    own = config.allreduce in ALGORITHMS or config.allreduce in ("auto", "two-level")
    plain = config.replace(device=kind, allreduce=None if own else config.allreduce)
    asked = knowable(candidate).config(plain, batch_size)
    strategy = strategy_of(asked, candidate.ranks)
    refuse_unknowable(asked, strategy)
    layout = strategy.layout(candidate.ranks, StrategySettings())
    stages = layout.slices(["pipeline"])[0]
    stages = stages if len(stages) > 1 else (rank,)
    if len(stages) > MOST_STAGES:
        raise ConfigurationError(f"a pipeline of {len(stages)} stages: at most {MOST_STAGES} are planned")
    with older_objects_set_apart(), refusals_not_logged():  # an estimate collects garbage after each step
        found = estimate_ranks(task, settings_of_two_steps(asked), stages, candidate.ranks, kind)
    index = [layout.data_axis(rank).index for rank in stages]
    return StepWork(
        candidate,
        layout,
        tuple(
            RankWork(
                each.shares[at],
                each.flops,
                each.operators,
                each.moved,
                each.messages,
                each.memory.at_peak["parameters"],
                each.memory.at_peak["optimizer"],
                each.memory.needed,
            )
            for each, at in zip(found, index, strict=True)
        ),
    )
