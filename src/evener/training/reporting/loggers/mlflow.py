"""Logs a run's numbers to MLflow (``pip install mlflow``)."""

from __future__ import annotations

from typing import Any

from evener.core.records import RunStart, RunSummary
from evener.training.reporting.loggers import scalars as numbers

_LONGEST = 500
"""Maximum length of a parameter that every version of MLflow accepts."""


class MLflow(numbers.NumberLogger):
    """Logs metrics by the number of steps taken, and the settings as parameters.

    Args:
        tracking_uri: A server or ``sqlite:///FILE``. If None, MLflow's default.
        options: For ``mlflow.start_run``, such as ``run_name``, ``experiment_id`` or the ``run_id`` of a run to resume.

    Raises:
        ConfigurationError: If mlflow is not installed.
    """

    def __init__(self, tracking_uri: str | None = None, **options: Any) -> None:
        numbers.needed("mlflow")
        self._uri, self._options = tracking_uri, options
        self._library: Any = None

    def start(self, run: RunStart) -> None:
        library = numbers.needed("mlflow")
        if self._uri is not None:
            library.set_tracking_uri(self._uri)
        library.start_run(**self._options)
        self._library = library
        if "run_id" not in self._options:  # MLflow does not allow parameters to change
            settings = numbers.flat(run.settings)
            library.log_params({name: str(value)[:_LONGEST] for name, value in settings.items()})

    def log_numbers(self, steps: int, values: dict[str, float]) -> None:
        self._library.log_metrics(values, step=steps)

    def end(self, summary: RunSummary | None) -> None:
        if self._library is not None:
            self._library.end_run("FAILED" if summary is None else "FINISHED")
