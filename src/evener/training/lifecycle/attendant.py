"""Who acts with a run between its steps, on all ranks: where an observer is told, an attendant may do something."""

from __future__ import annotations

from typing import Any

from evener.training.engine import Engine
from evener.training.step.step import Step


class Attendant:
    """Called on every rank of a run, after the same steps; derive and write what is to be done.

    All ranks may evaluate, predict, save or ask each other in it, if each of them does. To reach the ranks it has to be
    picklable. What it raises ends the run. With ``engine.observers.ended`` set on all ranks, no further step is taken.
    """

    def begin(self, engine: Engine) -> None:
        """The next step is the first one of this start, or of a return to a checkpoint."""

    def stepped(self, step: Step) -> None:
        """A step was taken, and the run's own evaluation and saving after it are over.

        What is asked of the step may have to be waited for.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the attendant of rank 0 remembers, as JSON can hold it; checkpoints keep it. Empty if nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave, on every rank, before ``begin``."""

    def end(self) -> Any:
        """The last step was taken; what is returned is in ``Trained.attended``."""
