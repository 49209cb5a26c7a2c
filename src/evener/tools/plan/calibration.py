"""What trials have found on a machine, as a file: the same file gives the same plan."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evener.core.config.run_config import RunConfig
from evener.core.typed_json import value_of
from evener.distributed.environment import kind_taken
from evener.errors import ConfigurationError, DataError
from evener.files import read_json, write_json
from evener.hardware.survey.host import processor_name
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts

FORMAT = "evener-calibration-1"
_COUNTED = (
    *("device", "micro_batch", "recompute", "dtype", "precision", "precision_of", "workers", "batch_norm"),
    *("compile", "compile_mode", "compile_backend", "cuda_graphs", "allreduce", "compress", "bucket_mb"),
    *("lean", "clip_norm", "offload", "optimizer_state", "fused_optimizer", "update_in_backward"),
    *("exact", "grain", "block", "audit"),
)


@dataclass(frozen=True)
class PastRun:
    """What a run took, beside what was predicted."""

    options: str
    """How it divided the work, as options of the command."""
    batch_size: int
    predicted: float
    """Seconds of a step."""
    measured: float
    load: float
    """Programs that wanted to compute before it began."""
    counts: bool
    """True if the costs have changed by it."""


@dataclass(frozen=True)
class _Way:
    """An entry of the file."""

    candidate: Candidate
    costs: StepCosts


@dataclass(frozen=True)
class Calibration:
    """The costs of a step of a task in each way, on one machine."""

    task: str
    batch_size: int
    """The batch size that was asked for. A smaller and a larger one were tried, too."""
    costs: dict[Candidate, StepCosts]
    refused: dict[str, str] = field(default_factory=dict)
    """What cannot train the task, or was not tried, with the reason."""
    repeat_spread: float = 0.0
    """The largest relative difference of two trials that were the same."""
    devices: tuple[str, ...] = ()
    """The devices, in the order of ranks."""
    load: float = 0.0
    """Programs that wanted to compute, besides, when the trials began."""
    machine: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the trials on which the time or the memory of a step depends."""
    runs: tuple[PastRun, ...] = ()
    """The runs from which the calibration has learned, the oldest first."""
    structure: str = ""
    """Fingerprint of what the task builds."""
    made: str = ""
    """When the trials were made, if they were kept for later runs."""

    def check(self, task: str, config: RunConfig) -> None:
        """Raises ConfigurationError if the trials were of another task, or with other settings."""
        if task != self.task:
            raise ConfigurationError(f"the plan is of the task {self.task!r}, and this is {task!r}")
        for name, here in counted_settings(config).items():
            there = self.settings.get(name, getattr(RunConfig, name))  # a file may be older than the setting
            if here != there:
                raise ConfigurationError(
                    f"the plan was tried with {name}={there}, and this is {name}={here}: give the same, or make a plan "
                    "for this"
                )

    def save(self, path: Path) -> None:
        """Writes the calibration to a file."""
        values = dataclasses.asdict(dataclasses.replace(self, costs={}))
        values["costs"] = [
            {"candidate": dataclasses.asdict(candidate), "costs": dataclasses.asdict(costs)}
            for candidate, costs in self.costs.items()
        ]
        write_json(path, {"format": FORMAT, **values}, follow=True)

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Reads a calibration that :meth:`save` wrote.

        Raises:
            DataError: If the file cannot be read or is no calibration.
        """
        try:
            values = read_json(path)
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise ValueError(f"it is not of the format {FORMAT}")
            ways = value_of(tuple[_Way, ...], values.pop("costs"), "costs")
            for way in ways:
                _check_costs(way.candidate, way.costs)
            read: Calibration = value_of(cls, values | {"costs": {}, "devices": values["devices"]})
            return dataclasses.replace(read, costs={way.candidate: way.costs for way in ways})
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} is no calibration of evener plan: {error}. Make one with evener plan TASK --save {path}"
            ) from error


def counted_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the settings on which the time or the memory of a step depends, besides those that a plan chooses or
    predicts for, as JSON has them."""
    values = {name: getattr(config, name) for name in _COUNTED}
    values["device"] = kind_taken(config.device)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def this_machine() -> str:
    """Returns the names of processor and PyTorch, to tell whether a calibration is of this machine."""
    return f"{processor_name()}, torch {torch.__version__}"


def _check_costs(candidate: Candidate, costs: StepCosts) -> None:
    """Raises ValueError for numbers that only an edited file has."""
    lines = [*costs.compute, costs.blocking, costs.input]
    numbers = [number for line in lines for number in (line.overhead_seconds, line.seconds_per_sample)]
    numbers += [costs.hidden, costs.exposed, costs.update, costs.bubble, costs.spread, costs.setup]
    signed = [costs.rest.overhead_seconds, costs.rest.seconds_per_sample, costs.piece]
    if not all(0 <= number < math.inf for number in numbers) or not all(map(math.isfinite, signed)):
        raise ValueError(f"the costs of {candidate.words} have a number that is negative or not finite")
    if not all(type(size) is int and size > 0 for size in (*costs.sizes, costs.pieces)):
        raise ValueError(
            f"the costs of {candidate.words} are of batches of {list(costs.sizes)} samples in {costs.pieces} pieces"
        )
    if len(costs.compute) != candidate.ranks or not 1 <= costs.parts <= candidate.ranks:
        raise ValueError(f"the costs of {candidate.words} are not those of {candidate.ranks} ranks")
