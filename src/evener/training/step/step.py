"""What is told of a step: by each rank to all others, and then by the step to whoever asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from evener.balance.by_speed_large import Voice
from evener.core.records import StepRecord
from evener.data.batch import Batch
from evener.errors import DivergenceError
from evener.hardware.async_read import Here, Readout
from evener.hardware.memory import CATEGORIES
from evener.hardware.memory.step_usage import MemoryUse, News

_NONE = Here(0.0)
"""The penalty of a task that has none."""
_HELD, _PEAK, _RESERVED, _PARTS = range(4)
"""Where they are in `MemoryUse.row`."""


class Signal(NamedTuple):
    """What one rank tells all others with a step.

    Those from ``total`` to ``wait_seconds`` are results, of this step on devices that have done their work when a call
    returns, and of the step before on others.
    """

    next_count: float
    """Number of terms in the rank's share of the next batch."""
    missing: float
    """0, or a code of the set of parameters without a gradient on this rank."""
    buffers_changed: float
    input_seconds: float
    """Time for which the rank waited for the batch's samples."""
    total: float = 0.0
    """Sum of the loss's terms over the rank's samples; 0 where it travels from device to device."""
    soundness: float = 0.0
    """Not finite if a gradient of the rank's own samples is not; 0 where it travels from device to device."""
    unsound: float = 0.0
    """Then the place of that parameter among all, from 1 on, if it is known; 0 likewise."""
    compute_seconds: float = math.nan
    """Time of the rank's own work."""
    wait_seconds: float = math.nan
    """Time for which it waited for others until the gradients were summed."""
    wish: float = 0.0
    """What the rank wants all to do together; 0 for nothing."""
    skipped: float = 0.0
    """Samples of the rank's share of this step that could not be read."""
    retries: float = 0.0
    """How often the rank took the step again for want of memory."""
    piece: float = 0.0
    """The most samples of a pass that it has room for; 0 if that is not known."""
    graphs: float = 0.0
    """Graphs that the rank has compiled so far."""
    differing: float = 0.0
    """What the rank has found of compiled code, and others do not know yet."""
    division: float = 0.0
    """A code of how this batch and the next are divided, as this rank has it; the same on all."""


def row_of(signal: Signal, memory: MemoryUse) -> tuple[float, ...]:
    """As ranks tell them each other."""
    return (*signal, *memory.row())


class Signals(NamedTuple):
    """What all ranks told with a step: each field of :class:`Signal`, by rank."""

    next_count: tuple[float, ...]
    missing: tuple[float, ...]
    buffers_changed: tuple[float, ...]
    input_seconds: tuple[float, ...]
    total: tuple[float, ...]
    soundness: tuple[float, ...]
    unsound: tuple[float, ...]
    compute_seconds: tuple[float, ...]
    wait_seconds: tuple[float, ...]
    wish: tuple[float, ...]
    skipped: tuple[float, ...]
    retries: tuple[float, ...]
    piece: tuple[float, ...]
    graphs: tuple[float, ...]
    differing: tuple[float, ...]
    division: tuple[float, ...]


Columns = Sequence[tuple[float, ...]]
"""Of each number of `MemoryUse.row` those of all ranks."""


def read_columns(rows: Sequence[Sequence[float]]) -> tuple[Signals, Columns]:
    """From what all ranks gave by :func:`row_of`; in a number of calls that does not depend on theirs."""
    columns = list(zip(*rows, strict=True))
    length = len(Signals._fields)
    return Signals(*columns[:length]), columns[length:]


def of(ranks: Sequence[int], column: Sequence[float]) -> Sequence[float]:
    """The numbers of these ranks."""
    if len(ranks) < 2:
        return [column[rank] for rank in ranks]
    return column if len(ranks) == len(column) else itemgetter(*ranks)(column)


@dataclass(frozen=True)
class Results:
    """What became of a step."""

    total: float
    """Sum of the loss's terms over the global batch."""
    loss: tuple[int, float] | None = None
    """The first rank whose total is not finite, and that."""
    gradient: tuple[int, float] | None = None
    """The first rank of which a gradient is not finite, and the place of that parameter among all, from 1 on, or 0."""

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float]], contributors: Sequence[int]) -> Results:
        """From total, soundness and place of all ranks."""
        total = sum(of(contributors, list(map(itemgetter(0), rows))))
        if all(map(math.isfinite, chain.from_iterable(rows))):
            return cls(total)
        losses = ((rank, row[0]) for rank, row in enumerate(rows) if not math.isfinite(row[0]))
        gradients = ((rank, row[2]) for rank, row in enumerate(rows) if not math.isfinite(row[1]))
        return cls(total, next(losses, None), next(gradients, None))


@dataclass
class RankTimes:
    """Where this rank's time went, in seconds."""

    compute: float = 0.0
    wait: float = 0.0
    input: float = 0.0


