"""The end that an observer asks for, on all ranks after the same step.

The wish of a rank goes with its row of a step, as that of a save does, and is fulfilled when all are sure to have read
it. After the last batch of an epoch, and the evaluation that may follow, the ranks ask each other: there is no next
row to wait for.
"""

from __future__ import annotations

from evener.core.records import Note
from evener.data.batch import Batch
from evener.training.engine import Engine
from evener.training.lifecycle.save_schedule import Wish


class Stopping:
    """Whether a run is to end. All ranks call its methods after the same steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.observers.ended = False

    def wish(self, other: float) -> float:
        """What this rank tells with its next step, if it wants ``other`` besides."""
        return max(other, Wish.END) if self._engine.observers.ending else other

    def evaluated(self) -> None:
        """An evaluation that a run owed from before was done: an observer may ask for the end at once."""
        if self._asked_now():
            self._end()

    def stepped(self, batch: Batch) -> None:
        """A step was taken; if it is the last one, the engine gives no further batch and the observers are told why."""
        due = (
            self._asked_now()
            if batch.last
            else self._engine.ledger.wished(self._engine.steps_done - 2) == Wish.END
        )
        if due:
            self._end()

    def _end(self) -> None:
        self._engine.observers.ended = True
        words = self._engine.observers.ending or "an observer of another rank"
        self._engine.observers.event(
            Note(self._engine.steps_done, f"ends after step {self._engine.steps_done}, asked by {words}")
        )

    def _asked_now(self) -> bool:
        asked = float(bool(self._engine.observers.ending))
        return any(row[0] for row in self._engine.ledger.control.exchange([asked]).wait())
