"""What an estimate says: bytes of each rank, by what they are for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evener.core.config.sizes import size_words
from evener.hardware.memory.counters import CATEGORIES


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank's device, in bytes."""

    rank: int
    peak: int
    """The most that tensors take at once while steps are taken, the optimizer's state being there."""
    at_peak: dict[str, int]
    """The same by category; adds up to :attr:`peak`."""
    between: int
    """What is held between steps."""
    setup_peak: int
    """The most that they take while model and optimizer are built."""
    shared: int = 0
    """Shared memory that the rank makes besides for sums over ranks of one host."""
    outside: int = 0
    """The most that is kept outside of the device's memory: of the host's, or in files."""

    @property
    def needed(self) -> int:
        """The most that the rank has to have."""
        return max(self.peak, self.setup_peak) + self.shared

    def exceeds(self, limit: int | None) -> bool:
        """Whether a limit in bytes is too little; None is none."""
        return limit is not None and self.needed > limit


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of all ranks, by rank."""

    task: str
    """Its name."""
    strategy: str
    """Its name, with its axes if it has several."""
    device: str
    """The kind of device it was worked out for."""
    batch_size: int
    """Samples of a batch over all ranks."""
    shares: tuple[int, ...]
    """Samples of each part of a batch."""
    ranks: tuple[RankMemory, ...]
    """Each rank's memory."""
    notes: tuple[str, ...] = ()
    """What the estimate could not know, in words."""

    def __repr__(self) -> str:
        """In one line; ``str`` is the table."""
        ranks = f"{len(self.ranks)} rank{'s' if len(self.ranks) != 1 else ''}"
        return (
            f"<MemoryEstimate of {self.task}: at most {size_words(self.peak)} on {ranks} ({self.strategy})>"
        )

    @property
    def peak(self) -> int:
        """Bytes that the rank which needs the most has to have."""
        return max(rank.needed for rank in self.ranks)

    def exceeding(self, limits: Sequence[int | None]) -> list[RankMemory]:
        """The ranks that need more than their limits in bytes, one for each rank."""
        return [rank for rank, limit in zip(self.ranks, limits, strict=True) if rank.exceeds(limit)]

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return dataclasses.asdict(self) | {"peak": self.peak}

    def __str__(self) -> str:
        """A table, a column for each rank."""
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
