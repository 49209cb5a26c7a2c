"""Ring all-reduce: the minimum of bytes on every link, in a number of rounds that grows with the number of ranks.

Each rank passes a slice of the buffer to the next rank. In the first lap a rank adds the arriving slice, until
every rank holds one slice of the sum. In the second lap it copies the slice, until every rank holds all slices. On
three ranks (``0>1+``: chunk 0 goes to rank 1 and is added there)::

    round   rank 0   rank 1   rank 2
        0   0>1+     1>2+     2>0+
        1   2>1+     0>2+     1>0+
        2   1>1      2>2      0>0
        3   0>1      1>2      2>0

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from evener.collectives.schedules.schedule import Bools, Floats, Ints, Round, Schedule, Stretch, Topology


def ring(topology: Topology, segments: int = 1) -> Schedule:
    """Returns the schedule of a ring through all ranks, host by host: it enters and leaves each host once.

    Ignores ``segments``.
    """
    bounds = np.arange(topology.world_size + 1) / topology.world_size
    rings = Rings([topology.order.tolist()], bounds)
    return Schedule.from_stretches(topology, bounds, (*rings.reduce_scatter(), *rings.all_gather()))


class Rings:
    """Several rings of unequal sizes that run in parallel. Each divides the whole buffer equally among its ranks.

    Args:
        groups: The ranks of each ring.
        cuts: Fractions of the buffer, ascending; ``k / size`` is among them for every ring and
            ``0 <= k <= size``.
        parts: Number of chunks between one cut and the next.
    """

    def __init__(self, groups: Sequence[Sequence[int]], cuts: Floats, parts: int = 1) -> None:
        sizes = [len(group) for group in groups]
        self.rank = np.concatenate([np.asarray(group, dtype=np.int64) for group in groups])
        self.following = np.concatenate([np.roll(group, -1) for group in groups])
        self.place = np.concatenate([np.arange(size) for size in sizes])
        self.size = np.repeat(sizes, sizes)
        self.cuts, self.parts = cuts, parts

    def reduce_scatter(self) -> Iterator[Stretch]:
        """Yields the first lap. It leaves the rank at place ``i`` of a ring with slice ``i + 1`` of the sum."""
        return self._lap(first_slice=self.place, reduce=True)

    def all_gather(self) -> Iterator[Stretch]:
        """Yields the second lap, which distributes the slices that :meth:`reduce_scatter` left."""
        return self._lap(first_slice=self.place + 1, reduce=False)

    def slice_at(self, place: Ints, size: Ints) -> tuple[Ints, Ints]:
        """Returns the first chunk of slice number ``place`` in a ring of ``size``, and the chunk after its last."""
        place = place % size
        return self._chunk(place / size), self._chunk((place + 1) / size)

    def _chunk(self, fraction: Floats) -> Ints:
        return np.searchsorted(self.cuts, fraction).astype(np.int64) * self.parts

    def _lap(self, first_slice: Ints, reduce: bool) -> Iterator[Stretch]:
        """Yields one lap. A ring of g ranks takes g - 1 rounds; larger rings go on when smaller ones are done."""
        done = 0
        for rounds in sorted(set((self.size - 1).tolist()) - {0}):
            yield Stretch(
                rounds - done, partial(self._pass_on, first_slice - done, self.size > rounds, reduce)
            )
            done = rounds

    def _pass_on(self, first_slice: Ints, active: Bools, reduce: bool, index: int) -> Round:
        start, stop = self.slice_at((first_slice - index)[active], self.size[active])
        return Round.from_columns(self.rank[active], self.following[active], start, stop, reduce)
