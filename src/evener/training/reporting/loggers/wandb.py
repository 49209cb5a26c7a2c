"""Logs a run's numbers to Weights & Biases (``pip install wandb``)."""

from __future__ import annotations

from typing import Any

from evener.core.records import RunStart, RunSummary
from evener.training.reporting.loggers import scalars as numbers


class WandB(numbers.NumberLogger):
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

    def log_numbers(self, steps: int, values: dict[str, float]) -> None:
        self._run.log({"steps": steps, **values})

    def end(self, summary: RunSummary | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(summary is None))
