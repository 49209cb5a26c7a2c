"""The order of samples: a pure function of ``(seed, epoch, position)``, independent of the ranks.

Any rank can compute the sample at any position. So the shares may change at every step, a run may resume in mid-epoch
on another number of ranks, and no rank stores a list of all samples. Shuffling uses no stored permutation, but a keyed
one that is evaluated at a position::

    position ──▶ (left, right) ──▶ 8 Feistel rounds ──▶ id   if id < size, else once more (cycle walking)
                  h bits  h bits    left ^= f(right, key); swap

A Feistel network is a bijection of ``[0, 4**h)`` for any ``f`` (Luby and Rackoff, 1988). Applying it again until the
value is below ``size`` (cycle walking) gives a bijection of ``[0, size)`` (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002). For more than one sample the domain is less than four times the size, so few steps are needed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evener.errors import ConfigurationError

Ids = NDArray[np.int64]
_Words = NDArray[np.uint64]

_ROUNDS = 8
# Positions evaluated at once, to spread the fixed cost of array operations over 16,384 samples.
_BLOCK = 1 << 14
_EPOCHS_KEPT = 4
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)  # the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Order:
    """The order of ``size`` samples in every epoch. With ``shuffle``, each epoch has a new random order.

    Raises:
        ConfigurationError: If ``size`` is below 1 or ``seed`` is negative.
    """

    size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigurationError(f"a data set needs at least one sample, not {self.size}")
        if self.seed < 0:
            raise ConfigurationError(f"the seed of an order must not be negative, as {self.seed} is")

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Returns the sample ids at positions ``[start, stop)`` of ``epoch``, in a new array ``(stop - start,)``."""
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"positions [{start}, {stop}) are not within [0, {self.size})")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        blocks = range(start // _BLOCK, -(-stop // _BLOCK))
        if len(blocks) == 1:  # true for nearly all batches
            within = slice(start - blocks[0] * _BLOCK, stop - blocks[0] * _BLOCK)
            return _block(self, epoch, blocks[0])[within].copy()
        parts = [
            _block(self, epoch, block)[max(start - block * _BLOCK, 0) : stop - block * _BLOCK]
            for block in blocks
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def ids_at(self, epoch: int, positions: ArrayLike) -> Ids:
        """Returns the sample ids at any ``positions`` of ``epoch``, in the shape of ``positions``."""
        return self._walk(positions, _Feistel.keyed(self.size, self.seed, epoch).forward)

    def position(self, epoch: int, ids: ArrayLike) -> Ids:
        """Returns the positions of ``ids`` in ``epoch``, in the shape of ``ids``: the inverse of ``ids_at``."""
        return self._walk(ids, _Feistel.keyed(self.size, self.seed, epoch).backward)

    def number_of_batches(self, batch_size: int, position: int = 0) -> int:
        """Returns the number of global batches from ``position`` to the end of an epoch."""
        return -(-(self.size - position) // batch_size)

    def batches(self, batch_size: int, position: int = 0) -> Iterator[tuple[int, int]]:
        """Yields the bounds ``(start, stop)`` of each global batch from ``position`` on. The last one may be short."""
        for start in range(position, self.size, batch_size):
            yield start, min(start + batch_size, self.size)

    def _walk(self, values: ArrayLike, step: Callable[[_Words], _Words]) -> Ids:
        """Applies ``step`` to each value again and again until it is below ``size``."""
        result = np.array(values, dtype=np.int64)
        if result.size and not 0 <= result.min() <= result.max() < self.size:
            raise ValueError(f"values {result.min()} to {result.max()} are not within [0, {self.size})")
        if not self.shuffle:
            return result
        words = result.ravel().astype(np.uint64)
        walking = np.arange(words.size)
        while walking.size:
            words[walking] = step(words[walking])
            walking = walking[words[walking] >= self.size]
        return words.astype(np.int64).reshape(result.shape)


@dataclass(frozen=True)
class _Feistel:
    """A Feistel network: a bijection of ``[0, 4**half_bits)`` that depends on the keys."""

    half_bits: int
    keys: _Words  # (_ROUNDS,)

    @classmethod
    def keyed(cls, size: int, seed: int, epoch: int) -> _Feistel:
        half_bits = max(1, -(-(size - 1).bit_length() // 2))
        keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(_ROUNDS, np.uint64)
        return cls(half_bits, keys.astype(np.uint64))

    def forward(self, words: _Words) -> _Words:
        left, right = self._split(words)
        for key in self.keys:
            left, right = right, left ^ self._mix(right, key)
        return self._join(left, right)

    def backward(self, words: _Words) -> _Words:
        left, right = self._split(words)
        for key in self.keys[::-1]:
            left, right = right ^ self._mix(left, key), left
        return self._join(left, right)

    def _mix(self, half: _Words, key: np.uint64) -> _Words:
        """Returns a hash of ``half`` and ``key`` of ``half_bits`` bits."""
        words = (half ^ key) * _MULTIPLIER_1
        words ^= words >> np.uint64(31)
        words *= _MULTIPLIER_2
        words >>= np.uint64(64 - self.half_bits)
        return words

    def _split(self, words: _Words) -> tuple[_Words, _Words]:
        shift = np.uint64(self.half_bits)
        return words >> shift, words & ((np.uint64(1) << shift) - np.uint64(1))

    def _join(self, left: _Words, right: _Words) -> _Words:
        return (left << np.uint64(self.half_bits)) | right


@dataclass(frozen=True)
class ListedOrder(Order):
    """An order given by a function of the user: sorted by length, weighted, or a part of the data set, for example.

    Args:
        size: Samples of an epoch, the same number in each.
        listed: Takes the number of an epoch and returns its sample ids, ``(size,)``. It must be the same function on
            all ranks, and depend only on the epoch, because a run may resume in any epoch.
        samples: Samples of the data set.

    Raises:
        ConfigurationError: When an epoch is read whose list has another number of samples, or an invalid sample id.
    """

    listed: Callable[[int], ArrayLike] = range
    samples: int = 0
    _known: dict[int, Ids] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The lists of the last epochs that were asked for."""

    @classmethod
    def of_task(cls, listed: Callable[[int], ArrayLike], samples: int) -> ListedOrder:
        """Creates the order from ``Task.order``, for a data set of ``samples`` samples. Epoch 0 gives the size."""
        first = _numbers(listed, 0, samples)
        order = cls(len(first), listed=listed, samples=samples)
        order._known[0] = first
        return order

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"positions [{start}, {stop}) are not within [0, {self.size})")
        return self._epoch(epoch)[start:stop].copy()

    def ids_at(self, epoch: int, positions: ArrayLike) -> Ids:
        found: Ids = self._epoch(epoch)[np.asarray(positions, dtype=np.int64)]
        return found

    def position(self, epoch: int, ids: ArrayLike) -> Ids:
        """Returns the first position of each of ``ids`` in ``epoch``."""
        listed = self._epoch(epoch)
        order = np.argsort(listed, kind="stable")
        return order[np.searchsorted(listed, ids, sorter=order)].astype(np.int64)

    def checksum(self) -> int:
        """Returns the CRC-32 of the first epoch's sample ids, to recognise the order when a run resumes."""
        return zlib.crc32(self._epoch(0).tobytes())

    def _epoch(self, epoch: int) -> Ids:
        found = self._known.get(epoch)
        if found is not None:
            return found
        found = _numbers(self.listed, epoch, self.samples)
        if len(found) != self.size:
            raise ConfigurationError(
                f"Task.order lists {len(found)} samples for epoch {epoch}, and {self.size} for the first: it must list "
                "as many for each, so that the run knows its steps"
            )
        for old in list(self._known)[: -_EPOCHS_KEPT + 1 or None]:
            del self._known[old]
        self._known[epoch] = found
        return found


def _numbers(listed: Callable[[int], ArrayLike], epoch: int, samples: int) -> Ids:
    found = np.asarray(listed(epoch))
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        raise ConfigurationError(
            f"Task.order gave an array of shape {found.shape} and type {found.dtype} for epoch {epoch}; it must list "
            "at least one sample, by its number in the training set"
        )
    if found.min() < 0 or found.max() >= samples:
        wrong = found.min() if found.min() < 0 else found.max()
        raise ConfigurationError(
            f"Task.order lists sample {wrong} in epoch {epoch}, and the training set has {samples}: 0 to {samples - 1}"
        )
    numbers = found.astype(np.int64)
    numbers.flags.writeable = False
    return numbers


@lru_cache(maxsize=16)
def _block(order: Order, epoch: int, block: int) -> Ids:
    ids = order.ids_at(epoch, np.arange(block * _BLOCK, min((block + 1) * _BLOCK, order.size)))
    ids.flags.writeable = False
    return ids
