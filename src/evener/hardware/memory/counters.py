"""How many bytes are held and were held at most, and for what, where that is said of a thing later than it came.

What a tensor is for is often known only when it has been there for a while: a gradient is one when backward has ended,
and the peak was in the middle of it. So the peak is kept not as sums but as the things that made it, and these are
asked what they are when somebody asks for the peak::

    came     a  b  c     d                 a, b and d are still there; c has gone, but was there at the peak
    went              b'    c              b' had gone before the peak
                         ▲
                         peak              = those there that had come by then, and those that have gone since

Of what goes, only that is kept which was there at the last peak, so that a higher one clears the list.
"""

from __future__ import annotations

from collections.abc import Iterable

PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER = "parameters", "buffers", "gradients", "optimizer"
ACTIVATIONS, BUCKETS, INPUTS, OTHER = "activations", "buckets", "inputs", "other"
CATEGORIES = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUCKETS, INPUTS, OTHER)
"""What memory is for. ``activations``: made by forward passes, those that checkpointing repeats too. ``buckets``: made
to be sent or received. ``other``: passing results of backward and of the optimizer, and all else."""

UNCOUNTED = "uncounted"
"""Said of what is made, that it does not count until it is named."""


class Held:
    """Bytes that are held together, and go together."""

    __slots__ = ("born", "category", "nbytes")

    def __init__(self, nbytes: int, category: str, born: int) -> None:
        self.nbytes, self.category, self.born = nbytes, category, born


class Tally:
    """Counts what comes and goes, in bytes."""

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0
        self._there: set[Held] = set()
        self._gone: list[Held] = []  # since the peak, at which they were there
        self._came = 0
        self._peak_came = 0

    def add(self, nbytes: int, category: str) -> Held:
        """More bytes are held. What was returned says later that they have gone, or are for something else."""
        self._came += 1
        came = Held(nbytes, category, self._came)
        self._there.add(came)
        # An addition in place is one to all threads: Python changes threads, and frees what is in cycles, in calls.
        self.held += nbytes
        if self.held > self.peak:
            self.reset_peak()
        return came

    def remove(self, gone: Held) -> None:
        """They are held no more."""
        self._there.discard(gone)
        self.held -= gone.nbytes
        if gone.born <= self._peak_came:
            self._gone.append(gone)

    def reset_peak(self) -> None:
        """The peak is what is held now."""
        self.peak, self._peak_came = self.held, self._came
        self._gone.clear()

    def now(self) -> dict[str, int]:
        """What is held, by category."""
        return _sums(self._there)

    def at_peak(self) -> dict[str, int]:
        """What was held at the peak, by the categories that are known by now."""
        return _sums([*(held for held in self._there if held.born <= self._peak_came), *self._gone])


def _sums(things: Iterable[Held]) -> dict[str, int]:
    sums = dict.fromkeys(CATEGORIES, 0)
    for held in things:
        sums[held.category] += held.nbytes
    return sums
