"""Ends a run early if an observer requests it, on all ranks after the same step.

A rank sends the request with its row of a step, like a request to save. It is granted when all ranks have surely read
it. After the last batch of an epoch, and the evaluation that may follow, there is no next row to wait for: then the
ranks exchange their requests directly.
"""

from __future__ import annotations

from evener.core.records import Note
from evener.data.batch import Batch
from evener.training.engine import Engine
from evener.training.lifecycle.save_schedule import Wish


class Stopping:
    """Decides if a run is to end early. All ranks must call its methods after the same steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.observers.ended = False

    def wish(self, other: float) -> float:
        """Returns the request that this rank sends with its next step: the end, or ``other`` if that is greater."""
        return max(other, Wish.END) if self._engine.observers.ending else other

    def resumed(self) -> None:
        """Ends a run before its next step if that was requested: by an observer that remembers that it has ended the
        run, or after an evaluation that the run owed from before. A collective call."""
        if self._asked_now():
            self._end()

    def stepped(self, batch: Batch) -> None:
        """Ends the run after a step if that was requested: no more batches follow, and observers are told why."""
        due = (
            self._asked_now()
            if batch.last
            else self._engine.step_sync.wished(self._engine.steps_done - 2) == Wish.END
        )
        if due:
            self._end()

    def _end(self) -> None:
        self._engine.observers.ended = True
        observer = self._engine.observers.ending or "an observer of another rank"
        self._engine.observers.event(
            Note(self._engine.steps_done, f"ends after step {self._engine.steps_done}, asked by {observer}")
        )

    def _asked_now(self) -> bool:
        asked = float(bool(self._engine.observers.ending))
        return any(row[0] for row in self._engine.step_sync.control.exchange([asked]).wait())
