"""Compares a divided run with one device and records the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evener.components.amp.policy import Precision
from evener.core.complex_numbers import as_real
from evener.core.config.run_config import RunConfig
from evener.core.html import html_table
from evener.errors import ConfigurationError
from evener.tools.verify import rounding_floor as floors
from evener.tools.verify.hints import Evidence, hint
from evener.tools.verify.rounding_floor import ComparedPlace, Numbers, PlaceKind
from evener.tools.verify.trajectory import Trajectory
from evener.training.factory import balance_of, strategy_of

LIMIT = 20.0
"""Largest difference that rounding explains, as a multiple of the floor.

Over models, optimizers, dtypes, shares and 2 to 100 steps, correct training differed by up to 2.6 times the floor, and
by up to 5 times in small networks with BatchNorm in bfloat16. Gradients averaged over two ranks instead of summed
differed by 38 times and more in bfloat16, and by millions of times in other dtypes (docs/exactness.md).
"""


@dataclass(frozen=True)
class Verification:
    """Result of comparing a divided run with one device."""

    task: str
    """Name of the task."""
    strategy: str
    """Strategy of the divided run."""
    processes: int
    """Number of ranks of the divided run."""
    shares: str
    """Setting ``balance`` that divided the batches."""
    dtype: str
    """Dtype or precision in which both runs computed."""
    steps: int
    """Steps of the run on one device."""
    batch_size: int
    """Samples per step over all ranks."""
    micro_batch: int | None
    """Samples per micro-batch over all ranks. None if batches were not divided into micro-batches."""
    reference_losses: list[float]
    """Losses of one device, by step."""
    losses: list[float]
    """Losses of the divided run, by step."""
    max_relative_loss_error: float
    """Largest ``|a - b| / |a|``, where a is the reference loss."""
    max_relative_weight_error: float
    """Largest max|a - b| / max|a| over all parameters with a real gradient, where a is the reference."""
    worst_parameter: str
    """Name of the parameter with the largest error."""
    weight_errors: dict[str, float]
    """Relative error of each parameter and buffer, by name."""
    floor: float
    """``max_relative_weight_error`` between runs on one device that differ by rounding alone."""
    times_floor: float
    """Largest of all differences (losses, gradients, weights, buffers), each as a multiple of its own floor."""
    worst: str
    """Place of the largest difference, in words."""
    times_floor_by_kind: dict[str, float]
    """Largest multiple of each :class:`~evener.tools.verify.rounding_floor.PlaceKind`: ``loss``, ``statistic`` (a
    buffer after the first forward pass), ``gradient``, ``weight`` and ``buffer``.
    """
    judged_absolutely: list[str]
    """Parameters whose gradient is mathematically zero, so that rounding alone moved them."""
    reordered: bool
    """True if the floor was measured with the samples of each batch in another order."""
    replicas_identical: bool
    """True if all ranks ended with bitwise equal weights."""
    limit: float
    """Largest multiple of the floor that passes."""
    tolerance: float | None
    """Largest ``max_relative_weight_error`` that passes, instead of ``limit``. None to use ``limit``."""
    passed: bool
    """True if the divided run is the same training as on one device."""
    hint: str = ""
    """Likely cause of the difference. Empty if the verification passed."""

    def __repr__(self) -> str:
        """Returns a summary in one line."""
        found = "the same training" if self.passed else f"NOT the same training: {self.worst}"
        return (
            f"<Verification of {self.task}: {found}, {self.times_floor:.3g} times the floor, {self.steps} steps on "
            f"{self.processes} processes>"
        )

    def _repr_html_(self) -> str:
        """Returns the verdict and what was compared as a table for a notebook."""
        verdict = (
            "PASS: the training of one device" if self.passed else "FAIL: not the training of one device"
        )
        allowed = f"{self.limit:g}" if self.tolerance is None else f"a weight error of {self.tolerance:g}"
        rows = [
            (
                "largest difference",
                f"{self.times_floor:.3g} times what rounding alone makes, in {self.worst}",
            ),
            ("allowed", allowed),
            ("compared", f"{self.steps} steps of {self.batch_size} samples in {self.dtype}"),
            ("divided over", f"{self.processes} ranks with {self.strategy}, shares {self.shares}"),
            ("replicas", "bit-identical" if self.replicas_identical else "differ"),
            *((("hint", self.hint),) if self.hint else ()),
        ]
        return html_table(f"{self.task}: {verdict}", rows)


@dataclass(frozen=True)
class RunDistance:
    """Distance of a run from the reference."""

    numbers: Numbers
    weight_errors: dict[str, float]
    """Relative error of each parameter and buffer."""

    @classmethod
    def from_runs(cls, reference: Trajectory, other: Trajectory) -> RunDistance:
        """Computes the distance of two runs. The result keeps no reference to them."""
        errors = {
            name: relative_error(value, other.weights[name]) for name, value in reference.weights.items()
        }
        return cls(floors.differences(reference, other), errors)


@dataclass(frozen=True)
class ComparedRuns:
    """The runs that are compared."""

    reference: Trajectory
    divided: Sequence[Trajectory]
    """The divided run, by rank."""
    disturbed: Sequence[RunDistance]
    """Distance from the reference of each disturbed run on one device."""
    reordered: bool = True
    own_loss: bool = False
    """True if the loss is the user's own and counts its terms itself."""


