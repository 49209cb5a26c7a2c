"""Logs a run's numbers to Weights & Biases (``pip install wandb``)."""

from __future__ import annotations

from typing import Any

from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, RunStart, RunSummary, StepRecord
from evener.training.reporting.loggers import scalars as numbers


class WandB(Observer):
    """Logs numbers by ``steps``, the number of steps taken, and the settings as the run's config.

    Args:
        options: For ``wandb.init``, such as ``project``, ``name`` or ``mode="offline"``.

    Raises:
        ConfigurationError: If wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        numbers.needed("wandb")
        self._options = options
        self._run: Any = None

    def start(self, run: RunStart) -> None:
        self._run = numbers.needed("wandb").init(**{"config": run.settings, **self._options})
        self._run.define_metric("*", step_metric="steps")

    def step(self, record: StepRecord) -> None:
        self._run.log({"steps": record.step + 1, **numbers.of_step(record)})

    def evaluation(self, record: EvaluationRecord) -> None:
        self._run.log({"steps": record.step, **numbers.of_evaluation(record)})

    def end(self, summary: RunSummary | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(summary is None))
