"""The numbers of a record by name, the same for all loggers."""

from __future__ import annotations

import importlib
import importlib.util
import json
from abc import abstractmethod
from typing import Any

from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, StepRecord
from evener.errors import ConfigurationError


class NumberLogger(Observer):
    """Passes on the numbers of steps and evaluations, each with the number of steps taken until then."""

    @abstractmethod
    def log_numbers(self, steps: int, values: dict[str, float]) -> None:
        """Passes numbers on, by name."""

    def step(self, record: StepRecord) -> None:
        self.log_numbers(record.step + 1, of_step(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self.log_numbers(record.step, of_evaluation(record))


def of_step(record: StepRecord) -> dict[str, float]:
    """Returns ``train/loss``, learning rate and step time and, with several ranks, each rank's share, of cost if the
    task gives costs."""
    divided = record.costs or record.shares
    shares = {f"share/rank_{rank}": share / sum(divided) for rank, share in enumerate(divided)}
    numbers = {"train/loss": record.loss, "train/lr": record.lr, "train/step_seconds": record.seconds}
    return numbers | (shares if len(shares) > 1 else {})


def of_evaluation(record: EvaluationRecord) -> dict[str, float]:
    """Returns ``evaluation/loss`` and each metric."""
    return {f"evaluation/{name}": value for name, value in record.metrics.items()}


def flat(settings: dict[str, Any]) -> dict[str, str | float | int | bool]:
    """Converts settings for programs that accept neither lists nor None: these become JSON text."""
    plain = (str, float, int, bool)
    return {
        name: value if isinstance(value, plain) else json.dumps(value, default=str)
        for name, value in settings.items()
    }


def needed(module: str) -> Any:
    """Imports and returns the module.

    Raises:
        ConfigurationError: If it is not installed.
    """
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        raise ConfigurationError(f"this observer needs {root}, which is not installed: pip install {root}")
    return importlib.import_module(module)
