"""The costs of samples, such as their numbers of tokens, and the division of a batch by them.

Shares in samples are noise if some samples take a hundred times as long as others. With ``Task.cost`` a rank's share is
a fraction of the *cost* of a batch. The samples of the batch and their order stay the same, and each rank still takes
consecutive ones. Only the cuts between the ranks move, to the boundaries nearest to the wanted fractions::

    costs               9  1  1  1 | 2  2 | 3  1  5        in all 25; wanted: 1/2, 1/6, 1/3
    wanted cuts                     12.5  16.7
    shares              4            2      3              costs 12, 4 and 9

A micro-batch is cut in the same way, with what the micro-batches before it have left over or taken too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.core.task.task import Cost
from evener.core.text import said
from evener.data.division import check_shares, divide
from evener.data.sampler import Ids
from evener.errors import DataError, InterruptedRunError, ShareError, TaskError

_Costs = NDArray[np.float64]
_Counts = NDArray[np.int64]

PROBES = 256
"""At most this number of samples, spread evenly over the data set, give the mean cost and are compared across ranks."""


class Costs:
    """The costs of a data set's samples.

    Args:
        cost: ``Task.cost``.
        dataset: The training set, of which ``cost`` may name a column, an attribute or a method.
        name: What the user calls the costs, for messages.

    Raises:
        TaskError: If there is no such column, the costs are not one number for each sample, or the function fails.
        DataError: If the cost of a sample is not positive and finite, or the function has failed for it.
    """

    def __init__(self, cost: Cost, dataset: Any, name: str = "Task.cost") -> None:
        self.name = name
        size = len(dataset)
        source = _column(dataset, cost, name) if isinstance(cost, str) else cost
        self._function = source if callable(source) else None
        self._values = np.empty(0)
        if not callable(source):
            self._values = _as_array(source, size, name)
            _check(np.arange(size), self._values, name)
        self.probed: Ids = np.unique(np.linspace(0, size - 1, min(size, PROBES)).astype(np.int64))
        """The indices of the samples that are compared across ranks."""
        self.probes = self(self.probed)
        """The costs of these samples."""
        self.mean = math.fsum(self.probes) / len(self.probes)
        """Their mean: the unit in which balancers are told costs, so that a cost is like a number of samples."""

    def __call__(self, ids: Ids) -> _Costs:
        """Returns the costs of samples, in the shape of ``ids``."""
        if self._function is None:
            return self._values[ids]
        found = np.array([self._cost_of(sample) for sample in ids.tolist()], dtype=np.float64)
        _check(ids, found, self.name)
        return found

    def _cost_of(self, sample: int) -> float:
        assert self._function is not None
        try:
            return float(self._function(sample))
        except InterruptedRunError:
            raise
        except Exception as error:  # any kind of error of the user's function
            raise DataError(
                f"{self.name} failed for sample {sample} of the training set: {type(error).__name__}: {said(error)}"
            ) from error


def _column(dataset: Any, name: str, called: str) -> Any:
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list | tuple) and name in names:
        return dataset[name]
    if not hasattr(dataset, name):
        listed = f"its columns are {', '.join(map(str, names))}" if isinstance(names, list | tuple) else ""
        raise TaskError(
            f"{called} is {name!r}, and the training set, a {type(dataset).__name__}, has no column or attribute of "
            f"this name; {listed or 'give a list of costs, or a function from an index to a cost'}"
        )
    return getattr(dataset, name)


def _as_array(values: Any, size: int, name: str) -> _Costs:
    try:
        found = np.asarray(values[:], dtype=np.float64)
    except Exception as error:  # any kind of error: of a table, a tensor on a device
        raise TaskError(f"{name} cannot be read as numbers: {said(error)}") from error
    if found.shape != (size,):
        raise TaskError(
            f"{name} has the shape {found.shape}, and the training set {size} samples: give one cost for each"
        )
    return found


def _check(ids: Ids, costs: _Costs, name: str) -> None:
    good = np.isfinite(costs) & (costs > 0)
    if not good.all():
        at = int(np.argmin(good))
        raise DataError(
            f"{name} of sample {ids[at]} of the training set is {costs[at]:g}; a cost must be positive and finite, "
            "such as a number of tokens. Give an empty sample a small cost, such as 1"
        )


Fractions = Callable[[int, int], Sequence[float]]
"""``fractions(step, size)`` returns the part of the cost of global batch ``step`` that each rank should take."""


@dataclass(frozen=True)
class CostDivision:
    """Divides batches by the costs of their samples, within the limits of shares in samples."""

    costs: Costs
    fractions: Fractions
    max_shares: Sequence[int | None] | None = None
    share_multiple_of: int = 1

    def divided(
        self, ids: Ids, step: int, shares: Sequence[int], micro_batch: int | None, rank: int
    ) -> tuple[tuple[int, ...], list[tuple[Ids, int]], tuple[float, ...]]:
        """Returns the shares in samples, what ``rank`` reads of each micro-batch (ids and weight), and each rank's
        cost.

        Args:
            ids: The samples of the batch.
            shares: What the balancer would give of samples that cost the same.
        """
        each = self.costs(ids)
        counts = divide_by_cost(
            each, self.fractions(step, len(ids)), shares, micro_batch, self.max_shares, self.share_multiple_of
        )
        taken = tuple(counts.sum(axis=0).tolist())
        check_shares(taken, len(ids), len(shares))
        reads, start = [], 0
        for row in counts:
            first, stop = start + int(row[:rank].sum()), start + int(row.sum())
            own = ids[first : first + int(row[rank])]
            cheapest = start + int(np.argmin(each[start:stop]))  # a placeholder takes time too
            reads.append((own, 1) if len(own) else (ids[cheapest : cheapest + 1], 0))
            start = stop
        return taken, reads, tuple(costs_of(each, counts).tolist())


def divide_by_cost(
    costs: _Costs,
    fractions: Sequence[float],
    shares: Sequence[int],
    micro_batch: int | None = None,
    max_shares: Sequence[int | None] | None = None,
    share_multiple_of: int = 1,
) -> _Counts:
    """Returns how many samples each rank takes of each micro-batch, ``(micro-batches, ranks)``. Their positions follow
    each other in this order, as in :func:`~evener.data.division.divide`.

    Each cut is at the boundary nearest to where the fractions want it, unless a limit forbids this. So a rank's cost is
    within one sample of what is wanted, if all ranks want more than one.

    Args:
        costs: The costs of the batch's samples, all positive.
        fractions: The part of the cost that each rank should have; a rank with 0 gets no sample.
        shares: Shares in samples within the limits, for samples of equal cost. A rank that has a share gets at least
            one multiple of ``share_multiple_of``, in the first micro-batch in which it would have one. The rank that
            holds the remainder of the batch keeps it.
        micro_batch: As in :func:`~evener.data.division.divide`; a multiple of ``share_multiple_of``.
        max_shares: The most samples of each rank, None for no limit.
        share_multiple_of: Shares are multiples of it, except the one share that holds the remainder of the batch.

    Raises:
        ShareError: If the fractions are invalid, or the shares do not add up to the batch.
    """
    size, ranks = len(costs), len(shares)
    usual, parts = np.array(shares, dtype=np.int64), np.array(fractions, dtype=np.float64)
    if parts.shape != usual.shape or not (np.isfinite(parts).all() and parts.min() >= 0 and parts.any()):
        raise ShareError(
            f"fractions {list(fractions)} of the cost of a batch for {ranks} ranks: give one for each rank, finite, "
            "none below 0, not all 0"
        )
    given = max_shares or [None] * ranks
    room = np.array([size if cap is None else cap for cap in given], dtype=np.int64)
    room = np.where(parts > 0, np.maximum(room, usual), usual)
    remainder = size % share_multiple_of
    holder = int(np.argmax(usual % share_multiple_of)) if remainder else ranks
    if remainder:
        room[holder] -= remainder
    owed, taken, rows, start = np.zeros(ranks), np.zeros(ranks, dtype=np.int64), [], 0
    for row in divide(size, shares, micro_batch):
        here = np.array([len(each) for each in row], dtype=np.int64)
        part = costs[start : start + int(here.sum())]
        most = room // share_multiple_of
        first = (here >= share_multiple_of) & (taken == 0)
        least = np.minimum(first, most)
        edges = _edges(part)
        owed = owed + edges[-1] * parts
        counts = _cut(edges, np.maximum(owed, 0.0), least, most, share_multiple_of, holder)
        owed, start = owed - costs_of(part, counts[None]), start + len(part)
        room, taken = room - counts, taken + counts
        rows.append(counts)
    return np.stack(rows)


def costs_of(costs: _Costs, counts: _Counts) -> _Costs:
    """Returns the cost of each rank, for the counts of :func:`divide_by_cost`."""
    edges, ends = _edges(costs), np.cumsum(counts.ravel())
    found: _Costs = (edges[ends] - edges[ends - counts.ravel()]).reshape(counts.shape).sum(axis=0)
    return found


def _edges(costs: _Costs) -> _Costs:
    """Returns the cost of the samples before each boundary; one more than samples."""
    return np.concatenate(([0.0], np.cumsum(costs)))


def _cut(edges: _Costs, wanted: _Costs, least: _Counts, most: _Counts, multiple: int, holder: int) -> _Counts:
    """Cuts consecutive samples into one run for each rank. Returns the number of samples of each.

    Args:
        edges: The cost of the samples before each boundary.
        wanted: The cost that each rank should have, in any unit.
        least, most: The least and most multiples for each rank.
        holder: The rank that gets the remainder, if there is one, beside its multiples.
    """
    units, remainder = divmod(len(edges) - 1, multiple)
    targets = np.cumsum(wanted)
    targets = targets * (edges[-1] / targets[-1])
    ends = _nearest(edges[: units * multiple + 1 : multiple], targets)
    if remainder:  # from its holder on, boundaries lie behind it
        behind = np.arange(len(wanted)) >= holder
        ends = np.where(behind, _nearest(edges[remainder::multiple], targets), ends)
    low, high = np.cumsum(least), np.cumsum(most)
    # Each end leaves enough to the ranks behind it, and not more than they can take.
    ends = np.clip(
        ends, np.maximum(low, units - (high[-1] - high)), np.minimum(high, units - (low[-1] - low))
    )
    ends = np.maximum.accumulate(ends - low) + low  # at least `least` behind the end before
    ends = np.minimum.accumulate(ends - high) + high  # at most `most`
    counts: _Counts = np.diff(ends, prepend=0) * multiple
    if remainder:
        counts[holder] += remainder
    return counts


def _nearest(marks: _Costs, targets: _Costs) -> _Counts:
    """Returns the index of the mark nearest to each target, the lower one if two are as near. Marks increase."""
    above = np.clip(np.searchsorted(marks, targets), 1, len(marks) - 1) if len(marks) > 1 else 0
    below = np.maximum(above - 1, 0)
    found: _Counts = np.where(targets - marks[below] <= marks[above] - targets, below, above)
    return found
