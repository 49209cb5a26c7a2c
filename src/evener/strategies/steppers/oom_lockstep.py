"""Cuts micro-batches into pieces that fit into memory, equally many on all ranks: for ranks that communicate in passes.

A sharded model gathers its weights in every pass, so that all ranks must run equally many passes. Before a step the
ranks exchange how many pieces each needs, and all take the largest number. A rank with more memory or fewer samples
then runs smaller pieces. In the first step, while sizes are still unknown, the ranks exchange this number before every
piece::

    rank 0, 24 GB, 12 samples    1 │ 2 │ 4 │ 5
    rank 1, 12 GB,  6 samples    1 │ 2 │ 2 │ 1      placeholders when no samples are left

Memory is not meant to run out. If it does, because a batch needs more memory than earlier ones, the run ends: the other
ranks are waiting in the middle of a pass, so that the rank cannot retry.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from evener.components.microbatches import can_be_cut, first_piece
from evener.data.batch import Batch, MicroBatch
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout
from evener.hardware.timers import waiting
from evener.strategies.interfaces import StepOutcome, Stepper
from evener.strategies.learner import Learner
from evener.strategies.steppers.oom_retry import Piecewise
from evener.strategies.steppers.oom_sizing import Sizing, refuse_together
from evener.strategies.steppers.plain import Plain


class AgreedPieces(Plain):
    """Runs a micro-batch in as many pieces as the rank with the greatest need requires."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self._sizing, self._fitting = Sizing(learner), 0

    def run(self, batch: Batch, divisor: Callable[[], float], step: int) -> StepOutcome:
        return dataclasses.replace(super().run(batch, divisor, step), piece=self._fitting)

    def _passes(
        self, micro_batches: Sequence[MicroBatch], divisor: Callable[[], float], step: int
    ) -> list[Readout]:
        (micro,) = micro_batches  # micro_batch=auto gives one micro-batch, and only this stepper cuts it
        totals = list[Readout]()
        for piece, last in self._pieces(micro):
            with self._sizing.measured(len(piece.samples), begun=bool(totals)):
                totals.append(self._pass(piece, last, divisor, step))
        self._fitting = self._sizing.fitting(len(micro.samples))
        return totals

    def _pieces(self, micro: MicroBatch) -> Iterator[tuple[MicroBatch, bool]]:
        """Yields the pieces of this rank, and for each whether it is the last one. All ranks get equally many."""
        if micro.weight and not can_be_cut(micro):
            raise ConfigurationError(
                "micro_batch=auto takes samples in pieces, and this batch cannot be cut: it holds something that is no "
                "tensor with a row for each sample. Give micro_batch a number"
            )
        nothing = dataclasses.replace(micro.rows(0, 1), weight=0) if micro.weight else micro
        rest = micro if micro.weight else None
        learning, left = not self._sizing.has_learned, self._agreed(rest, begun=False)
        while left:
            piece = nothing
            if rest is not None:
                piece, rest = first_piece(rest, math.ceil(len(rest.samples) / left))
            yield piece, left == 1
            left = self._agreed(rest, begun=True) if learning else left - 1

    def _agreed(self, rest: MicroBatch | None, begun: bool) -> int:
        """Returns the largest number of pieces that any rank still needs. All ranks must call this together."""
        own = math.ceil(len(rest.samples) / self._sizing.most(begun)) if rest is not None else 0
        with waiting():
            rows = self._learner.session.control.exchange([own]).wait()
        return int(max(wanted for (wanted,) in rows))


def fitted(stepper: Stepper, learner: Learner, several_devices: bool) -> Stepper:
    """Returns ``stepper``, or a stepper that sizes pieces by memory if ``micro_batch=auto`` requests one.

    Args:
        several_devices: True if the process uses several devices; only the memory of one is known.

    Raises:
        ConfigurationError: If ``micro_batch=auto`` does not work with this strategy or model.
    """
    if not learner.settings.fits or isinstance(stepper, Piecewise):
        return stepper
    if several_devices or type(stepper) is not Plain:
        raise ConfigurationError(
            "micro_batch=auto goes with strategies that pass a micro-batch through one device of each rank, such as "
            f"'ddp', 'sharded', 'tensor' and 'context', and not with {learner.name!r}: give micro_batch a number"
        )
    refuse_together(learner)
    return AgreedPieces(learner)
