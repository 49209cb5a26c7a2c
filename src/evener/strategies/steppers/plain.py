"""The plain stepper: runs one micro-batch after the other, forward and backward through the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch
from evener.hardware.async_read import Readout, kept
from evener.hardware.profile_ranges import named_range
from evener.nn.attention_dispatch import attending
from evener.strategies.interfaces import StepOutcome, Stepper
from evener.strategies.learner import Learner


class Plain(Stepper):
    """Runs micro-batches on a rank that has all that they need, and its own loss and outputs."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        learner, synchronizer = self._learner, self._learner.synchronizer
        before = learner.loose_buffers.versions()
        with learner.work_timer.step(step):
            totals = self._passes(batch.micro_batches, divisor, step)
            missing = synchronizer.complete()
        return StepOutcome(
            totals=tuple(totals),
            missing=missing,
            buffers_changed=before != learner.loose_buffers.versions(),
            compute_seconds=learner.work_timer.taken(),
            forward_seconds=learner.work_timer.forward(),
            soundness=synchronizer.soundness(),
        )

    def _passes(
        self, micro_batches: Sequence[MicroBatch], divisor: Callable[[], float], step: int
    ) -> list[Readout]:
        """Runs forward and backward of each micro-batch. Returns their summed losses."""
        last = micro_batches[-1]
        return [self._pass(micro, micro is last, divisor, step) for micro in micro_batches]

    def _pass(self, micro: MicroBatch, last: bool, divisor: Callable[[], float], step: int) -> Readout:
        learner, replica = self._learner, self._learner.replica
        with learner.micro_scope(micro, step) as current, learner.synchronizer.micro_batch(last):
            learner.work_timer.begin_forward()
            with named_range("forward"):
                term = replica(micro)
            learner.work_timer.end_forward()
            total = kept(term)
            current.rewind()
            with attending(micro.sequence), named_range("backward"):
                # The gradient of term / divisor, with one autograd node less.
                term.backward(torch.full_like(term, 1 / divisor()))
        return total

    def outputs(self, micro: MicroBatch) -> Tree:
        with attending(micro.sequence):
            return self._learner.task.forward(self._learner.model, micro.inputs)
