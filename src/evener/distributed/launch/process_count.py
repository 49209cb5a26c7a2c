"""Number of ranks of this machine: at the start of a run, and after ranks have died.

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
    """The numbers of ranks that a run may have, the largest first."""

    counts: tuple[int, ...]

    @property
    def start(self) -> int:
        """Number of ranks in the first start."""
        return self.counts[0]

    def after(self, ranks: int, dead: int) -> int:
        """Returns the number of ranks of the next start: the largest allowed one that does not exceed the survivors.

        If there are too few survivors, the smallest allowed number: then dead ranks are replaced.
        """
        return max((count for count in self.counts if count <= ranks - dead), default=self.counts[-1])

    def description(self, ranks: int) -> str:
        """Returns text about the number of ranks for the message about a restart; empty if the number is fixed."""
        plural = "" if ranks == 1 else "s"
        return f", with {ranks} rank{plural}" if len(self.counts) > 1 else ""


def dead(failures: Mapping[int, Failure], roots: Set[int], cause: Failure) -> int:
    """Returns how many ranks failed by themselves.

    Args:
        failures: The failure of each local rank that failed.
        roots: The local ranks that had ended before the agent ended the others. The rank that caused the failure may be
            missing: other ranks may end sooner as a consequence.
        cause: The failure that caused the others.
    """
    own = [rank for rank, failure in failures.items() if failure.is_own]
    return sum(rank in roots or failures[rank] is cause for rank in own)
