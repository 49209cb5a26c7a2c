"""Callbacks, which run on all ranks between the steps of a run. Unlike an observer, a callback may act."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evener.training.engine import Engine
    from evener.training.step.step import Step


class Callback:
    """Called on every rank of a run, after the same steps. Derive from it and override what is needed.

    All ranks may evaluate, predict, save or communicate in it, if each of them does. It must be picklable to reach the
    ranks. An exception that it raises ends the run. With ``engine.observers.ended`` set on all ranks, no further step
    is taken.
    """

    def begin(self, engine: Engine) -> None:
        """Called before the first step of this start, or after a return to a checkpoint."""

    def stepped(self, step: Step) -> None:
        """Called after each step, and after the run's own evaluation and saving that follow it.

        Reading the results of the step may have to wait.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that checkpoints keep, from rank 0's callback. It must be JSON-serializable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, on every rank, before ``begin``."""

    def end(self) -> Any:
        """Called after the last step. The return value becomes ``Trained.callback_result``."""
