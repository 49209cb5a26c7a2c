"""The plain stepper: runs one micro-batch after the other, forward and backward through the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from evener.core.types import Tree
from evener.data.batch import Batch, MicroBatch
from evener.hardware.async_read import Readout, is_late, kept
from evener.hardware.profile_ranges import named_range
from evener.nn.attention_dispatch import attending
from evener.strategies.exact_sums import begin_step
from evener.strategies.interfaces import StepOutcome, Stepper
from evener.strategies.learner import Learner
from evener.strategies.sample_trial import SampleTrial
from evener.torch_internals.autograd import version


class Plain(Stepper):
    """Runs micro-batches on a rank that has all that they need, and its own loss and outputs."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._is_late = learner, is_late(learner.session.device)
        self._start: tuple[Any, Tensor, int] | None = None
        """What the gradient of the last loss was made of, that gradient, and its version."""

        self.trial: SampleTrial | None = None
        """Tries, in the first step, whether the model mixes samples."""

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        learner, synchronizer = self._learner, self._learner.synchronizer
        begin_step(learner)
        if self.trial is not None:
            self.trial.run(batch)
        before = learner.loose_buffers.versions()
        with learner.work_timer.step(step):
            totals = self._passes(batch.micro_batches, divisor, step)
            missing = synchronizer.complete()
        if learner.exact is not None and not any(micro.weight for micro in batch.micro_batches):
            # They got zeros from a placeholder.
            missing = tuple(learner.names[p] for p in learner.trained.first)
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
        learner, last, totals = self._learner, micro_batches[-1], list[Readout]()
        for micro in micro_batches:
            totals.append(self._pass(micro, micro is last, divisor, step))
            if learner.exact is not None and micro.ends_block and micro is not last:
                learner.synchronizer.end_block()
        return totals

    def _pass(self, micro: MicroBatch, last: bool, divisor: Callable[[], float], step: int) -> Readout:
        learner, replica = self._learner, self._replica
        with learner.micro_scope(micro, step) as current, learner.synchronizer.micro_batch(last):
            learner.work_timer.begin_forward()
            with named_range("forward"):
                term = replica(micro)
            learner.work_timer.end_forward()
            total = kept(term)
            current.rewind()
            with named_range("backward"), self._around_backward(micro, term), self._on_this_thread():
                # The gradient of term / divisor, with one autograd node less.
                term.backward(self._start_of(term, 1 / divisor()))
        return total

    def _start_of(self, term: Tensor, value: float) -> Tensor:
        """Returns the gradient of ``term``, ``value``: the tensor of the step before if nothing has changed."""
        made_of = value, term.dtype, term.device, term.shape
        if self._start is None or self._start[0] != made_of or self._start[2] != version(self._start[1]):
            start = torch.full_like(term, value)
            self._start = made_of, start, version(start)
        return self._start[1]

    @property
    def _replica(self) -> nn.Module:
        """The model with its loss, which the passes run."""
        return self._learner.replica

    def _on_this_thread(self) -> AbstractContextManager[Any]:
        """Returns a context in which backward runs on the thread that calls it. For a device, autograd has a thread,
        to which and from which a small step would take a tenth of its time; this one only waits meanwhile."""
        return torch.autograd.set_multithreading_enabled(False) if self._is_late else nullcontext()

    def _around_backward(self, micro: MicroBatch, term: Tensor) -> AbstractContextManager[None]:
        """Returns a context for the backward of a micro-batch."""
        return attending(micro.sequence)

    def outputs(self, micro: MicroBatch) -> Tree:
        with attending(micro.sequence):
            return self._learner.task.forward(self._learner.model, micro.inputs)
