"""What the memory of a step was used for, worked out from what is read anyway and what is known to be held.

Nobody counts single tensors in a usual run. What the rank holds all the time is known by its size; what came in forward
and backward and went again is what was there at most and is not there any more::

    bytes      ╭─╮             peak ┐
         ╭─────╯ ╰──╮               ├ activations
    ─────╯          ╰─────     held ┤
       passes of step n             ├ parameters, buffers, gradients, optimizer, buckets, inputs: by their sizes
                                    └ other: the rest

The peak may also lie between two steps' passes, in the update or in an evaluation. Then nothing is said of activations,
and what came for the moment is ``other``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from evener.hardware.memory.counters import ACTIVATIONS, BUCKETS, CATEGORIES, OTHER


class Lap(NamedTuple):
    """Bytes, as a gauge reads them."""

    held: int
    """In use now."""
    peak: int
    """The most since the last time."""
    reserved: int = 0
    """What the allocator of a GPU keeps; what of that is not in use is cached, or lost between what is. 0 elsewhere."""
    split: int = 0
    """Of what is reserved and not in use, what lies between what is: it cannot be given back."""
    retries: int = 0
    """How often in all the allocator has given back what it kept, and asked the device again."""
    failures: int = 0
    """How often in all it was out of memory."""


class News(NamedTuple):
    """What a rank has noticed of its device's memory since the step before, in bytes where nothing else is said."""

    lost: int = 0
    """Lies in pieces between what is in use."""
    retries: int = 0
    """How often the allocator has given back what it kept, and asked again; the device waited meanwhile."""
    won: int = 0
    """Was given back to the device, by emptying the cache."""
    others: int = 0
    """Belongs to other processes."""
    pid: int = 0
    """Of the one of them that has most."""
    free: int = 0
    """Is free on the device then."""


class MemoryUse(NamedTuple):
    """Bytes of a rank's device, of a step: since the passes of the step before."""

    held: int
    """In use after its passes."""
    peak: int
    """The most."""
    reserved: int = 0
    """See :class:`Lap`."""
    parts: tuple[int, ...] = (0,) * len(CATEGORIES)
    """What the peak was made of, as ``CATEGORIES``; they add up to it."""
    news: News = News()

    @classmethod
    def of_row(cls, row: Sequence[float]) -> Self:
        """From what :meth:`row` gave."""
        held, peak, reserved, *rest = map(int, row)
        parts, news = rest[: len(CATEGORIES)], rest[len(CATEGORIES) :]
        return cls(held, peak, reserved, tuple(parts), News(*news))

    def row(self) -> tuple[int, ...]:
        """As many numbers for every one."""
        return (*self[:3], *self.parts, *self.news)

    def by_category(self) -> dict[str, int]:
        """The parts by name."""
        return dict(zip(CATEGORIES, self.parts, strict=True))


def use_of(between: Lap, passes: Lap, known: Mapping[str, int], kept: int = 0) -> MemoryUse:
    """What a step used.

    Args:
        between: Read when its passes began.
        passes: Read when they were over.
        known: Bytes that are held for some categories, and of buckets at most while they run.
        kept: Bytes that were freed and are still counted as held: activations, most likely.
    """
    peak, named = max(between.peak, passes.peak), dict[str, int]()
    # What is kept of what was freed hides which of the two was higher.
    in_passes = passes.peak + kept >= between.peak
    came = max(0, passes.peak - passes.held) + kept if in_passes else 0
    guesses = {**known, ACTIVATIONS: max(0, came - known.get(BUCKETS, 0))}
    rest = peak
    for category in (*(name for name in guesses if name != ACTIVATIONS), ACTIVATIONS):
        named[category] = min(rest, guesses[category])
        rest -= named[category]
    named[OTHER] = rest
    return counted(passes, peak, named)


def counted(lap: Lap, peak: int, parts: Mapping[str, int]) -> MemoryUse:
    """The same where somebody has counted single tensors."""
    return MemoryUse(lap.held, peak, lap.reserved, tuple(parts.get(name, 0) for name in CATEGORIES))


NOTHING = MemoryUse(0, 0)
