"""The batch that a prepared loop is computing with."""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from evener.data.batch import Batch, MicroBatch
from evener.hardware.async_read import Readout
from evener.nn.context import Scope


@dataclass(eq=False)
class CurrentBatch:
    """A batch that the loop is computing with."""

    batch: Batch
    """This rank's share, and what all ranks know of the whole batch, without the samples themselves."""
    mark: float
    """Number that identifies the batch. It is the same on all ranks if they have the same samples."""
    step: int = 0
    """The number of the batch among those of its loader, over all epochs."""
    indices: list[Any] | None = None
    """What this rank reads of a data set with indices."""
    worked: Readout | None = None
    """Seconds of this rank's own work at the end of the last backward pass with it. None before the first."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    is_counted: bool = False
    """True if a mean was taken over as many terms as the rank has samples."""
    counted: set[int] = field(default_factory=set)
    """Integers that were counted over all ranks."""
    dim: int = 0
    """The dimension of the samples in tensors."""
    may_be_columns: bool = False
    """True if a collate function of the user's own may put the samples along another dimension."""
    is_crossed: bool = False
    """True if the loop used another loader at once, and this rank's shares of the two batches differ in size.

    Then the batch that a loss belongs to is unknown.
    """
    is_left: bool = False
    """True if the loop was left at this batch."""
    scope: AbstractContextManager[Scope | None] = field(default_factory=nullcontext)
    """The context that layers see while the loop computes with this batch."""

    @property
    def agreed(self) -> float:
        """Number that is the same on all ranks if they have the same samples and divide them in the same way."""
        return float(zlib.crc32(repr((self.mark, self.batch.shares)).encode()))

    @property
    def micro(self) -> MicroBatch:
        """This rank's share."""
        return self.batch.micro_batches[0]

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of samples of each rank."""
        return self.batch.shares

    @property
    def samples(self) -> int:
        """Number of samples that count on this rank."""
        return self.micro.size

    def width(self, elements: int, rows: int = 1) -> int:
        """Returns the number of elements of a sample; 0 if the rows are not this rank's samples. A number without
        dimensions is one row."""
        return elements // rows if rows and rows == self.samples else 0

    def differs(self, other: CurrentBatch) -> bool:
        """Returns True if a loss may have taken the samples of one batch for those of the other."""
        if self.is_counted or other.is_counted:
            return self.samples != other.samples
        return bool(self.samples) != bool(other.samples)
