"""Retries a step in smaller pieces when the device is out of memory.

Gradients are sums over samples, so that their value does not depend on how the samples are cut into pieces. As long as
ranks communicate only after backward, each rank can choose its pieces by its own memory. The other ranks only wait a
little longer for it::

    rank 0, 24 GB    forward ─ backward ─────────────────────────────────────────────┐
    rank 1, 12 GB    forward ─✗  (forgets)  [forward ─ backward] [forward ─ backward] ┴─ sum ─ update

So gradients are summed after backward, not during it. If the passes of a model communicate, as with an exact BatchNorm,
one rank alone cannot repeat them.

With ``micro_batch=auto`` the size of the pieces is computed (:mod:`evener.strategies.steppers.oom_sizing`), so that
memory runs out only if a pass needs more than earlier ones did. Pieces that did not fit are halved. After a number of
successful steps, pieces of twice the size are tried, because the shortage may have been temporary. Each failed attempt
doubles that number of steps.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import re
import warnings
from collections.abc import Callable, Sequence
from itertools import chain

import torch

from evener.components.microbatches import can_be_cut, first_piece, pieces_of
from evener.core.config.sizes import parse_size
from evener.data.batch import Batch, MicroBatch
from evener.errors import OutOfMemoryError
from evener.hardware import accelerators
from evener.hardware.async_read import Readout
from evener.strategies.interfaces import StepOutcome
from evener.strategies.learner import Learner
from evener.strategies.steppers.oom_sizing import Sizing, computed_together, refuse_together, sends_in_passes
from evener.strategies.steppers.plain import Plain

PATIENCE = 50
"""Number of successful steps after which larger pieces are first tried again."""
MOST_PATIENCE = 10_000
_ASKED = re.compile(r"Tried to allocate (\d+(?:\.\d+)? [KMG]iB)")


class MicroBatchSize:
    """Adapts the number of samples in one forward and backward pass: halves it after out of memory, doubles it after a
    number of successful steps."""

    def __init__(self, patience: int | None = None) -> None:
        self.most: int | None = None
        """The maximum number of samples in a pass. None means all samples of the micro-batch."""
        self._patience, self._good = patience or PATIENCE, 0
        self._trying = False

    def ran_out(self, size: int) -> bool:
        """Records that pieces of ``size`` samples ran out of memory. Returns False if no smaller size is possible."""
        if size < 2:
            return False
        if self._trying:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.most, self._good, self._trying = size // 2, 0, False
        return True

    def went_well(self, wanted: int) -> None:
        """Records a successful step. Its micro-batches had at most ``wanted`` samples."""
        self._good += 1
        if self.most is not None and self._good >= self._patience:
            self.most = 2 * self.most if 2 * self.most < wanted else None
            self._good, self._trying = 0, True


class Piecewise(Plain):
    """Runs micro-batches in pieces, and repeats a step in smaller ones when memory runs out.

    Raises:
        OutOfMemoryError: If memory is too small for a single sample, or if the rank cannot repeat the step alone.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        learner.may_leave_out = True
        self._device = learner.session.device
        self._sizing = Sizing(learner) if learner.settings.fits else None
        self.size = MicroBatchSize()
        self._has_begun, self._has_looked = False, False

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        self._retries, self._fitting = 0, 0
        outcome = super().run(batch, divisor, step)
        known = [size for size in (self.size.most, self._fitting) if size]
        return dataclasses.replace(outcome, retries=self._retries, piece=min(known, default=0))

    def _passes(
        self, micro_batches: Sequence[MicroBatch], divisor: Callable[[], float], step: int
    ) -> list[Readout]:
        drawn = accelerators.generator_states(self._device)
        wanted = max(len(micro.samples) for micro in micro_batches)
        while True:
            try:
                totals = self._attempt(micro_batches, divisor, step)
            except torch.OutOfMemoryError as error:
                seen = str(error)
            else:
                self.size.went_well(wanted)
                return totals
            self._start_again(seen, min(wanted, self.size.most or wanted, self._taken), step)
            accelerators.draw_from(drawn, self._device)

    def _attempt(
        self, micro_batches: Sequence[MicroBatch], divisor: Callable[[], float], step: int
    ) -> list[Readout]:
        self._has_begun = False
        if self._sizing is None:
            self._taken = max(len(micro.samples) for micro in micro_batches)
            return super()._passes(self._cut(micro_batches), divisor, step)
        (micro,) = micro_batches  # micro_batch=auto gives one micro-batch, and only this stepper cuts it
        totals, whole = list[Readout](), not can_be_cut(micro)
        rest: MicroBatch | None = micro
        while rest is not None:
            most = len(rest.samples) if whole else self._most(self._sizing, begun=bool(totals))
            piece, rest = first_piece(rest, most)
            self._taken = len(piece.samples)
            with self._sizing.measured(self._taken, begun=bool(totals)):
                totals.append(self._pass(piece, rest is None, divisor, step))
        self._fitting = self._sizing.fitting(len(micro.samples))
        return totals

    def _pass(self, micro: MicroBatch, last: bool, divisor: Callable[[], float], step: int) -> Readout:
        """Runs a pass. The first time that it is the second of a step that is cut by memory, looks for buffers that it
        writes, which a pass over the whole batch would have written once.

        Warns:
            UserWarning: If there is such a buffer.
        """
        is_second, self._has_begun = self._has_begun, True
        if not is_second or self._has_looked or (self._sizing is None and self.size.most is None):
            return super()._pass(micro, last, divisor, step)
        self._has_looked = True
        with self._learner.loose_buffers.written() as names:
            total = super()._pass(micro, last, divisor, step)
        if names:
            warnings.warn(
                f"buffer {names[0]} is written in each forward pass, and rank {self._learner.session.rank} takes as "
                "many of them in a step as its memory asks for, which is another training than that of one device. "
                "Give a micro_batch that fits on all ranks",
                stacklevel=2,
            )
        return total

    def _most(self, sizing: Sizing, begun: bool) -> int:
        most = sizing.most(begun)
        return most if self.size.most is None else min(most, self.size.most)

    def _cut(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        most = self.size.most
        if most is None:
            return micro_batches
        wanted = (math.ceil(len(micro.samples) / most) for micro in micro_batches)
        return list(chain.from_iterable(map(pieces_of, micro_batches, wanted)))

    def _start_again(self, seen: str, size: int, step: int) -> None:
        """Prepares a retry. Called outside of the error's handler: the error's traceback keeps the failed passes'
        tensors alive."""
        self._retries += 1
        if sends_in_passes(self._learner):
            raise OutOfMemoryError(
                f"in step {step}: {seen.splitlines()[0]}. The passes cannot be taken again by this rank alone, for a "
                "loss or a layer sends something to the others in them: use a smaller micro_batch"
            )
        if not self.size.ran_out(size):
            raise OutOfMemoryError(
                f"out of memory with a single sample in a pass of step {step}: {seen.splitlines()[0]}. Use a "
                "strategy that divides the model (sharded, tensor, pipeline), a lower precision, or a device with more "
                "memory"
            )
        self._learner.undo(step)
        gc.collect()
        self._learner.watch.relieve(asked_nbytes(seen))


def asked_nbytes(words: str) -> int:
    """Returns the size of the failed allocation in bytes, parsed from PyTorch's message; 0 if the message has none."""
    found = _ASKED.search(words)
    return parse_size(found[1]) if found else 0


def wants_pieces(learner: Learner) -> bool:
    """Returns True if steps are to be retried in pieces: memory may run out, and pieces do not change the result.

    Raises:
        ConfigurationError: If ``micro_batch=auto`` was requested and would change the result.
    """
    settings = learner.settings
    if not settings.fits and settings.limits is None:
        return False
    if settings.fits:
        refuse_together(learner)
        return True
    return not computed_together(learner)


def plain_or_piecewise(learner: Learner) -> Plain:
    """Returns a stepper that retries in pieces if that is wanted and ranks do not communicate in their passes. Returns
    the plain stepper otherwise."""
    able = not learner.synchronizer.exchanges_in_passes and wants_pieces(learner)
    return Piecewise(learner) if able else Plain(learner)
