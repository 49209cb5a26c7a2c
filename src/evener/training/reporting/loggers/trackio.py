"""Logs a run's numbers to Trackio (``pip install trackio``), whose API is that of W&B but for three differences.

It has no ``define_metric``, so that steps are given with the numbers; its ``finish`` takes no exit code, so that a run
that failed looks like one that ended; and a project must have a name.
"""

from __future__ import annotations

from typing import Any

from evener.core.records import RunStart, RunSummary
from evener.training.reporting.loggers import scalars as numbers


class Trackio(numbers.NumberLogger):
    """Logs numbers by the number of steps taken, and the settings as the run's config.

    Args:
        project: Name of the project.
        options: Further ones of ``trackio.init``, such as ``name``, ``space_id`` or ``resume``.

    Raises:
        ConfigurationError: If trackio is not installed.
    """

    def __init__(self, project: str, **options: Any) -> None:
        numbers.needed("trackio")
        self._options = {"project": project, **options}
        self._run: Any = None

    def start(self, run: RunStart) -> None:
        self._run = numbers.needed("trackio").init(**{"config": run.settings, **self._options})

    def log_numbers(self, steps: int, values: dict[str, float]) -> None:
        self._run.log(values, step=steps)

    def end(self, summary: RunSummary | None) -> None:
        if self._run is not None:
            self._run.finish()
