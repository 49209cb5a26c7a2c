"""How many ranks of this machine a run starts with, and how many are left after a death.

::

    counts 4, 3, 2      4 ranks, one dies      3 ranks, one dies      2 ranks, one dies
                        the next start has 3   has 2                  has 2: it is replaced

    counts 4, 2         4 ranks, one dies: the model is divided in two, and three ranks cannot hold that
    (tensor=2)          the next start has 2
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from evener.distributed.failure import Failure


@dataclass(frozen=True)
class Headcount:
    """The numbers of ranks that a run may have, the greatest first."""

    counts: tuple[int, ...]

    @property
    def start(self) -> int:
        """Ranks of the first start."""
        return self.counts[0]

    def after(self, ranks: int, dead: int) -> int:
        """Ranks of the next start: as many as the survivors can be; if they are too few, the dead are replaced."""
        return max((count for count in self.counts if count <= ranks - dead), default=self.counts[-1])

    def words(self, ranks: int) -> str:
        """What is to be said of a start with so many."""
        plural = "" if ranks == 1 else "s"
        return f", with {ranks} rank{plural}" if len(self.counts) > 1 else ""


def dead(failures: Mapping[int, Failure], roots: Set[int], cause: Failure) -> int:
    """How many ranks failed by themselves.

    Args:
        failures: Of each local rank that did not end well.
        roots: The local ranks that had ended before the others were asked to. The one that caused it all may not be
            among them: the others can be quicker to fail than it is to end.
    """
    own = [rank for rank, failure in failures.items() if failure.is_own]
    return sum(rank in roots or failures[rank] is cause for rank in own)
