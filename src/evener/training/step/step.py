"""Numbers about a step: what each rank sends to all others, and what the step then reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from evener.balance.by_speed_large import SpeedReport
from evener.core.records import StepRecord
from evener.data.batch import Batch
from evener.errors import DivergenceError
from evener.hardware.async_read import Readout, ReadyValue
from evener.hardware.memory import CATEGORIES
from evener.hardware.memory.step_usage import MemoryUse, News

_NONE = ReadyValue(0.0)
"""The penalty of a task that has none."""
_HELD, _PEAK, _RESERVED, _PARTS = range(4)
"""Positions in `MemoryUse.row`."""


class RankStats(NamedTuple):
    """Numbers that one rank sends to all others with a step.

    Those from ``total`` to ``wait_seconds`` are results: of this step on devices that have done their work when a call
    returns, of the previous step on others.
    """

    next_count: float
    """Number of terms in the rank's share of the next batch."""
    missing: float
    """Code of the set of parameters without a gradient on this rank; 0 if there are none."""
    buffers_changed: float
    input_seconds: float
    """Time for which the rank waited for the batch's samples."""
    total: float = 0.0
    """Sum of the loss's terms over the rank's samples; 0 if it is sent from device to device."""
    soundness: float = 0.0
    """Not finite if a gradient of the rank's own samples is not; 0 if it is sent from device to device."""
    unsound: float = 0.0
    """Index, from 1, of that parameter among all. 0 if unknown, or if it is sent from device to device."""
    compute_seconds: float = math.nan
    """Time of the rank's own work."""
    wait_seconds: float = math.nan
    """Time for which it waited for others until the gradients were summed."""
    forward_seconds: float = math.nan
    """Time of its forward passes, a part of its work; 0 if not measured."""
    wish: float = 0.0
    """Request for what all ranks do together; 0 for none."""
    skipped: float = 0.0
    """Number of unreadable samples in the rank's share of this step."""
    retries: float = 0.0
    """How often the rank repeated the step after running out of memory."""
    piece: float = 0.0
    """Most samples of a pass that fit into the rank's memory; 0 if unknown."""
    graphs: float = 0.0
    """Number of graphs that the rank has compiled so far."""
    differing: float = 0.0
    """Number of findings about compiled code that other ranks do not know yet."""
    division: float = 0.0
    """Code of how this batch and the next are divided. It must be the same on all ranks."""
    width: float = 0.0
    """Number of elements of a sample if the loss is a mean over all of them; 0 for any other loss."""
    next_count_rest: float = 0.0
    """What ``next_count`` leaves of the exact number, in a run that is exact in bits; like the next."""
    total_rest: float = 0.0


def row_of(signal: RankStats, memory: MemoryUse) -> tuple[float, ...]:
    """Returns the row of numbers that a rank sends."""
    return (*signal, *memory.row())


class AllRankStats(NamedTuple):
    """The numbers that all ranks sent with a step: each field of :class:`RankStats`, by rank."""

    next_count: tuple[float, ...]
    missing: tuple[float, ...]
    buffers_changed: tuple[float, ...]
    input_seconds: tuple[float, ...]
    total: tuple[float, ...]
    soundness: tuple[float, ...]
    unsound: tuple[float, ...]
    compute_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    forward_seconds: tuple[float, ...]
    wish: tuple[float, ...]
    skipped: tuple[float, ...]
    retries: tuple[float, ...]
    piece: tuple[float, ...]
    graphs: tuple[float, ...]
    differing: tuple[float, ...]
    division: tuple[float, ...]
    width: tuple[float, ...]
    next_count_rest: tuple[float, ...]
    total_rest: tuple[float, ...]


Columns = Sequence[tuple[float, ...]]
"""For each number of `MemoryUse.row`, the values of all ranks."""


def read_columns(rows: Sequence[Sequence[float]]) -> tuple[AllRankStats, Columns]:
    """Splits the rows of all ranks, made by :func:`row_of`, in a number of calls that does not grow with the ranks."""
    columns = list(zip(*rows, strict=True))
    length = len(AllRankStats._fields)
    return AllRankStats(*columns[:length]), columns[length:]


