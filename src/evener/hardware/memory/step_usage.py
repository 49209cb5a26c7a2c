"""Computes a step's memory by category, from the gauge's readings and the known sizes of permanent tensors.

A usual run does not count single tensors. The sizes of tensors that the rank holds permanently are known. Activations
are allocated in forward and freed again in backward: their size is the peak less the bytes held at the end::

    bytes      ╭─╮             peak ┐
         ╭─────╯ ╰──╮               ├ activations
    ─────╯          ╰─────     held ┤
       passes of step n             ├ parameters, buffers, gradients, optimizer, buckets, inputs: by their sizes
                                    └ other: the rest

The peak may also lie between the passes of two steps, in the optimizer update or in an evaluation. Then activations
count as 0, and temporary memory counts as ``other``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from evener.hardware.memory.counters import ACTIVATIONS, BUCKETS, CATEGORIES, OTHER


class Lap(NamedTuple):
    """A reading of a gauge, in bytes."""

    held: int
    """Bytes in use now."""
    peak: int
    """Maximum bytes in use since the last reading."""
    reserved: int = 0
    """Bytes that a GPU's allocator has reserved: in use, cached, or lost to fragmentation. 0 for a CPU."""
    split: int = 0
    """Reserved bytes that lie unused between tensors in use. The allocator cannot release them."""
    retries: int = 0
    """Total number of times that the allocator released its cache and asked the device again."""
    failures: int = 0
    """Total number of times that the allocator was out of memory."""


class News(NamedTuple):
    """Events of a rank's device memory since the previous step, in bytes unless stated otherwise."""

    lost: int = 0
    """Bytes lost to fragmentation."""
    retries: int = 0
    """Number of times that the allocator released its cache and asked the device again, which synchronizes with it."""
    won: int = 0
    """Bytes released to the device by emptying the cache."""
    others: int = 0
    """Bytes that other processes use."""
    pid: int = 0
    """Process id of the other process that uses most."""
    free: int = 0
    """Free bytes on the device at that time."""


class MemoryUse(NamedTuple):
    """Memory use of a rank in a step, in bytes. The step begins when the passes of the previous step end."""

    held: int
    """Bytes in use after the step's passes."""
    peak: int
    """Maximum bytes in use."""
    reserved: int = 0
    """Bytes that a GPU's allocator has reserved; 0 for a CPU."""
    parts: tuple[int, ...] = (0,) * len(CATEGORIES)
    """Parts of the peak in the order of ``CATEGORIES``. Their sum is the peak."""
    news: News = News()

    @classmethod
    def of_row(cls, row: Sequence[float]) -> Self:
        """Creates the object from the numbers that :meth:`row` returned."""
        held, peak, reserved, *rest = map(int, row)
        parts, news = rest[: len(CATEGORIES)], rest[len(CATEGORIES) :]
        return cls(held, peak, reserved, tuple(parts), News(*news))

    def row(self) -> tuple[int, ...]:
        """Returns all fields as a flat tuple of fixed length."""
        return (*self[:3], *self.parts, *self.news)

    def by_category(self) -> dict[str, int]:
        """Returns the parts of the peak by category."""
        return dict(zip(CATEGORIES, self.parts, strict=True))


def use_of(between: Lap, passes: Lap, known: Mapping[str, int], kept: int = 0) -> MemoryUse:
    """Computes the memory use of a step.

    Args:
        between: Reading at the start of the step's passes.
        passes: Reading at their end.
        known: Known sizes of some categories in bytes; for buckets, their maximum during the passes.
        kept: Bytes that were freed but still count as held: most likely activations.
    """
    peak, named = max(between.peak, passes.peak), dict[str, int]()
    # Freed memory that is kept may hide which of the two peaks was higher.
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
    """Creates the memory use from a peak whose parts were counted tensor by tensor."""
    return MemoryUse(lap.held, peak, lap.reserved, tuple(parts.get(name, 0) for name in CATEGORIES))


NOTHING = MemoryUse(0, 0)
