"""The proof: the same steps on one device and divided over ranks, and how far the weights then lie apart.

Sums of floating-point numbers depend on the order in which they are added, and a division of the work changes that
order. So the weights are not equal to the last bit, but in float64 they agree to about 1e-15 a step, while a wrong
average, a lost sample or a wrong statistic of BatchNorm shows as 1e-3 and more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener import checkpoint
from evener.config import RunConfig
from evener.engine import Engine
from evener.errors import ConfigurationError
from evener.fitting import check_plan
from evener.runtime.environment import Environment
from evener.runtime.launch import is_launched, launch
from evener.runtime.session import Session
from evener.task import TaskLike, resolve
from evener.tasks import BUILT_IN

TOLERANCES = {"float64": 1e-9, "float32": 1e-2, "bfloat16": 0.1, "float16": 0.1}
"""Largest relative difference of weights that rounding explains, by type."""


@dataclass(frozen=True)
class Trajectory:
    """What one rank remembers of the steps it took."""

    losses: list[float]
    weights: dict[str, Tensor]
    """Parameters and buffers at the end; kept by rank 0 alone."""
    digest: str
    plain_dropouts: int
    """Dropout layers of torch, which draw other masks on every rank."""


@dataclass(frozen=True)
class Verification:
    """How a division of the work compares with one device."""

    task: str
    strategy: str
    processes: int
    shares: str
    dtype: str
    steps: int
    batch_size: int
    micro_batch: int | None
    reference_losses: list[float]
    losses: list[float]
    max_relative_loss_error: float
    max_relative_weight_error: float
    """Over all parameters and buffers, the largest of max|a - b| / max|a|, where a is the reference."""
    worst_parameter: str
    weight_errors: dict[str, float]
    replicas_identical: bool
    tolerance: float
    passed: bool
    hint: str = ""


def verify(
    task: TaskLike,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    **settings: Any,
) -> Verification:
    """Trains the same steps on one device and divided, and compares.

    Args:
        task: As for :func:`evener.fit`; building it and loading its data must be deterministic.
        config: The division: processes, balance (the shares), strategy, steps, batch_size, micro_batch, dtype.
        options: Keyword arguments for the task's function.
        tolerance: Largest ``max_relative_weight_error`` that passes; by default what rounding explains.

    Raises:
        ConfigurationError: For settings that cannot work together.
    """
    config = (config or RunConfig()).replace(**settings)
    config = config.replace(dtype=config.dtype or "float64", steps=config.steps or 20)
    if is_launched():
        raise ConfigurationError(
            "verify starts ranks of its own: call it in one process, without torchrun or srun"
        )
    build = resolve(task, BUILT_IN, options)
    processes = check_plan(config)
    if processes < 2:
        raise ConfigurationError("there is nothing to verify with 1 process: give at least --processes 2")
    built = build()
    if built.partition == "sample":
        raise ConfigurationError(
            "the task's data are partitioned by sample: who holds a sample decides which batch it is in, so that one "
            "device cannot take the same steps; verify the task with the same data in one place, partition='batch'"
        )
    alone = Environment(rank=0, world_size=1, local_rank=0, local_world_size=1, host="localhost", node=0)
    alike = {"balance": "equal", "caps": None, "quantum": 1, "throttle": None, "throttle_at": ()}
    reference_config = config.replace(strategy="single", processes=1, **alike)
    reference = _trajectory(task, options, reference_config, alone)
    divided = launch(
        _trajectory,
        task,
        options,
        config,
        processes=processes,
        timeout_seconds=config.timeout_seconds,
        device=config.device,
    )
    limit = TOLERANCES[str(config.dtype)] if tolerance is None else tolerance
    return _compare(
        reference,
        divided,
        config.replace(batch_size=config.batch_size or built.batch_size),
        built.name,
        limit,
    )


def _trajectory(
    task: TaskLike,
    options: Mapping[str, Any] | None,
    config: RunConfig,
    environment: Environment | None = None,
) -> Trajectory:
    device, timeout_seconds = config.device, config.timeout_seconds
    with Session(device=device, timeout_seconds=timeout_seconds, environment=environment) as session:
        losses: list[float] = []
        with Engine(
            resolve(task, BUILT_IN, options)(),
            config,
            session=session,
            on_step=lambda step: losses.append(step.loss),
        ) as engine:
            for batch in engine.batches():
                engine.step(batch)
            named = engine.strategy.tensors()
            return Trajectory(
                losses=losses,
                weights=_kept(named) if session.rank == 0 else {},
                digest=checkpoint.weights_digest(named),
                plain_dropouts=sum(_is_plain_dropout(module) for module in engine.model.modules()),
            )


def _kept(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in named.items()}


def _is_plain_dropout(module: nn.Module) -> bool:
    return type(module).__module__ == "torch.nn.modules.dropout" and getattr(module, "p", 0) > 0


def _compare(
    reference: Trajectory, divided: list[Trajectory], config: RunConfig, name: str, tolerance: float
) -> Verification:
    errors = {
        name: relative_error(value, divided[0].weights[name]) for name, value in reference.weights.items()
    }
    worst = max(errors, key=lambda name: _rank_error(errors[name]))
    identical = len({trajectory.digest for trajectory in divided}) == 1
    passed = identical and errors[worst] <= tolerance and len(reference.losses) == len(divided[0].losses)
    return Verification(
        task=name,
        strategy=config.strategy,
        processes=len(divided),
        shares=config.balance,
        dtype=str(config.dtype),
        steps=len(reference.losses),
        batch_size=config.batch_size or 0,
        micro_batch=config.micro_batch,
        reference_losses=reference.losses,
        losses=divided[0].losses,
        max_relative_loss_error=max(
            map(_relative, reference.losses, divided[0].losses), key=_rank_error, default=0.0
        ),
        max_relative_weight_error=errors[worst],
        worst_parameter=worst,
        weight_errors=errors,
        replicas_identical=identical,
        tolerance=tolerance,
        passed=passed,
        hint="" if passed else _hint(reference, identical),
    )


def relative_error(reference: Tensor, other: Tensor) -> float:
    """max|a - b| / max|a|, or max|b| where a is zero.

    Places where both are the same count as equal, also if that is an infinity or NaN (a mask of attention, say); where
    only one side is not finite, the result is not finite either. Such values have no part in max|a|.
    """
    a, b = reference.double(), other.double()
    if a.numel() == 0:
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).max().item()
    scale = a.abs().nan_to_num(0.0, posinf=0.0).max().item()
    return float(difference / scale if scale else difference)


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / (abs(a) or 1.0)


def _rank_error(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _hint(reference: Trajectory, identical: bool) -> str:
    if not identical:
        return "the replicas differ from each other: something in the model draws or computes differently on each rank"
    if reference.plain_dropouts:
        return (
            f"the model has {reference.plain_dropouts} dropout layers of torch.nn, which draw other masks on each "
            "rank; evener.nn.Dropout draws them by sample"
        )
    return (
        "look at the first step whose losses differ: a loss that compares samples with each other, a layer that draws "
        "random numbers or mixes samples, or a dataset that does not return the same sample twice"
    )
