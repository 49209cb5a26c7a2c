"""Result of an estimate: bytes per rank, by category."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evener.core.config.sizes import size_words
from evener.core.text import counted
from evener.hardware.memory.counters import CATEGORIES


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank's device, in bytes."""

    rank: int
    peak: int
    """Largest number of bytes held by tensors during a step, the optimizer's state included."""
    at_peak: dict[str, int]
    """Bytes at the peak by category; they add up to :attr:`peak`."""
    between: int
    """Bytes held between steps."""
    setup_peak: int
    """Largest number of bytes held while model and optimizer are built."""
    shared: int = 0
    """Shared memory that the rank allocates in addition, for sums over the ranks of a host."""
    outside: int = 0
    """Largest number of bytes offloaded from the device, to host memory or files."""

    @property
    def needed(self) -> int:
        """Bytes that the rank needs at least."""
        return max(self.peak, self.setup_peak) + self.shared

    def exceeds(self, limit: int | None) -> bool:
        """Returns True if the rank needs more than ``limit`` bytes. None means no limit."""
        return limit is not None and self.needed > limit


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory of all ranks."""

    task: str
    """Name of the task."""
    strategy: str
    """Name of the strategy, with its axes if it has several."""
    device: str
    """Kind of device that the estimate is for."""
    batch_size: int
    """Samples per batch over all ranks."""
    shares: tuple[int, ...]
    """Samples of each rank's part of a batch."""
    ranks: tuple[RankMemory, ...]
    """Memory of each rank."""
    notes: tuple[str, ...] = ()
    """Limits of the estimate, in words."""

    def __repr__(self) -> str:
        """Returns a summary in one line; ``str`` gives the table."""
        ranks = counted(len(self.ranks), "rank")
        return (
            f"<MemoryEstimate of {self.task}: at most {size_words(self.peak)} on {ranks} ({self.strategy})>"
        )

    @property
    def peak(self) -> int:
        """Bytes needed on the rank that needs the most."""
        return max(rank.needed for rank in self.ranks)

    def exceeding(self, limits: Sequence[int | None]) -> list[RankMemory]:
        """Returns the ranks that need more than their limits. ``limits`` has one entry in bytes per rank, or None."""
        return [rank for rank, limit in zip(self.ranks, limits, strict=True) if rank.exceeds(limit)]

    def as_json(self) -> dict[str, Any]:
        """Returns all fields and the peak as JSON-serializable values."""
        return dataclasses.asdict(self) | {"peak": self.peak}

    def __str__(self) -> str:
        """Returns a table with one column per rank."""
        rows = [("peak of a step", [rank.peak for rank in self.ranks])]
        rows += [(f"  {name}", [rank.at_peak[name] for rank in self.ranks]) for name in CATEGORIES]
        rows += [
            ("between steps", [rank.between for rank in self.ranks]),
            ("while it is set up", [rank.setup_peak for rank in self.ranks]),
            ("shared memory, besides", [rank.shared for rank in self.ranks]),
            ("needed", [rank.needed for rank in self.ranks]),
        ]
        outside = [rank.outside for rank in self.ranks]
        rows += [("outside of the device", outside)] if any(outside) else []
        head = f"{'':<24}" + "".join(f"{f'rank {rank.rank}':>12}" for rank in self.ranks)
        lines = [f"{name:<24}" + "".join(f"{size_words(size):>12}" for size in sizes) for name, sizes in rows]
        said = f"{self.task}: strategy {self.strategy}, batches of {self.batch_size} in parts of "
        said += f"{', '.join(map(str, self.shares))}, {self.device}"
        return "\n".join([said, head, *lines, *(f"note: {note}" for note in self.notes)])
