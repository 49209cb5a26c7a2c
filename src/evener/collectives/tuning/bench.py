"""Benchmark that compares all-reduces, with the columns of nccl-tests.

``algbw`` is bytes over time. ``busbw`` is ``algbw * 2 (n - 1) / n``, the traffic of the busiest link in an optimal
all-reduce on n ranks. It can be compared with the hardware's bandwidth for any number of ranks. Inputs are small
integers, whose sum every dtype holds exactly; ``wrong`` counts the elements that differ from the exact sum.

All implementations run each size in turn, round after round, so that disturbances of the machine affect all of them.
The time is the median over the rounds, of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import AllReduce
from evener.collectives.tuning.measure import device_of, time_in_turn
from evener.collectives.tuning.select import MeasuredCosts, predict
from evener.distributed.hosts import all_gather
from evener.distributed.shm.slots import DTYPE_CODES

_BUDGET_SECONDS = 0.5
_MOST_LEVELS = 8
DTYPES: Mapping[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}
"""The dtypes that the command line accepts, by torch's names."""


def sent_between(group: dist.ProcessGroup) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that the group's backend can send: NCCL does not support 16-bit integers."""
    on_cpus = device_of(group).type == "cpu"
    return tuple(dtype for dtype in DTYPES.values() if on_cpus or dtype is not torch.int16)


@dataclass(frozen=True)
class Row:
    """The result of one all-reduce at one size."""

    algorithm: str
    size: int
    """Bytes of the buffer on each rank."""
    count: int
    """Number of elements."""
    type: str
    redop: str
    time: float
    """Seconds."""
    algbw: float
    """GB/s: 1e9 bytes of the buffer per second."""
    busbw: float
    """GB/s: ``algbw * 2 (n - 1) / n``."""
    wrong: int | None
    """Number of elements, over all ranks, that differ from the exact sum; None if not checked."""
    predicted: float | None
    """Seconds that the cost model predicts; None if there are no costs."""


def bench(
    all_reduces: Mapping[str, AllReduce],
    sizes: Iterable[int],
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    check: bool = True,
    costs: MeasuredCosts | None = None,
) -> list[Row]:
    """Measures every all-reduce at every size. All ranks must call this together, and get the same rows.

    Args:
        all_reduces: The all-reduces, by the names to print.
        sizes: Sizes in bytes; rounded down to whole elements, but to at least one.
        group: The ranks.
        dtype: The type of the elements.
        check: True to count wrong elements.
        costs: Measured costs for the predictions; None for none.
    """
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    counts = [max(1, size // dtype.itemsize) for size in sizes]
    return [row for count in counts for row in _rows(all_reduces, count, whole, dtype, check, costs)]


def _rows(
    all_reduces: Mapping[str, AllReduce],
    count: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    check: bool,
    costs: MeasuredCosts | None,
) -> list[Row]:
    names, world_size = list(all_reduces), dist.get_world_size(group)
    nbytes = count * dtype.itemsize
    wrong = [_wrong(each, count, dtype, group) if check else None for each in all_reduces.values()]
    buffer = torch.zeros(count, dtype=dtype, device=device_of(group))
    times = time_in_turn(list(all_reduces.values()), buffer, group, _BUDGET_SECONDS)
    return [
        Row(
            algorithm=name,
            size=nbytes,
            count=count,
            type=str(dtype).removeprefix("torch."),
            redop="sum",
            time=seconds,
            algbw=nbytes / seconds / 1e9,
            busbw=nbytes / seconds / 1e9 * bus_factor(world_size),
            wrong=errors,
            predicted=_predicted(all_reduces[name], costs, name, nbytes),
        )
        for name, seconds, errors in zip(names, times, wrong, strict=True)
    ]


def bus_factor(world_size: int) -> float:
    """Returns ``busbw / algbw`` of an all-reduce (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (world_size - 1) / world_size


def _predicted(all_reduce: AllReduce, costs: MeasuredCosts | None, name: str, nbytes: int) -> float | None:
    expected = all_reduce.expected_seconds(nbytes)
    if expected is not None:
        return expected
    try:
        return predict(costs, name, nbytes).seconds if costs else None
    except ValueError:  # the costs have no entry for it
        return None


def _wrong(all_reduce: AllReduce, count: int, dtype: torch.dtype, group: dist.ProcessGroup) -> int:
    device = device_of(group)
    terms = (_integers(count, dtype, rank) for rank in range(dist.get_world_size(group)))
    expected = next(terms)
    for term in terms:
        expected += term
    own = _integers(count, dtype, dist.get_rank(group)).to(device)
    tensor, wrong = torch.empty_like(own), 0
    for _ in range(_TURNS):
        all_reduce(tensor.copy_(own), lasting=True).wait()
        wrong = max(wrong, int((tensor.cpu() != expected).sum()))
    return sum(all_gather(wrong, group))


def _integers(count: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Returns integers 0 to 7 that vary with place and rank. Sums fit int8 up to 18 ranks, and are exact in bfloat16 up
    to 36 ranks."""
    return ((torch.arange(count) * (2 * rank + 1) + rank) % _MOST_LEVELS).to(dtype)


_HEADER = ("size", "count", "type", "redop", "algorithm", "time", "algbw", "busbw", "#wrong", "predicted")
_TURNS = 3
"""Calls until ``lasting`` memory has been moved to its final place."""
_UNITS = ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)")


def table(rows: Sequence[Row]) -> str:
    """Formats the rows as text, in the columns of nccl-tests."""
    lines = [_HEADER, _UNITS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    bandwidths = (f"{row.algbw:.2f}", f"{row.busbw:.2f}")
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    predicted = "N/A" if row.predicted is None else f"{row.predicted * 1e6:.1f}"
    what = (str(row.size), str(row.count), row.type, row.redop, row.algorithm)
    return (*what, f"{row.time * 1e6:.1f}", *bandwidths, wrong, predicted)
