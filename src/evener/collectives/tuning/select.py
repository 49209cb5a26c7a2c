"""Selects an all-reduce for a size from costs that were measured once; pure functions.

Latency decides for small messages and bandwidth for large ones; the border depends on the ranks, the links and the
implementation. If an implementation was timed, its times predict it; other algorithms are simulated over the
measured links. All ranks must choose alike, so give all of them the same :class:`MeasuredCosts`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from evener.collectives.schedules.algorithms import ALGORITHMS, usable_on
from evener.collectives.schedules.schedule import Topology
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.simulate import Network, simulate

_SEGMENTS = tuple(1 << exponent for exponent in range(9))
_SMALLEST_BUCKET_NBYTES = 1 << 18


@dataclass(frozen=True)
class TimingSample:
    """The measured time of an all-reduce of ``nbytes`` by the implementation ``name``.

    Raises:
        ValueError: If a number is not positive and finite.
    """

    name: str
    nbytes: int
    seconds: float
    segments: int = 1
    """The number of segments in which it ran."""

    def __post_init__(self) -> None:
        if self.nbytes <= 0 or not 0 < self.seconds < math.inf or self.segments < 1:
            raise ValueError(f"a sample needs a positive size and time, and at least one segment, got {self}")


@dataclass(frozen=True)
class MeasuredCosts:
    """All measurements of a group of ranks."""

    topology: Topology
    network: Network
    """The links, as measured by messages between two ranks."""
    samples: tuple[TimingSample, ...] = ()
    """Times of whole all-reduces, for any implementations and sizes."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MeasuredCosts:
        """Parses the text that :meth:`to_json` wrote.

        Raises:
            ValueError: If ``text`` is not such a text.
        """
        try:
            fields = json.loads(text)
            network = {**fields["network"]}
            network["inside"], network["between"] = _links(network["inside"]), _links(network["between"])
            return cls(
                Topology(tuple(map(tuple, fields["topology"]["hosts"]))),
                Network(**network),
                tuple(TimingSample(**sample) for sample in fields["samples"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these are no costs of collectives ({error!r}): {text[:200]!r}") from error


def _links(value: Any) -> Link | tuple[Link, ...]:
    return tuple(Link(**link) for link in value) if isinstance(value, list) else Link(**value)


@dataclass(frozen=True)
class AllReduceChoice:
    """An implementation, its predicted time, and the number of segments in which to run it."""

    name: str
    seconds: float
    segments: int = 1


def choose(costs: MeasuredCosts, nbytes: int, names: Iterable[str] | None = None) -> AllReduceChoice:
    """Returns the implementation with the shortest predicted time for ``nbytes``; the first one if several are equal.

    Args:
        costs: The measurements.
        nbytes: The size of the buffer, in bytes.
        names: The implementations to choose among; by default all that were timed, or if none was, all algorithms that
            can run.

    Raises:
        ValueError: If ``names`` is empty, or a name is neither an algorithm nor timed.
    """
    timed = dict.fromkeys(sample.name for sample in costs.samples)
    candidates = tuple(names if names is not None else timed or usable_on(costs.topology))
    if not candidates:
        raise ValueError("there is no all-reduce to choose among: names is empty")
    return min((predict(costs, name, nbytes) for name in candidates), key=lambda choice: choice.seconds)


def predict(costs: MeasuredCosts, name: str, nbytes: int) -> AllReduceChoice:
    """Predicts the time of the implementation ``name`` for ``nbytes``: from its samples if it has any, else simulated.

    The number of segments is the fastest one measured at the nearest size, or the simulated one without samples.

    Raises:
        ValueError: If the name is neither an algorithm nor timed.
    """
    samples = [sample for sample in costs.samples if sample.name == name]
    if name not in ALGORITHMS and not samples:
        known = sorted({*ALGORITHMS, *(sample.name for sample in costs.samples)})
        raise ValueError(f"nothing is known of an all-reduce named {name!r}; known are {', '.join(known)}")
    if nbytes <= 0 or costs.topology.world_size == 1:
        return AllReduceChoice(name, 0.0)
    if not samples:
        return _simulated(costs.topology, costs.network, name, nbytes)
    nearest = min(samples, key=lambda each: (abs(math.log(each.nbytes / nbytes)), each.seconds))
    seconds = interpolate([(each.nbytes, each.seconds) for each in samples], nbytes)
    return AllReduceChoice(name, seconds, nearest.segments)


def best_segments(topology: Topology, network: Network, name: str, nbytes: int) -> int:
    """Returns the number of segments for which ``name`` is simulated to be fastest; 1 if it is not an algorithm."""
    if name not in ALGORITHMS or topology.world_size == 1:
        return 1
    return _simulated(topology, network, name, nbytes).segments


@lru_cache(maxsize=4096)
def _simulated(topology: Topology, network: Network, name: str, nbytes: int) -> AllReduceChoice:
    """Simulates the algorithm with its best number of segments, which is doubled as long as that helps."""
    best = AllReduceChoice(name, math.inf)
    for segments in _SEGMENTS:
        seconds = simulate(ALGORITHMS[name](topology, segments), nbytes, network)
        if seconds >= best.seconds:
            break
        best = AllReduceChoice(name, seconds, segments)
    return best


def interpolate(samples: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Returns the seconds for ``nbytes``, interpolated linearly between ``(nbytes, seconds)`` on log-log scales.

    Below the smallest sample only latency counts, so the time is constant. Beyond the largest only bandwidth counts,
    so the time is proportional to the size. Among samples of the same size the fastest counts.
    """
    fastest: dict[int, float] = {}
    for size, seconds in samples:
        fastest[size] = min(seconds, fastest.get(size, math.inf))
    points = sorted(fastest.items())
    if nbytes <= points[0][0]:
        return points[0][1]
    for (low, low_seconds), (high, high_seconds) in pairwise(points):
        if nbytes <= high:
            fraction = math.log(nbytes / low) / math.log(high / low)
            return low_seconds * math.pow(high_seconds / low_seconds, fraction)
    return points[-1][1] * nbytes / points[-1][0]


def exposed_seconds(
    bucket_nbytes: int, total_nbytes: int, backward_seconds: float, seconds_of: Callable[[int], float]
) -> float:
    """Returns the seconds from the end of backward until the last bucket is reduced.

    Assumes that backward produces gradients at a constant rate, and that buckets are reduced one after the other.

    Args:
        bucket_nbytes: Size of all buckets but the last.
        total_nbytes: Size of all gradients.
        backward_seconds: Time of backward without communication.
        seconds_of: Returns the time of an all-reduce of a size in bytes.
    """
    finished = 0.0
    for start in range(0, total_nbytes, bucket_nbytes):
        stop = min(start + bucket_nbytes, total_nbytes)
        ready = backward_seconds * stop / total_nbytes
        finished = max(finished, ready) + seconds_of(stop - start)
    return max(0.0, finished - backward_seconds)


def bucket_size(
    total_nbytes: int,
    backward_seconds: float,
    seconds_of: Callable[[int], float],
    candidates: Sequence[int] | None = None,
) -> int:
    """Returns the bucket size, in bytes, for which backward hides most of the all-reduce; the largest of equal ones.

    Small buckets start early but pay many latencies. Large ones leave much to send after the end of backward.

    Args:
        total_nbytes: Size of all gradients.
        backward_seconds: Time of backward without communication.
        seconds_of: Returns the time of an all-reduce of a size in bytes.
        candidates: The sizes to choose among; by default powers of two from 256 KiB, and a single bucket for all.

    Raises:
        ValueError: If there are no gradients.
    """
    if total_nbytes <= 0:
        raise ValueError(f"buckets need gradients to hold, got total_nbytes={total_nbytes}")
    sizes = _powers_up_to(total_nbytes) if candidates is None else candidates
    return min(
        sorted(sizes, reverse=True),
        key=lambda size: exposed_seconds(size, total_nbytes, backward_seconds, seconds_of),
    )


def _powers_up_to(total_nbytes: int) -> list[int]:
    sizes = [total_nbytes]
    while (size := _SMALLEST_BUCKET_NBYTES << (len(sizes) - 1)) < total_nbytes:
        sizes.append(size)
    return sizes
