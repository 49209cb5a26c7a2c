"""Measures the links of a group and the time of each all-reduce, and caches the results on disk.

Measurements are kept in ``evener/collectives`` in the user's cache directory. The file name is a hash of all that they
depend on: host names and their ranks, cores, versions, and the names of the timed all-reduces. If a file cannot be
read, measurements are repeated. All ranks use rank 0's measurements, so that they choose alike.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from platformdirs import user_cache_path
from torch import Tensor

from evener.collectives.base import AllReduce, Work
from evener.collectives.executor.messages import Messages
from evener.collectives.schedules.schedule import Topology
from evener.collectives.tuning.cost import Link
from evener.collectives.tuning.select import MeasuredCosts, TimingSample, best_segments
from evener.collectives.tuning.simulate import Network
from evener.distributed.environment import usable_cores
from evener.distributed.hosts import all_gather, host_identity, hosts_of
from evener.files import read_text, write_json
from evener.hardware import accelerators

Sum = Callable[[Tensor], Work]
"""An all-reduce, or one with a fixed number of segments."""
SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))
"""1 KiB to 64 MiB."""
_SMALL_NBYTES, _PROBE_NBYTES, _LARGE_NBYTES = 1024, 1 << 19, 4 << 20
_BUDGET_SECONDS = 0.15
_LEAST, _MOST = 3, 30
_ENOUGH_SECONDS = 1.0
"""If one call of each all-reduce takes longer than this in total, larger sizes are left out."""
_CALLS, _SHORT_SECONDS = 10, 0.05
_CLOSE, _PLAYOFF = 1.5, 3.0
"""All-reduces slower than the best by less than the factor _CLOSE are timed again, with _PLAYOFF times the budget."""


def measured_costs(all_reduces: Mapping[str, AllReduce], group: dist.ProcessGroup) -> MeasuredCosts:
    """Returns the costs of the group's topology and of these all-reduces, from the cache or measured now. All ranks
    must call this together."""
    topology = Topology(hosts_of(group))
    path = cache_path(topology, list(all_reduces), group)
    costs = rank_zeros(load(path) if dist.get_rank(group) == 0 else None, group)
    if costs is None:
        costs = rank_zeros(measure(all_reduces, topology, group), group)
        assert costs is not None
        if dist.get_rank(group) == 0:
            save(path, costs)
    return costs


def rank_zeros(costs: MeasuredCosts | None, group: dist.ProcessGroup) -> MeasuredCosts | None:
    """Returns rank 0's ``costs`` on all ranks. All ranks must call this together."""
    text = all_gather(costs.to_json() if costs else None, group)[0]
    return MeasuredCosts.from_json(text) if text else None


