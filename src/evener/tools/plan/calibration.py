"""What trials have found on a machine, as a file: the same file gives the same plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evener.balance.time_model import Line
from evener.errors import DataError
from evener.files import read_json, write_json
from evener.hardware.survey.host import processor_name
from evener.tools.plan.candidates import Candidate
from evener.tools.plan.costs import StepCosts

FORMAT = "evener-calibration-1"


@dataclass(frozen=True)
class Calibration:
    """The costs of a step of a task in each way, on one machine."""

    task: str
    batch_size: int
    """The larger of the two batch sizes of the trials."""
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

    def save(self, path: Path) -> None:
        """Writes the calibration to a file."""
        values = dataclasses.asdict(dataclasses.replace(self, costs={}))
        values["costs"] = [
            {"candidate": dataclasses.asdict(candidate), "costs": dataclasses.asdict(costs)}
            for candidate, costs in self.costs.items()
        ]
        write_json(path, {"format": FORMAT, **values})

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
            costs = {_candidate(each["candidate"]): _costs(each["costs"]) for each in values.pop("costs")}
            return cls(costs=costs, **values | {"devices": tuple(values["devices"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{path} is no calibration of evener plan: {error}. Make one with evener plan TASK --save {path}"
            ) from error


def this_machine() -> str:
    """Returns the names of processor and PyTorch, to tell whether a calibration is of this machine."""
    return f"{processor_name()}, torch {torch.__version__}"


def _candidate(values: dict[str, Any]) -> Candidate:
    return Candidate(**values | {"options": tuple(values["options"])})


def _costs(values: dict[str, Any]) -> StepCosts:
    lines = {name: _line(values[name]) for name in ("blocking", "rest", "input")}
    compute = tuple(_line(each) for each in values["compute"])
    return StepCosts(**values | lines | {"compute": compute, "sizes": tuple(values["sizes"])})


def _line(values: dict[str, Any]) -> Line:
    return Line(float(values["overhead_seconds"]), float(values["seconds_per_sample"]))
