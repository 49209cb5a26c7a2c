"""The parts of a step, one after the other, on the clock of its device.

A mark says which part begins. Marks of a CPU are times of the host; those of a GPU are events in its current stream,
since the host only queues the work and runs ahead. Nothing waits for the device: the times are read later::

    marks    input ─ forward ─ exchange ─ forward ─ backward ─ exchange ─ forward ─ update ─ |
                                (buffers)                      (DDP)     (clipping)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from evener.hardware.accelerators import WITH_STREAMS
from evener.hardware.timers import recorded_event

FORWARD, BACKWARD, EXCHANGE, INPUT, UPDATE, SAVING = range(6)
"""Parts, in the order of the fields of `StepTimes`. ``FORWARD`` is all that the rank does outside of the others: also
preparing a batch, the loss, and clipping."""
PARTS = 6


class PartClock(NamedTuple):
    """Functions that make and compare marks."""

    mark: Callable[[], Any]
    """Returns a mark of now."""
    seconds: Callable[[Any, Any], float]
    """Returns the time between two marks that the device has passed."""
    has_passed: Callable[[Any], bool]
    """Returns True if the device has passed the mark."""
    is_cheap: bool
    """True if a mark costs less than a microsecond."""


_OF_HOST = PartClock(time.perf_counter, lambda begin, end: end - begin, lambda mark: True, True)
_OF_EVENTS = PartClock(
    recorded_event, lambda begin, end: begin.elapsed_time(end) / 1e3, lambda mark: bool(mark.query()), False
)


def clock_of(device: torch.device) -> PartClock:
    """Returns the clock of a device."""
    return _OF_EVENTS if device.type in WITH_STREAMS else _OF_HOST


def part_seconds(clock: PartClock, marks: Sequence[Any]) -> list[float]:
    """Returns the time of each part.

    Args:
        clock: The clock of the marks.
        marks: Each part with the mark of its begin, one after the other. The last one ends the step.
    """
    sums, stamps, seconds = [0.0] * PARTS, marks[1::2], clock.seconds
    for part, begin, end in zip(marks[::2], stamps, stamps[1:], strict=False):
        sums[part] += seconds(begin, end)
    return sums
