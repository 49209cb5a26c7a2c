"""The comparison of a divided run with one device, as a record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evener.components.amp.policy import Precision
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError
from evener.tools.verify import rounding_floor as floors
from evener.tools.verify.hints import Evidence, hint
from evener.tools.verify.rounding_floor import Kind, Numbers, Place
from evener.tools.verify.trajectory import Trajectory
from evener.training.factory import balance_of, strategy_of

LIMIT = 20.0
"""The most times the floor that rounding explains.

Over models, optimizers, types, shares and 2 to 100 steps, right training lay up to 2.6 times the floor apart, and up to
5 in small networks with BatchNorm in bfloat16; gradients averaged over two ranks 38 times and more in bfloat16, and
millions of times in the other types (docs/exactness.md).
"""


@dataclass(frozen=True)
class Verification:
    """How a division of the work compares with one device."""

    task: str
    """Its name."""
    strategy: str
    """What divided the work."""
    processes: int
    """Ranks of the divided run."""
    shares: str
    """What divided the batches, in words."""
    dtype: str
    """The type in which both computed, or the precision."""
    steps: int
    """How many both took."""
    batch_size: int
    """Samples of a batch over all ranks."""
    micro_batch: int | None
    """Samples of a micro-batch over all ranks; None for whole batches."""
    reference_losses: list[float]
    """Of one device, by step."""
    losses: list[float]
    """Of the divided run, by step."""
    max_relative_loss_error: float
    """The largest of ``|a - b| / |a|``, where a is the reference."""
    max_relative_weight_error: float
    """Over all parameters with a real gradient, the largest of max|a - b| / max|a|, where a is the reference."""
    worst_parameter: str
    """The one with the largest."""
    weight_errors: dict[str, float]
    """By name, of all parameters and buffers."""
    floor: float
    """What ``max_relative_weight_error`` is between runs on one device that differ by rounding alone."""
    times_floor: float
    """The largest of all differences (losses, gradients, weights, buffers), each as a multiple of its own floor."""
    worst: str
    """Where that is, in words."""
    times_floor_by_kind: dict[str, float]
    """The largest of each :class:`~evener.tools.verify.rounding_floor.Kind`: ``loss``, ``statistic`` (a buffer, as
    the first forward pass left it), ``gradient``, ``weight`` and ``buffer``."""
    judged_absolutely: list[str]
    """Parameters whose gradient is mathematically zero, so that rounding alone moved them."""
    reordered: bool
    """Whether the floor was measured with the samples of each batch in another order."""
    replicas_identical: bool
    """Whether all ranks ended with the same bits."""
    limit: float
    """The most times the floor that passes."""
    tolerance: float | None
    """If given, the most ``max_relative_weight_error`` that passes, in place of ``limit``."""
    passed: bool
    """Whether the divided training is that of one device."""
    hint: str = ""
    """Where to look, if it is not."""

    def __repr__(self) -> str:
        """In one line; the fields hold the rest."""
        found = "the same training" if self.passed else f"NOT the same training: {self.worst}"
        return (
            f"<Verification of {self.task}: {found}, {self.times_floor:.3g} times the floor, {self.steps} steps on "
            f"{self.processes} processes>"
        )


@dataclass(frozen=True)
class Apart:
    """How far a run lies apart from the reference."""

    numbers: Numbers
    weight_errors: dict[str, float]
    """The relative error of each parameter and buffer."""

    @classmethod
    def of(cls, reference: Trajectory, other: Trajectory) -> Apart:
        """The comparison of two runs, which needs neither of them any more."""
        errors = {
            name: relative_error(value, other.weights[name]) for name, value in reference.weights.items()
        }
        return cls(floors.differences(reference, other), errors)


@dataclass(frozen=True)
class Runs:
    """What is compared."""

    reference: Trajectory
    divided: Sequence[Trajectory]
    """Of all ranks."""
    disturbed: Sequence[Apart]
    """How far runs on one device, each disturbed by rounding, lie apart from the reference."""
    reordered: bool = True
    own_loss: bool = False
    """Whether the user counts the terms of the loss."""


def compare(runs: Runs, config: RunConfig, name: str, tolerance: float | None = None) -> Verification:
    """The record of a comparison; ``config`` is that of the divided run, with its dtype and batch size.

    Raises:
        ConfigurationError: If the divided run came to other tensors than one device has.
    """
    reference, divided = runs.reference, runs.divided[0]
    _check_whole(reference, divided)
    apart = Apart.of(reference, divided)
    measured = Measured.of(runs, apart, torch.finfo(type_of(config)).eps)
    errors = apart.weight_errors
    identical = len({trajectory.digest for trajectory in runs.divided}) == 1
    complete = len(reference.losses) == len(divided.losses)
    largest = _largest({name: errors[name] for name in measured.real} or errors)
    top = floors.worst(measured.times)
    within = measured.times[top] <= LIMIT if tolerance is None else errors[largest] <= tolerance
    passed = identical and complete and within
    evidence = Evidence(reference, runs.divided, measured.times, LIMIT, runs.reordered, runs.own_loss)
    return Verification(
        task=name,
        strategy=str(strategy_of(config, len(runs.divided))),
        processes=len(runs.divided),
        shares=balance_of(config, len(runs.divided), unlike=False),
        dtype=config.dtype or _precision(config).words,
        steps=len(reference.losses),
        batch_size=config.batch_size or 0,
        micro_batch=config.samples_at_once,
        reference_losses=reference.losses,
        losses=divided.losses,
        max_relative_loss_error=max(
            map(_relative, reference.losses, divided.losses), key=_rank_error, default=0.0
        ),
        max_relative_weight_error=errors[largest],
        worst_parameter=largest,
        weight_errors=errors,
        floor=measured.floor,
        times_floor=measured.times[top],
        worst=str(top),
        times_floor_by_kind=_by_kind(measured.times),
        judged_absolutely=measured.noise,
        reordered=runs.reordered,
        replicas_identical=identical,
        limit=LIMIT,
        tolerance=tolerance,
        passed=passed,
        hint="" if passed else hint(evidence, config.batch_norm == "local"),
    )


def type_of(config: RunConfig) -> torch.dtype:
    """The type with the fewest digits in which the runs compute."""
    found: torch.dtype = getattr(torch, config.dtype) if config.dtype else _precision(config).coarsest
    return found


def _precision(config: RunConfig) -> Precision:
    return Precision.of(config.precision, config.precision_of)


def _check_whole(reference: Trajectory, divided: Trajectory) -> None:
    for name, value in reference.weights.items():
        other = divided.weights.get(name)
        if other is None or other.shape != value.shape:
            has = "no such tensor" if other is None else f"one of shape {tuple(other.shape)}"
            raise ConfigurationError(
                f"{name} has the shape {tuple(value.shape)} on one device, and the divided model has {has}: a strategy "
                "keeps all names, and marks what it divides with its evener.strategies.Slice"
            )


@dataclass(frozen=True)
class Measured:
    """The differences of two runs in proportion to rounding."""

    times: Numbers
    real: list[str]
    noise: list[str]
    floor: float

    @classmethod
    def of(cls, runs: Runs, apart: Apart, eps: float) -> Measured:
        disturbed = [run.numbers for run in runs.disturbed]
        real, noise = floors.real_and_noise(runs.reference, disturbed)
        return cls(
            times=floors.times(apart.numbers, floors.floor(runs.reference, disturbed, noise, eps)),
            real=real,
            noise=noise,
            floor=max((run.weight_errors[name] for run in runs.disturbed for name in real), default=0.0),
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


def _by_kind(times: Numbers) -> dict[str, float]:
    found = dict.fromkeys(map(str, Kind), 0.0)
    for kind in Kind:
        of_kind: dict[Place, float] = {place: value for place, value in times.items() if place.kind is kind}
        if of_kind:
            found[str(kind)] = of_kind[floors.worst(of_kind)]
    return found


def _largest(errors: Mapping[str, float]) -> str:
    return max(errors, key=lambda name: _rank_error(errors[name]))


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / (abs(a) or 1.0)


def _rank_error(error: float) -> float:
    return math.inf if math.isnan(error) else error
