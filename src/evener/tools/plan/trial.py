"""What a few steps in one way took."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from evener.tools.plan.candidates import Candidate

DISTURBED = 0.12
"""A trial that takes longer by more than this than another that is the same was disturbed: others only slow it down."""

OTHER_START = 0.5
"""The same for trials of different processes."""


@dataclass(frozen=True)
class Trial:
    """A few steps with one batch size. Times are medians in seconds."""

    candidate: Candidate
    batch_size: int
    shares: tuple[int, ...]
    """The number of samples of each rank."""
    steps: tuple[float, ...]
    """The seconds of each step, reading included."""
    compute: tuple[float, ...]
    """For each rank, the passes until its last gradient was ready."""
    input: tuple[float, ...]
    """For each rank, the wait for samples."""
    setup: float
    """From the start to the end of the first step."""
    bucket_nbytes: int = 0
    """Bytes of a bucket of ``ddp``, and of all gradients. 0 with other strategies."""
    gradient_nbytes: int = 0
    pieces: int = 1
    """The number of micro-batches into which a pipeline cut each share."""
    start: int = 0
    """Trials with the same number were made by the same processes."""
    retries: int = 0
    """How often a step was repeated in pieces because memory ran out."""

    @property
    def seconds(self) -> float:
        return median(self.steps)

    @property
    def pace(self) -> float:
        """Seconds for each sample."""
        return self.seconds / self.batch_size
