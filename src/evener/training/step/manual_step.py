"""Steps of a user's own loop: gradients are summed when the user says so, and all results are known at once.

To know results at once means waiting. On a GPU the host waits in ``backward`` for the loss, in ``update`` for the check
that gradients are finite, and at the end of the step for its time. The engine's own steps do not wait.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor

from evener.components.optim.stand_ins import model_parameter
from evener.data.batch import Batch
from evener.errors import ConfigurationError, DivergenceError
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import stopwatch, waiting
from evener.nn.attention_dispatch import attending
from evener.nn.context import divided
from evener.strategies.learner import Learner
from evener.strategies.timing import WorkTimer
from evener.strategies.whole_matrices import check_pieces
from evener.training.step.exchange import Exchange
from evener.training.step.step import not_finite


class ManualStep:
    """Implements :meth:`Engine.backward` and :meth:`Engine.update`."""

    def __init__(self, learner: Learner, control: Exchange, non_finite: str) -> None:
        self._learner, self._control, self._non_finite = learner, control, non_finite
        session, throttle = learner.session, learner.settings.throttle
        watch = stopwatch(session.device)
        # The waits of a step that the engine takes lie within this timer, and are the learner's.
        self.work_timer = WorkTimer(watch, throttle, session.rank, in_passes=False)

    def backward(self, total: Tensor, count: float | Tensor, batch: Batch | None, step: int) -> float:
        """Back-propagates ``total`` divided by the count of all ranks; returns the mean over the terms of all ranks.

        Args:
            batch: The current batch; None outside of ``batches()``.
        """
        if self._non_finite != "stop":
            raise ConfigurationError(
                f"non_finite={self._non_finite} goes with engine.step(batch), which makes the update that is left out; "
                "in a loop of your own leave it out: backward() and update() raise DivergenceError on all ranks alike, "
                "before weights change"
            )
        self.check_meets()
        recompute = self._learner.settings.recompute
        if recompute is not None and recompute.is_budget:
            raise ConfigurationError(
                f"recompute={recompute.text} is a budget, which is measured in engine.step(batch); in a loop of your "
                "own compute all blocks again with recompute=blocks"
            )
        if self._learner.settings.update_in_backward:
            raise ConfigurationError(
                "update_in_backward goes with engine.step(batch), whose backward updates; in a loop of your own the "
                "update is engine.update(): leave it out"
            )
        if self._learner.scale is not None:
            raise ConfigurationError(
                "precision fp16 goes with engine.step(batch), which scales the loss and leaves updates out whose "
                "gradients overflow; in a loop of your own use bf16, which needs neither"
            )
        if hooked := self._learner.synchronizer.hooked_in(1):
            raise ConfigurationError(
                f"{self._learner.names[hooked[0]]} has a hook on its gradient, which backward() would call with the "
                "part of this rank, before update() sums the parts: take the steps with engine.step(batch), or use "
                "evener.prepare, whose backward sums first"
            )
        counts = _counts_for_something(batch)
        own = [float(total.detach()) if counts else 0.0, float(count) if counts else 0.0]
        with waiting():
            rows = self._control.exchange(own).wait()
        for rank, row in enumerate(rows):
            if not math.isfinite(row[0]):
                raise DivergenceError(not_finite(f"the loss is {row[0]} in step {step} on rank {rank}"))
        added = self._learner.data.of_contributors(rows)
        sums = [sum(column) for column in zip(*added, strict=True)]
        with attending(divided()), named_range("backward"):
            (total * (1.0 if counts else 0.0) / (sums[1] or 1.0)).backward()  # type: ignore[no-untyped-call]
        self.work_timer.work_done()
        return sums[0] / sums[1] if sums[1] else math.nan

    def check_meets(self) -> None:
        """Raises ConfigurationError if the ranks do not meet in every step, or grains are to be computed apart."""
        if self._learner.settings.bits is not None:
            raise ConfigurationError(
                "exact=bits goes with engine.step(batch), which computes one grain after the other; in a loop with "
                "backward() and update() of your own leave exact out"
            )
        if self._learner.rounds is not None:
            raise ConfigurationError(
                f"strategy {self._learner.name!r} takes steps of its own between two merges: take them with "
                "engine.step(batch), or use strategy ddp in a loop with backward() and update() of your own"
            )

    def update(self, optimizer: torch.optim.Optimizer | None, step: int) -> None:
        """Sums the gradients of the optimizer's parameters over the ranks, clips them, steps, and clears them."""
        learner = self._learner
        chosen = learner.optimizer if optimizer is None else optimizer
        check_pieces(chosen, learner.name)
        parameters = [model_parameter(p) for group in chosen.param_groups for p in group["params"]]
        with learner.session.watchdog.phase("update", step=step, explains=True), waiting():
            learner.synchronizer.sum_gradients(parameters)
        if optimizer is None:
            learner.apply_gradients(step, lambda: self._penalty_passes(step), (parameters, learner.model))
            learner.end_update(step)
            return
        learner.clipping(parameters, learner.mesh)
        with named_range("optimizer"):
            chosen.step()
        chosen.zero_grad(set_to_none=True)

    def _penalty_passes(self, step: int) -> bool:
        numbers = self._learner.penalty.value(), self._learner.penalty_soundness.value()
        if not all(map(math.isfinite, numbers)):
            raise DivergenceError(
                not_finite(f"the penalty or its gradient is not finite in step {step} on all ranks")
            )
        return True

    def over(self, batch: Batch, is_timed: bool) -> float:
        """Ends a step. Returns the seconds of this rank's own work; NaN if unknown.

        A collective call with ``batch_norm="local"``: then the ranks share the running statistics of one of them.

        Args:
            is_timed: Whether the timer has run in this step.
        """
        if self._learner.settings.batch_norm == "local":
            self._learner.synchronizer.share_buffers(self._learner.loose_buffers.tensors(), batch.first_part)
        return self.work_timer.taken().value() or math.nan if is_timed else math.nan


class ManualBatch:
    """The scope and the timer in which the user's own loop computes with a batch.

    It belongs to the engine, so that ``close()`` can end it: an error that leaves the loop may keep the loop's frame
    alive.
    """

    def __init__(self, learner: Learner, work_timer: WorkTimer) -> None:
        self._learner, self._work_timer = learner, work_timer
        self._scope: AbstractContextManager[Any] | None = None
        self.is_timed = False
        """True if the timer has run since the batch was given."""

    def around(self, batch: Batch, step: int, timed: bool) -> Self:
        """Opens the scope for the step of ``batch``. Closes the scope of a loop that was abandoned.

        Args:
            timed: Starts the timer, which on a GPU costs two events.
        """
        self.close()
        self.is_timed = timed
        if timed:
            self._work_timer.step(step).__enter__()
        micros = batch.micro_batches  # a round of local steps has none, and is taken by engine.step() alone
        self._scope = self._learner.micro_scope(micros[0], step) if micros else nullcontext()
        self._scope.__enter__()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the scope, if it is open."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(None, None, None)
            if self.is_timed:
                self._work_timer.__exit__(None)


def _counts_for_something(batch: Batch | None) -> bool:
    """Returns True if the batch has samples and is not a placeholder."""
    if batch is None:
        return True
    micros = batch.micro_batches
    if len(micros) > 1:
        raise ConfigurationError(
            f"backward() takes a whole batch, this one is cut into {len(micros)} micro-batches, whose counts it "
            "cannot know ahead: leave micro_batch unset, or take steps with step()"
        )
    return micros[0].weight > 0