def select_ranks(ranks: Sequence[int], column: Sequence[float]) -> Sequence[float]:
    """Returns the values of these ranks."""
    if len(ranks) < 2:
        return [column[rank] for rank in ranks]
    return column if len(ranks) == len(column) else itemgetter(*ranks)(column)


class Results(NamedTuple):
    """Results of a step over all ranks."""

    total: float
    """Sum of the loss's terms over the global batch."""
    loss: tuple[int, float] | None = None
    """The first rank whose total is not finite, and that total."""
    gradient: tuple[int, float] | None = None
    """The first rank with a gradient that is not finite, and the index of its parameter, from 1; 0 if unknown."""

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[float, float, float]], contributors: Sequence[int]) -> Results:
        """Returns the results from the total, soundness and index of each rank."""
        total = sum(select_ranks(contributors, list(map(itemgetter(0), rows))))
        if all(map(math.isfinite, chain.from_iterable(rows))):
            return cls(total)
        losses = ((rank, row[0]) for rank, row in enumerate(rows) if not math.isfinite(row[0]))
        gradients = ((rank, row[2]) for rank, row in enumerate(rows) if not math.isfinite(row[1]))
        return cls(total, next(losses, None), next(gradients, None))


@dataclass
class RankTimes:
    """Time of this rank, in seconds."""

    compute: float = 0.0
    wait: float = 0.0
    forward: float = 0.0
    input: float = 0.0


