"""A run's numbers for MLflow (``pip install mlflow``)."""

from __future__ import annotations

from typing import Any

from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, RunStart, RunSummary, StepRecord
from evener.training.reporting.loggers import scalars as numbers

_LONGEST = 500
"""Letters of a parameter that every MLflow takes."""


class MLflow(Observer):
    """Metrics by the number of steps after which they were so, and the settings as parameters.

    Args:
        tracking_uri: A server or ``sqlite:///FILE``; None is MLflow's own choice.
        options: For ``mlflow.start_run``, as ``run_name``, ``experiment_id`` or the ``run_id`` of a run to go on with.

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
        if "run_id" not in self._options:  # MLflow lets no parameter change
            settings = numbers.flat(run.settings)
            library.log_params({name: str(value)[:_LONGEST] for name, value in settings.items()})

    def step(self, record: StepRecord) -> None:
        self._library.log_metrics(numbers.of_step(record), step=record.step + 1)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._library.log_metrics(numbers.of_evaluation(record), step=record.step)

    def end(self, summary: RunSummary | None) -> None:
        if self._library is not None:
            self._library.end_run("FAILED" if summary is None else "FINISHED")
