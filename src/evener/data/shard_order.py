"""The global order of samples that are stored in shards: files that are read from the beginning to the end.

A shuffle over all samples would open a file for each sample. So an epoch shuffles the shards, takes ``together`` of
them at once, and reads each from the beginning to the end. The shards of such a block come to their end together, even
if their sizes differ, because each spreads its samples evenly over the block (:func:`evener.data.local_shards.seats`).
The samples of a batch are grouped by shard::

    shards 2 5 | 0 4 ...    sizes 6 and 3     batches of 3

    shard 2    0 1 | 2 3 | 4 5                batch 0 is samples 0 and 1 of shard 2, then sample 0 of shard 5
    shard 5    0   | 1   | 2

So a rank's share, which is a run of consecutive samples, comes from few of the shards that are being read, and mostly
from the same ones in the next batch. Which samples a batch has is a pure function of ``(seed, epoch, position)``, as
for any :class:`~evener.data.sampler.Order`: it depends on no rank, no share, and nothing that was read before.

With a ``window``, each shard's samples are shuffled within stretches of that many, as a buffer of that size can.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike

from evener.data.local_shards import seats
from evener.data.sampler import Ids, Order
from evener.errors import ConfigurationError

_EPOCHS_KEPT = 2  # workers read ahead past the end of an epoch


@dataclass(frozen=True)
class ShardOrder(Order):
    """The order of the samples of shards. The id of a sample is its number in its shard plus the lengths of the shards
    before it, in the order in which they are listed.

    ``ids(epoch, start, stop)`` is grouped by shard, so the same positions may have another order in a longer range. The
    set of samples of a range does not depend on that.

    Raises:
        ConfigurationError: If ``together`` is below 1, or ``window`` is negative.
    """

    lengths: tuple[int, ...] = ()
    """The number of samples of each shard; they add up to ``size``."""
    together: int = 8
    """The number of shards that are read at once. It must not depend on the number of ranks."""
    window: int = 0
    """The number of consecutive samples of a shard that are shuffled; 0 or 1 reads each shard in its own order."""
    _known: dict[int, _Blocks] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = self.together, self.window
        if not all(type(each) is int for each in numbers) or self.together < 1 or self.window < 0:
            raise ConfigurationError(
                f"together={self.together} and window={self.window} give no order of shards: together must be "
                "an integer of at least 1, and window one of at least 0"
            )

    @classmethod
    def of_lengths(cls, lengths: tuple[int, ...], seed: int, together: int, window: int) -> ShardOrder:
        """Creates the shuffled order of shards of these lengths."""
        return cls(sum(lengths), seed, lengths=lengths, together=together, window=window)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"positions [{start}, {stop}) are not within [0, {self.size})")
        blocks, parts = self._blocks(epoch), [np.empty(0, dtype=np.int64)]
        for block in blocks.between(start, stop):
            shards, sizes, first = blocks.shards[block], blocks.sizes[block], blocks.starts[block]
            low, high = max(start - first, 0), min(stop - first, sum(sizes))
            if low < high:
                taken = zip(shards, seats(sizes, low), seats(sizes, high), strict=True)
                parts += [self._read_of(epoch, shard, begin, end) for shard, begin, end in taken]
        return np.concatenate(parts)

    def ids_at(self, epoch: int, positions: ArrayLike) -> Ids:
        """Returns the sample ids at any ``positions``. Slower than :meth:`ids`, which is for ranges."""
        wanted = np.asarray(positions, dtype=np.int64)
        found = [int(self.ids(epoch, at, at + 1)[0]) for at in wanted.ravel().tolist()]
        return np.array(found, dtype=np.int64).reshape(wanted.shape)

    def position(self, epoch: int, ids: ArrayLike) -> Ids:
        """Returns the positions of ``ids``. Takes the time to list the epoch."""
        listed = self.ids_at(epoch, np.arange(self.size))
        return np.argsort(listed)[np.asarray(ids, dtype=np.int64)]

    def checksum(self) -> int:
        """Returns the CRC-32 of what decides the order beside the seed, to recognise it when a run resumes."""
        return zlib.crc32(repr((self.lengths, self.together, self.window)).encode())

    @cached_property
    def offsets(self) -> list[int]:
        """The id of the first sample of each shard."""
        return list(accumulate(self.lengths, initial=0))[:-1]

    def _read_of(self, epoch: int, shard: int, begin: int, end: int) -> Ids:
        """Returns the ids at the positions ``[begin, end)`` of the reading of a shard."""
        numbers = np.arange(begin, end, dtype=np.int64)
        if self.window > 1 and self.shuffle and begin < end:
            windows = range(begin // self.window, -(-end // self.window))
            sizes = [min(self.window, self.lengths[shard] - each * self.window) for each in windows]
            shuffled = [
                each * self.window + _shuffled(size, self.seed, epoch, shard, each)
                for each, size in zip(windows, sizes, strict=True)
            ]
            skipped = begin - windows[0] * self.window
            numbers = np.concatenate(shuffled)[skipped : skipped + end - begin]
        return numbers + self.offsets[shard]

    def _blocks(self, epoch: int) -> _Blocks:
        if epoch not in self._known:
            for old in list(self._known)[: -_EPOCHS_KEPT + 1 or None]:
                del self._known[old]
            count, step = len(self.lengths), self.together
            listed = Order(count, self.seed, self.shuffle).ids(epoch, 0, count).tolist()
            shards = [listed[at : at + step] for at in range(0, count, step)]
            sizes = [tuple(self.lengths[shard] for shard in each) for each in shards]
            starts = list(accumulate(map(sum, sizes), initial=0))
            self._known[epoch] = _Blocks(shards, sizes, starts)
        return self._known[epoch]


@dataclass(frozen=True)
class _Blocks:
    """The blocks of shards of an epoch."""

    shards: list[list[int]]
    sizes: list[tuple[int, ...]]
    """The number of samples of each shard of each block."""
    starts: list[int]
    """The position of the first sample of each block, and the end of the epoch."""

    def between(self, start: int, stop: int) -> range:
        """Returns the blocks that have positions in ``[start, stop)``."""
        return range(max(0, bisect_right(self.starts, start) - 1), bisect_right(self.starts, stop - 1))


@lru_cache(maxsize=256)
def _shuffled(size: int, seed: int, epoch: int, shard: int, window: int) -> Ids:
    """Returns a random order of the samples of a window."""
    own_seed = seed + ((shard + 1) << 64) + ((window + 1) << 128)
    return Order(size, own_seed).ids_at(epoch, np.arange(size))
