"""Counts bytes in use and their peak by category, where the category of an allocation may become known later.

The category of a tensor is often known only some time after it was allocated: a gradient is known when backward has
ended, but the peak was during backward. The peak is therefore stored not as sums but as the allocations that made it,
and they are summed by category when the peak is read::

    came     a  b  c     d                 a, b and d are still there; c has gone, but was there at the peak
    went              b'    c              b' had gone before the peak
                         ▲
                         peak              = those there that had come by then, and those that have gone since

Of freed allocations, only those that existed at the last peak are kept. A higher peak clears the list.
"""

from __future__ import annotations

from collections.abc import Iterable

PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER = "parameters", "buffers", "gradients", "optimizer"
ACTIVATIONS, BUCKETS, INPUTS, OTHER = "activations", "buckets", "inputs", "other"
CATEGORIES = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUCKETS, INPUTS, OTHER)
"""Categories of memory. ``activations``: allocated in forward passes, also those that activation checkpointing repeats.
``buckets``: allocated to be sent or received. ``other``: temporary results of backward and of the optimizer, and the
rest."""

UNCOUNTED = "uncounted"
"""Category of tensors that do not count until :meth:`MemoryTracker.name` assigns a category."""


class HeldBytes:
    """An allocation: bytes that are freed together."""

    __slots__ = ("born", "category", "nbytes")

    def __init__(self, nbytes: int, category: str, born: int) -> None:
        self.nbytes, self.category, self.born = nbytes, category, born


class ByteCounter:
    """Counts allocations and their peak, in bytes."""

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0
        self._there: set[HeldBytes] = set()
        self._gone: list[HeldBytes] = []  # in use at the peak, freed since
        self._came = 0
        self._peak_came = 0

    def add(self, nbytes: int, category: str) -> HeldBytes:
        """Adds an allocation. Pass the returned object to :meth:`remove`; its ``category`` may be changed."""
        self._came += 1
        came = HeldBytes(nbytes, category, self._came)
        self._there.add(came)
        # No other thread can interrupt this addition: Python switches threads, and collects cycles, at calls.
        self.held += nbytes
        if self.held > self.peak:
            self.reset_peak()
        return came

    def remove(self, gone: HeldBytes) -> None:
        """Removes an allocation that was freed."""
        self._there.discard(gone)
        self.held -= gone.nbytes
        if gone.born <= self._peak_came:
            self._gone.append(gone)

    def reset_peak(self) -> None:
        """Sets the peak to the bytes in use now."""
        self.peak, self._peak_came = self.held, self._came
        self._gone.clear()

    def now(self) -> dict[str, int]:
        """Returns the bytes in use now, by category."""
        return _sums(self._there)

    def at_peak(self) -> dict[str, int]:
        """Returns the bytes in use at the peak, by the categories that the allocations have now."""
        return _sums([*(held for held in self._there if held.born <= self._peak_came), *self._gone])


def _sums(things: Iterable[HeldBytes]) -> dict[str, int]:
    sums = dict.fromkeys(CATEGORIES, 0)
    for held in things:
        sums[held.category] += held.nbytes
    return sums