def compare(runs: ComparedRuns, config: RunConfig, name: str, tolerance: float | None = None) -> Verification:
    """Compares the runs. ``config`` gives the settings of the divided run, with its dtype and batch size.

    Raises:
        ConfigurationError: If the divided model lacks a tensor of the reference, or has it in another shape.
    """
    reference, divided = runs.reference, runs.divided[0]
    _check_whole(reference, divided)
    apart = RunDistance.from_runs(reference, divided)
    measured = RunDifferences.from_runs(runs, apart, torch.finfo(type_of(config)).eps)
    errors = apart.weight_errors
    identical = len({trajectory.digest for trajectory in runs.divided}) == 1
    complete = len(reference.losses) == len(divided.losses)
    largest = _largest({name: errors[name] for name in measured.real} or errors)
    top = floors.worst(measured.times)
    within = measured.times[top] <= LIMIT if tolerance is None else errors[largest] <= tolerance
    passed = identical and complete and within
    strategy = strategy_of(config, len(runs.divided))
    evidence = Evidence(reference, runs.divided, measured.times, LIMIT, runs.reordered, runs.own_loss)
    return Verification(
        task=name,
        strategy=str(strategy),
        processes=len(runs.divided),
        shares=balance_of(config, len(runs.divided), unlike=False),
        dtype=config.dtype or _precision(config).words,
        steps=len(reference.losses),
        batch_size=(config.batch_size or 0) * strategy.batches_in_step,
        micro_batch=config.samples_at_once,
        reference_losses=reference.losses,
        losses=divided.losses,
        max_relative_loss_error=max(
            map(_relative, reference.losses, divided.losses), key=size_of_error, default=0.0
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
    """Returns the coarsest dtype in which the runs compute."""
    found: torch.dtype = getattr(torch, config.dtype) if config.dtype else _precision(config).coarsest
    return found


def _precision(config: RunConfig) -> Precision:
    return Precision.from_settings(config.precision, config.precision_of)


def _check_whole(reference: Trajectory, divided: Trajectory) -> None:
    for name, value in reference.weights.items():
        other = divided.weights.get(name)
        if other is None or other.shape != value.shape:
            has = "no such tensor" if other is None else f"one of shape {tuple(other.shape)}"
            raise ConfigurationError(
                f"{name} has the shape {tuple(value.shape)} on one device, and the divided model has {has}: a strategy "
                "keeps all names, and marks what it divides with its evener.strategies.ShardSpec"
            )


@dataclass(frozen=True)
class RunDifferences:
    """Differences of two runs as multiples of the floor."""

    times: Numbers
    real: list[str]
    noise: list[str]
    floor: float

    @classmethod
    def from_runs(cls, runs: ComparedRuns, apart: RunDistance, eps: float) -> RunDifferences:
        disturbed = [run.numbers for run in runs.disturbed]
        real, noise = floors.real_and_noise(runs.reference, disturbed)
        return cls(
            times=floors.times(apart.numbers, floors.floor(runs.reference, disturbed, noise, eps)),
            real=real,
            noise=noise,
            floor=max((run.weight_errors[name] for run in runs.disturbed for name in real), default=0.0),
        )


def relative_error(reference: Tensor, other: Tensor) -> float:
    """Returns max|a - b| / max|a|, or max|b| if a is zero everywhere.

    Elements that are equal count as equal also if both are the same infinity or both are NaN, as in an attention mask.
    If an element is not finite in only one of the two, the result is not finite. Such elements do not count in max|a|.
    """
    a, b = as_real(reference).double(), as_real(other).double()
    if a.numel() == 0:
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).max().item()
    scale = a.abs().nan_to_num(0.0, posinf=0.0).max().item()
    return float(difference / scale if scale else difference)


def _by_kind(times: Numbers) -> dict[str, float]:
    found = dict.fromkeys(map(str, PlaceKind), 0.0)
    for kind in PlaceKind:
        of_kind: dict[ComparedPlace, float] = {
            place: value for place, value in times.items() if place.kind is kind
        }
        if of_kind:
            found[str(kind)] = of_kind[floors.worst(of_kind)]
    return found


def _largest(errors: Mapping[str, float]) -> str:
    return max(errors, key=lambda name: size_of_error(errors[name]))


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / (abs(a) or 1.0)


def size_of_error(error: float) -> float:
    """Returns the error as a number to compare by: NaN is the largest."""
    return math.inf if math.isnan(error) else error
