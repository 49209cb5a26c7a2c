"""Observers that remember what they were told."""

from __future__ import annotations

from typing import Any

from evener.core.observer import Observer
from evener.core.records import EvaluationRecord, RunStart, RunSummary, StepRecord


class Remembering(Observer):
    """Everything, in order, on every rank."""

    everywhere = True

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def start(self, run: RunStart) -> None:
        self.told.append(("start", run))

    def step(self, record: StepRecord) -> None:
        self.told.append(("step", record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self.told.append(("evaluation", record))

    def event(self, record: Any) -> None:
        self.told.append(("event", record))

    def end(self, summary: RunSummary | None) -> None:
        self.told.append(("end", summary))

    @property
    def steps(self) -> list[StepRecord]:
        return [record for kind, record in self.told if kind == "step"]