class Step:
    """A step that was taken. Its loss is known when all ranks have told theirs: asking for it waits for that."""

    def __init__(
        self, batch: Batch, number: int, settle: Callable[[], object], names: Sequence[str] = ()
    ) -> None:
        self._settle, self._names = settle, names
        self.batch = batch
        self.number = number
        self.count = 0.0
        """What the total is divided by."""
        self.terms = 0.0
        """Of the global batch."""
        self.changes: tuple[str, ...] = ()
        """How this rank's set of trained parameters differs from that at the beginning."""
        self.skipped = 0
        self.seconds = 0.0
        self.lr = 0.0
        self.penalty: Readout = _NONE
        self.penalty_soundness: Readout = _NONE
        """Not finite if the gradient of the penalty is not."""
        self.results: Callable[[], Results] | None = None
        """What became of it; None until that is on its way."""
        self.left_out = False
        """Whether all ranks have left out its update, because something was not finite."""
        self.own_seconds = RankTimes()
        self.only_work = True
        """Whether this rank did nothing else in the time of its work: it has neither compiled nor begun anew."""
        self.speeds: Voice | None = None
        """What all ranks told of their times, where each knows its own alone."""
        self.lines: Sequence[Sequence[float]] = ()
        """Of each rank, if all were asked for theirs."""
        self.compute_seconds: tuple[float, ...] = ()
        """Of every rank, as what follows; empty where each knows its own alone."""
        self.wait_seconds: tuple[float, ...] = ()
        self.input_seconds: tuple[float, ...] = ()
        self.memory_columns: Columns = ()
        """Of every rank's device, since the step before."""
        self.retries: tuple[int, ...] = ()
        """Of every rank, how often it took the step again for want of memory."""
        self.pieces: tuple[int, ...] = ()
        """Of every rank, the most samples of a pass that it has room for, 0 if that is not known; empty if of none."""
        self.graphs: tuple[int, ...] = ()
        """Of every rank, what it has compiled until its end; empty if nothing is compiled."""

    @property
    def total(self) -> float:
        """Sum of the loss's terms over the global batch."""
        if self.results is None:
            self._settle()
        assert self.results is not None
        return self.results().total

    @property
    def loss(self) -> float:
        """Mean over the terms of the global batch, and the penalty; NaN if the batch has no term."""
        return (self.total / self.count if self.count else math.nan) + self.penalty.value()

    def fault(self) -> str | None:
        """What of the total, the gradients or the penalty is not finite, and where; the same on all ranks."""
        found = self.results() if self.results else Results(0.0)
        if found.loss is not None:
            rank, total = found.loss
            return f"the loss is {total} in step {self.number} on rank {rank}"
        if found.gradient is not None:  # those of other ranks may follow from a loss
            rank, place = found.gradient
            return f"a gradient is not finite in step {self.number} on rank {rank}{self._whose(place)}"
        return self.fault_of_penalty()

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """What each rank's device was used for, since the step before."""
        return tuple(MemoryUse.of_row(row) for row in zip(*self.memory_columns, strict=True))

    @property
    def has_news(self) -> bool:
        """Whether a rank has noticed something of its device's memory."""
        return any(map(any, self.memory_columns[-len(News._fields) :]))

    def _memory(self, place: int) -> tuple[int, ...]:
        """A column in bytes."""
        return tuple(map(int, self.memory_columns[place])) if self.memory_columns else ()

    def _memory_parts(self) -> dict[str, tuple[int, ...]]:
        columns = zip(CATEGORIES, self.memory_columns[_PARTS:], strict=False)  # news follow
        return {name: tuple(map(int, column)) for name, column in columns if any(column)}

    def has_finite_loss(self) -> bool:
        """Whether the totals of all ranks are finite, and the penalty with its gradient."""
        found = self.results() if self.results else Results(0.0)
        return found.loss is None and self.fault_of_penalty() is None

    def fault_of_penalty(self) -> str | None:
        """Likewise, of the penalty alone: the same on all ranks, and known to each without the others."""
        if self.penalty is _NONE:
            return None
        if not math.isfinite(self.penalty.value()):
            return f"the penalty is {self.penalty.value()} in step {self.number} on all ranks"
        if not math.isfinite(self.penalty_soundness.value()):
            return f"the gradient of the penalty is not finite in step {self.number} on all ranks"
        return None

    def _whose(self, place: float) -> str:
        """Of several, backward came to the last in the order of the model first."""
        return f": that of {self._names[int(place) - 1]}" if place and self._names else ""

    def check_finite(self) -> None:
        """Raises:
        DivergenceError: If something is not finite and the update was not left out.
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
            seconds=self.seconds,
            shares=batch.shares,
            lr=self.lr,
            compute_seconds=self.compute_seconds,
            wait_seconds=self.wait_seconds,
            input_seconds=self.input_seconds,
            graphs=self.graphs,
            pieces=self.pieces,
            memory_held=self._memory(_HELD),
            memory_peak=self._memory(_PEAK),
            memory_reserved=self._memory(_RESERVED) if any(self._memory(_RESERVED)) else (),
            memory_parts=self._memory_parts(),
        )


def not_finite(what: str) -> str:
    """What to say of numbers that are not finite."""
    return (
        f"{what}; the run stops here, and nothing of this step is saved. Usual causes: a learning rate that is too "
        "high, a division by zero or logarithm of zero in the model, or broken input. Try a lower learning rate or "
        "clip_norm, leave such steps out with non_finite=skip, or look for the operation with "
        "torch.autograd.set_detect_anomaly(True)"
    )