def measure(
    all_reduces: Mapping[str, AllReduce], topology: Topology, group: dist.ProcessGroup
) -> MeasuredCosts:
    """Times every all-reduce at the sizes ``SIZES``; takes some seconds. All ranks must call this together.

    All-reduces run in turn, so that disturbances affect all of them, and as in a run, with ``lasting`` buffers. A
    pipelined algorithm runs in one segment, and in the number of segments that is simulated to be best over the
    measured links.

    The best round counts, as other programs running at the same time can only make it slower; if several all-reduces
    are close, the median of further rounds decides.

    On slow links it stops early, at a size at which only bandwidth counts: times of larger sizes follow from that.
    """
    device = device_of(group)
    network: Network = all_gather(measure_network(topology, group), group)[0]
    samples = []
    for nbytes in SIZES:
        buffer = torch.zeros(nbytes // 4, device=device)
        ways = _ways(all_reduces, topology, network, nbytes)
        with warnings.catch_warnings(action="ignore"):  # of the buffer's size, which a run may not need
            seconds = _times([way for _, _, way in ways], buffer, group)
        samples += [TimingSample(n, nbytes, s, k) for (n, k, _), s in zip(ways, seconds, strict=True)]
        if sum(seconds) > _ENOUGH_SECONDS:
            break
    return MeasuredCosts(topology, network, tuple(samples))


def _times(ways: Sequence[Sum], buffer: Tensor, group: dist.ProcessGroup) -> list[float]:
    """Returns the best round of each all-reduce; for those close to the best, the median of further rounds.

    The best round alone can be luck, if there are more ranks than cores or links let bursts through.
    """
    first = time_in_turn(ways, buffer, group, of_rounds=min)
    close = [place for place, seconds in enumerate(first) if seconds < _CLOSE * min(first)]
    if len(close) == 1 or sum(first) > _ENOUGH_SECONDS:
        return first
    again = time_in_turn([ways[place] for place in close], buffer, group, _PLAYOFF * _BUDGET_SECONDS)
    return playoff(first, dict(zip(close, again, strict=True)))


def playoff(first: Sequence[float], again: Mapping[int, float]) -> list[float]:
    """Merges the times of two runs. Returns the times of the second run; those of all-reduces that did not take part in
    it are scaled up by the factor by which the second run was slower."""
    slower = max(1.0, min(again.values()) / min(first))
    return [again.get(place, seconds * slower) for place, seconds in enumerate(first)]


def _ways(
    all_reduces: Mapping[str, AllReduce], topology: Topology, network: Network, nbytes: int
) -> list[tuple[str, int, Sum]]:
    """Returns (name, segments, all-reduce) for each all-reduce with one segment and with the simulated best number."""
    return [
        (name, segments, partial(each.start_in, segments=segments) if segments > 1 else each)
        for name, each in all_reduces.items()
        for segments in sorted({1, best_segments(topology, network, name, nbytes)})
    ]


def time_in_turn(
    all_reduces: Sequence[Sum],
    buffer: Tensor,
    group: dist.ProcessGroup,
    budget_seconds: float = _BUDGET_SECONDS,
    of_rounds: Callable[[Sequence[float]], float] = statistics.median,
) -> list[float]:
    """Returns the seconds of each all-reduce of ``buffer`` on the slowest rank; the same on every rank. All ranks must
    call this together.

    The number of rounds fits ``budget_seconds`` for each all-reduce, within limits. ``of_rounds`` reduces the times of
    the rounds to one.
    """
    for each in all_reduces:
        _call(each, buffer)  # the next call may move a lasting buffer, and later ones are those of a run
    rough = sum(_all_gather_max([_seconds(each, buffer, 1) for each in all_reduces], group))
    calls = _CALLS if rough < _SHORT_SECONDS else 1
    rounds = int(min(max(budget_seconds * len(all_reduces) / (rough * (calls + 1)), _LEAST), _MOST))
    times = [[_seconds(each, buffer, calls) for each in all_reduces] for _ in range(rounds)]
    return _all_gather_max([of_rounds(each) for each in zip(*times, strict=True)], group)


def _all_gather_max(values: list[float], group: dist.ProcessGroup) -> list[float]:
    return [max(of_ranks) for of_ranks in zip(*all_gather(values, group), strict=True)]


def _seconds(all_reduce: Sum, buffer: Tensor, calls: int) -> float:
    """Returns the seconds of one call, averaged over ``calls``. A call before them waits for ranks that are late."""
    _call(all_reduce, buffer)
    start = time.perf_counter()
    for _ in range(calls):
        _call(all_reduce, buffer)
    return (time.perf_counter() - start) / calls


def _call(all_reduce: Sum, buffer: Tensor) -> None:
    """Sums the buffer and waits for it. An ``AllReduce`` is called as by DDP, with a ``lasting`` buffer."""
    work = all_reduce(buffer, lasting=True) if isinstance(all_reduce, AllReduce) else all_reduce(buffer)
    work.wait()
    accelerators.synchronize(buffer.device)


def measure_network(topology: Topology, group: dist.ProcessGroup) -> Network:
    """Measures latency and bandwidth of messages inside a host and between hosts, and the cost of adding a byte. All
    ranks must call this together."""
    rank, device = dist.get_rank(group), device_of(group)
    large_host = max(topology.hosts, key=len)
    with closing(Messages(group, 60.0)) as messages:
        mine = (
            _link(messages, large_host[0], large_host[-1], rank, device),
            _link(messages, topology.hosts[0][0], topology.hosts[-1][0], rank, device),
            _gamma(device),
        )
        seen = all_gather(mine, group)
    inside = next((link for link, _, _ in seen if link), None)
    between = next((link for _, link, _ in seen if link), None)
    known = inside or between or Link(0.0, 0.0)
    return Network(inside or known, between or known, statistics.median(gamma for _, _, gamma in seen))


def measure_links(pairs: Sequence[tuple[int, int]], group: dist.ProcessGroup) -> list[Link]:
    """Measures latency and bandwidth of messages between the ranks of each pair, one pair after the other. All ranks
    must call this together."""
    rank, device = dist.get_rank(group), device_of(group)
    with closing(Messages(group, 60.0)) as messages:
        mine = [_link(messages, a, b, rank, device) for a, b in pairs]
        seen = all_gather(mine, group)
    return [
        link for (a, _), of_pair in zip(pairs, zip(*seen, strict=True), strict=True) if (link := of_pair[a])
    ]


def _link(messages: Messages, a: int, b: int, rank: int, device: torch.device) -> Link | None:
    """Measures the link between ranks ``a`` and ``b``. Returns it on ``a``; returns None on other ranks, or if
    ``a == b``."""
    if a == b or rank not in (a, b):
        return None
    small = _one_way_seconds(
        messages, a, b, rank, torch.zeros(_SMALL_NBYTES, dtype=torch.uint8, device=device)
    )
    large = _one_way_seconds(
        messages, a, b, rank, torch.zeros(_LARGE_NBYTES, dtype=torch.uint8, device=device)
    )
    beta = max(large - small, 0.0) / (_LARGE_NBYTES - _SMALL_NBYTES)
    return Link(max(small - beta * _SMALL_NBYTES, 0.0), beta) if rank == a else None


def round_trip_seconds(group: dist.ProcessGroup) -> list[float]:
    """Returns for each rank the seconds of a message of 512 KiB to the next rank and back. Rank 0 is next to the
    last rank. All ranks must call this together.

    Ranks that are no neighbors measure at the same time::

        round 0    0 - 1    2 - 3           round 1    1 - 2    3 - 4           round 2    4 - 0, if their number is odd
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    buffer = torch.zeros(_PROBE_NBYTES, dtype=torch.uint8, device=device_of(group))
    rounds = [range(0, size - 1, 2), range(1, size, 2), [size - 1] if size % 2 else []]
    mine = 0.0
    with closing(Messages(group, 60.0)) as messages:
        for a, b in [(a, (a + 1) % size) for together in rounds for a in together]:
            if rank in (a, b):
                found = 2 * _one_way_seconds(messages, a, b, rank, buffer, 3)
                mine = found if rank == a else mine
        return all_gather(mine, group)


def _one_way_seconds(
    messages: Messages, a: int, b: int, rank: int, buffer: Tensor, repeats: int = 8
) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        if rank == a:
            _finish(messages.post([(b, buffer)], [], 0), buffer)
            _finish(messages.post([], [(b, buffer)], 0), buffer)
        else:
            _finish(messages.post([], [(a, buffer)], 0), buffer)
            _finish(messages.post([(a, buffer)], [], 0), buffer)
        times.append((time.perf_counter() - start) / 2)
    return statistics.median(times[1:])


def _finish(works: tuple[list[dist.Work], list[dist.Work]], buffer: Tensor) -> None:
    """Waits for the works and for the device: NCCL's wait blocks the stream only, but the host's clock measures."""
    for work in (*works[0], *works[1]):
        work.wait()
    accelerators.synchronize(buffer.device)


def _gamma(device: torch.device) -> float:
    """Measures the seconds to add a byte of float32 to another, for data that is not in the cache."""
    a, b = torch.zeros(2, _LARGE_NBYTES // 4, device=device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a.add_(b)
        accelerators.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / _LARGE_NBYTES


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device whose tensors the group's backend sends: the current GPU for NCCL, else the CPU."""
    on_gpus = torch.cuda.is_available() and "nccl" in dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def cache_path(topology: Topology, names: Sequence[str], group: dist.ProcessGroup) -> Path:
    """Returns the cache file for this topology and these all-reduces. All ranks must call this together."""
    hosts = all_gather((host_identity()[0], usable_cores(), torch.get_num_threads()), group)
    what = [
        "in segments",
        "lasting",
        topology.hosts,
        hosts,
        sorted(names),
        SIZES,
        str(dist.get_backend(group)),
    ]
    key = json.dumps([*what, torch.__version__, platform.python_version(), platform.machine()])
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return user_cache_path("evener") / "collectives" / f"{name}.json"


def load(path: Path) -> MeasuredCosts | None:
    """Reads the costs that :func:`save` wrote. Returns None if the file is missing or unusable."""
    try:
        return MeasuredCosts.from_json(read_text(path))
    except (OSError, ValueError):
        return None


def save(path: Path, costs: MeasuredCosts) -> None:
    """Writes the costs, as a whole or not at all. Ignores write errors, after which the next run measures again."""
    with suppress(OSError):
        write_json(path, asdict(costs))
