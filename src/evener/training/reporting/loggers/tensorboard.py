"""Writes a run's numbers for TensorBoard (``pip install tensorboard``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evener.core.records import RunStart, RunSummary
from evener.training.reporting.loggers import scalars as numbers


class TensorBoard(numbers.NumberLogger):
    """Writes scalars by the number of steps taken, and events as text.

    Args:
        directory: Where TensorBoard looks for them. A resumed run hides what came after its checkpoint.

    Raises:
        ConfigurationError: If TensorBoard is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        numbers.needed("tensorboard")
        self._directory = str(directory)
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        library = numbers.needed("torch.utils.tensorboard")
        purge = run.steps_done + 1 if run.steps_done else None
        self._writer = library.SummaryWriter(self._directory, purge_step=purge)
        rows = "\n".join(f"| {name} | {value} |" for name, value in numbers.flat(run.settings).items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", run.steps_done)

    def event(self, record: Any) -> None:
        self._writer.add_text("events", record.words, record.step)

    def end(self, summary: RunSummary | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def log_numbers(self, steps: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, steps)
