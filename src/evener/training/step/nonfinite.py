"""Handles a step whose numbers are not finite: stops the run, skips the update, or falls back to a checkpoint.

On a CPU, every rank knows the results of a step at its next step; on a GPU, two steps later. This needs no waiting, and
is early enough to stop before anything is saved. To skip an update, all ranks must know the results before it. So
``skip`` and ``restore`` wait for the rows of every step::

    stop        post row ─ update ─────────────── next forward ─ read row of the step before
    skip        post row ─ read row of all ─ update, or not
    restore     post row ─ read row of all ─ update, or an error on all ranks at once

If the loss is scaled for float16 (:mod:`evener.components.amp.grad_scaler`), ranks wait for the rows with ``stop`` too:
with every policy, a gradient that overflows skips its step and halves the loss scale, because the scale was wrong.

A skipped step still counts for the data, the scheduler and the step number. Weights, optimizer state and buffers stay
as they were.

A batch without any counting target has the loss 0 / 0 and no gradient. This is reported. A run with only such batches
has learned nothing, which is an error.
"""

from __future__ import annotations

import warnings
from typing import Any

from evener.core.observer import Observers
from evener.core.records import Note, SkippedStep
from evener.errors import DivergenceError
from evener.strategies.learner import Learner
from evener.training.step.step import Step

MOST_IN_A_ROW = 10
"""Maximum of consecutive skipped steps: a run that skips more does not recover."""


class NonFinitePolicy:
    """Decides which updates of a run are made.

    Args:
        policy: ``stop``, ``skip`` or ``restore``.
        observers: Told of every skipped step.
    """

    def __init__(self, policy: str, learner: Learner, observers: Observers) -> None:
        self._policy, self._learner, self._observers = policy, learner, observers
        learner.may_leave_out |= policy == "skip" or learner.scale is not None
        self._late = learner.session.runs_behind and learner.settings.bits is None
        self.skipped = 0
        """Number of skipped steps."""
        self._in_a_row = 0
        self._taken = self._empty = 0
        self._empty_in: int | None = None

    @property
    def waits(self) -> bool:
        """True if the results of all ranks must be known before an update."""
        return self._policy != "stop" or self._learner.scale is not None

    def passes(self, step: Step) -> bool:
        """Returns True if the update of a step is to be made. Called on all ranks, when its gradients are complete.

        Raises:
            DivergenceError: If a number is not finite and the update cannot be skipped.
        """
        learner, waits = self._learner, self.waits
        self._count_terms(step)
        if learner.task.penalty is not None:
            step.penalty, step.penalty_soundness = learner.penalty, learner.penalty_soundness
        if not waits and (self._late or learner.task.penalty is None):
            return True  # this rank's row has reported numbers that are not finite
        fault = step.fault() if waits else step.fault_of_penalty()
        if fault is None:
            self._went_well()
        elif self._overflowed(step, fault):
            pass
        elif self._policy == "skip":
            self._leave_out(step, fault)
        step.check_finite()
        return not step.left_out

    def _count_terms(self, step: Step) -> None:
        self._taken += 1
        self._empty += not step.terms
        if not step.terms and self._empty_in != step.batch.epoch:
            self._empty_in = step.batch.epoch
            words = (
                f"no target of the batch of step {step.number} counts: all are ignored, or have the weight 0. Its "
                "loss is not a number and it gives no gradient; others of this epoch are not told"
            )
            self._observers.event(Note(step.number, words))
            if not self._observers.are_some and self._learner.session.rank == 0:
                warnings.warn(words, stacklevel=6)

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps without a term so far, for a resumed run."""
        return {"empty": self._empty}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of :meth:`state_dict`."""
        self._empty = int(state["empty"])

    def check_terms(self, steps_done: int) -> None:
        """Checks that any of the ``steps_done`` steps of a whole run had a term.

        Raises:
            DivergenceError: If none had, on all ranks alike.
        """
        if self._taken and self._empty == steps_done:
            raise DivergenceError(
                f"no target of any batch counts, in all {steps_done} steps: the loss was never a number, and nothing "
                "was learned. Are all targets ignored (ignore_index), or all weights 0? Look at the targets that the "
                "dataset gives"
            )

    def _went_well(self) -> None:
        self._in_a_row = 0
        if self._learner.scale is not None:
            self._learner.scale.went_well()

    def _overflowed(self, step: Step, fault: str) -> bool:
        """Returns True if gradients overflowed because of the loss scale, which is then halved."""
        scale = self._learner.scale
        if scale is None or not step.has_finite_loss() or not scale.overflowed():
            return False
        self.skipped += 1
        step.left_out = True
        words = f"{fault}, with a loss scale of {2 * scale.value:g}: its update is left out on all ranks, and the scale"
        self._observers.event(SkippedStep(step.number, f"{words} is {scale.value:g} from here on"))
        return True

    def _leave_out(self, step: Step, fault: str) -> None:
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise DivergenceError(
                f"{fault}; it is the step after {MOST_IN_A_ROW} in a row that were left out for the like, and the run "
                "stops here. Try a lower learning rate or clip_norm, or look at the data of these steps"
            )
        self.skipped += 1
        step.left_out = True
        self._observers.event(SkippedStep(step.number, f"{fault}; its update is left out, on all ranks"))
