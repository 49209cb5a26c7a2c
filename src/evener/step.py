"""What is told of a step: by each rank to all others, and then by the step to whoever asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evener.data.batch import Batch
from evener.errors import DivergenceError
from evener.hardware.readout import Readout, read
from evener.records import StepRecord


class Signal(NamedTuple):
    """What one rank tells all others about a step."""

    total: float
    """Sum of the loss's terms over the rank's samples."""
    next_count: float
    """Number of terms in the rank's share of the next batch."""
    missing: float
    """0, or a code of the set of parameters without a gradient on this rank."""
    buffers_changed: float
    compute_seconds: float
    """Time of the rank's own work."""
    wait_seconds: float
    """Time for which it waited for others until the gradients were summed."""
    input_seconds: float
    """Time for which the rank waited for the batch's samples."""


@dataclass
class RankTimes:
    """Where this rank's time went, in seconds."""

    compute: float = 0.0
    wait: float = 0.0
    input: float = 0.0


class Step:
    """A step that was taken. Its loss is known when all ranks have told theirs: asking for it waits for that."""

    def __init__(self, batch: Batch, number: int, settle: Callable[[], object]) -> None:
        self._settle = settle
        self.batch = batch
        self.number = number
        self.count = 0.0
        self.seconds = 0.0
        self.lr = 0.0
        self.penalty: Readout = read(0.0)
        self.total: float | None = None
        self.compute_seconds: tuple[float, ...] = ()
        self.wait_seconds: tuple[float, ...] = ()
        self.input_seconds: tuple[float, ...] = ()

    @property
    def loss(self) -> float:
        """Mean over the terms of the global batch, and the penalty; NaN if the batch has no term."""
        if self.total is None:
            self._settle()
        assert self.total is not None
        return (self.total / self.count if self.count else math.nan) + self.penalty.value()

    def record(self) -> StepRecord:
        batch = self.batch
        return StepRecord(
            step=self.number,
            epoch=batch.epoch,
            loss=self.loss,
            samples=batch.size,
            seconds=self.seconds,
            shares=batch.shares,
            lr=self.lr,
            compute_seconds=self.compute_seconds,
            wait_seconds=self.wait_seconds,
            input_seconds=self.input_seconds,
        )


def check_finite(step: Step, signals: Sequence[Signal]) -> None:
    """Raises:
    DivergenceError: If the total of a rank is not finite.
    """
    for rank, signal in enumerate(signals):
        if not math.isfinite(signal.total):
            raise DivergenceError(not_finite(signal.total, step.number, rank))


def not_finite(value: float, step: int, rank: int) -> str:
    """What to say of a loss that is not finite."""
    return (
        f"the loss is {value} in step {step} on rank {rank}; the run stops here. Usual causes: a learning rate that is "
        "too high, a division by zero or logarithm of zero in the model, or broken input. Try a lower learning rate or "
        "clip_norm, or look for the operation with torch.autograd.set_detect_anomaly(True)"
    )