class Step:
    """A step that was taken. Reading its loss waits until all ranks have sent their parts."""

    count = 0.0
    """Divisor of the total."""
    terms = 0.0
    """Number of terms of the global batch."""
    changes: tuple[str, ...] = ()
    """Differences of this rank's set of trained parameters from that at the start."""
    skipped = 0
    merge_spread: tuple[float, ...] = ()
    merge_ranks: tuple[tuple[int, ...], ...] = ()
    merge_bytes = 0
    asked_to_stop = 0
    """The number of the signal for which the step was ended early, on all ranks; 0 for none."""
    merges: tuple[tuple[tuple[int, int, int, int], ...], ...] = ()
    wasted = 0
    seconds = 0.0
    lr = 0.0
    penalty: Readout = _NONE
    penalty_soundness: Readout = _NONE
    """Not finite if the gradient of the penalty is not."""
    results: Callable[[], Results] | None = None
    """Returns the results of the step. None until they are on their way."""
    left_out = False
    """True if all ranks have skipped its update, because a number was not finite."""
    only_work = True
    """True if this rank only worked in that time: it has not compiled, and not repeated the step."""
    speeds: SpeedReport | None = None
    """Sum of all ranks' speed reports, if each rank knows only its own times."""
    lines: Sequence[Sequence[float]] = ()
    """Lines of all ranks' speed models, if they were asked for."""
    compute_seconds: tuple[float, ...] = ()
    """Compute seconds of each rank, like the next three; empty if each rank knows only its own."""
    wait_seconds: tuple[float, ...] = ()
    forward_seconds: tuple[float, ...] = ()
    input_seconds: tuple[float, ...] = ()
    memory_columns: Columns = ()
    """Memory use of each rank's device, since the previous step."""
    retries: tuple[int, ...] = ()
    """For each rank, how often it repeated the step after running out of memory."""
    pieces: tuple[int, ...] = ()
    """For each rank, the most samples of a pass that fit its memory, 0 if unknown; empty if unknown for all."""
    graphs: tuple[int, ...] = ()
    """For each rank, the number of graphs compiled so far; empty if nothing is compiled."""

    def __init__(
        self, batch: Batch, number: int, settle: Callable[[], object], names: Sequence[str] = ()
    ) -> None:
        self._settle, self._names = settle, names
        self.batch = batch
        self.number = number
        self.own_seconds = RankTimes()

    @property
    def total(self) -> float:
        """Sum of the loss's terms over the global batch."""
        if self.results is None:
            self._settle()
        assert self.results is not None
        return self.results().total

    @property
    def loss(self) -> float:
        """Mean over the terms of the global batch, plus the penalty; NaN if the batch has no term."""
        return (self.total / self.count if self.count else math.nan) + self.penalty.value()

    def fault(self) -> str | None:
        """Describes which of total, gradients and penalty is not finite, and where. Returns None if all are finite.

        The result is the same on all ranks.
        """
        found = self.results() if self.results else Results(0.0)
        if found.loss is not None:
            rank, total = found.loss
            return f"the loss is {total} in step {self.number} on rank {rank}"
        if found.gradient is not None:  # gradients of other ranks may follow from a loss
            rank, place = found.gradient
            return f"a gradient is not finite in step {self.number} on rank {rank}{self._whose(place)}"
        return self.fault_of_penalty()

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Memory use of each rank's device, since the previous step."""
        return tuple(MemoryUse.of_row(row) for row in zip(*self.memory_columns, strict=True))

    @property
    def has_news(self) -> bool:
        """True if a rank has noticed something about its device's memory."""
        return any(map(any, self.memory_columns[-len(News._fields) :]))

    def _memory(self, place: int) -> tuple[int, ...]:
        """Returns a column in bytes."""
        return tuple(map(int, self.memory_columns[place])) if self.memory_columns else ()

    def _known_memory(self, place: int) -> tuple[int, ...]:
        """Returns a column in bytes, or nothing if no rank has read it."""
        found = self._memory(place)
        return found if any(found) else ()

    def _memory_parts(self) -> dict[str, tuple[int, ...]]:
        columns = zip(CATEGORIES, self.memory_columns[_PARTS:], strict=False)  # news are in later columns
        return {name: tuple(map(int, column)) for name, column in columns if any(column)}

    def has_finite_loss(self) -> bool:
        """Returns True if the totals of all ranks are finite, and the penalty with its gradient."""
        found = self.results() if self.results else Results(0.0)
        return found.loss is None and self.fault_of_penalty() is None

    def fault_of_penalty(self) -> str | None:
        """Describes a penalty, or gradient of it, that is not finite; None if both are. Needs no other rank."""
        if self.penalty is _NONE:
            return None
        if not math.isfinite(self.penalty.value()):
            return f"the penalty is {self.penalty.value()} in step {self.number} on all ranks"
        if not math.isfinite(self.penalty_soundness.value()):
            return f"the gradient of the penalty is not finite in step {self.number} on all ranks"
        return None

    def _whose(self, place: float) -> str:
        """Names the parameter. Of several, it is the last in model order, which the backward pass reached first."""
        return f": that of {self._names[int(place) - 1]}" if place and self._names else ""

    def check_finite(self) -> None:
        """Checks the results of the step.

        Raises:
            DivergenceError: If a number is not finite and the update was not skipped.
        """
        fault = None if self.left_out else self.fault()
        if fault is not None:
            raise DivergenceError(not_finite(fault))

    def record(self) -> StepRecord:
        batch = self.batch
        return StepRecord(
            step=self.number,
            epoch=batch.epoch,
            loss=self.loss,
            samples=batch.size,
            skipped=self.skipped,
            merge_spread=self.merge_spread,
            merge_ranks=self.merge_ranks,
            merge_bytes=self.merge_bytes,
            merges=self.merges,
            wasted=self.wasted,
            seconds=self.seconds,
            shares=batch.shares,
            costs=batch.costs,
            lr=self.lr,
            compute_seconds=self.compute_seconds,
            wait_seconds=self.wait_seconds,
            forward_seconds=self.forward_seconds if any(self.forward_seconds) else (),
            input_seconds=self.input_seconds,
            graphs=self.graphs,
            pieces=self.pieces,
            memory_held=self._memory(_HELD) if any(self._memory(_PEAK)) else (),
            memory_peak=self._known_memory(_PEAK),
            memory_reserved=self._known_memory(_RESERVED),
            memory_parts=self._memory_parts(),
        )


def not_finite(what: str) -> str:
    """Returns the error message for numbers that are not finite."""
    return (
        f"{what}; the run stops here, and nothing of this step is saved. Usual causes: a learning rate that is too "
        "high, a division by zero or logarithm of zero in the model, or broken input. Try a lower learning rate or "
        "clip_norm, leave such steps out with non_finite=skip, or look for the operation with "
        "torch.autograd.set_detect_anomaly(True)"
    )
