"""Exchanges step numbers between ranks: as rows that all ranks gather or, with many ranks, as sums.

Up to :data:`~evener.collectives.hierarchical_sum.MOST_ROWS` ranks, every rank gets the row of every other with each
step. With more ranks, only what all must know is reduced. Rows follow rarely: in every :data:`ROWS_EVERY`-th step, and
in the step after one in which a rank has something to report that concerns itself::

    step        0           1        2        3           ...   16
    sums        sums        sums     sums     sums              sums
    rows        rows                          rows              rows       rank 7 ran out of memory in step 2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from evener.balance.by_speed_large import SpeedReport
from evener.collectives.hierarchical_sum import MOST_ROWS, Levels, Summing
from evener.collectives.registry import SUBSTITUTES
from evener.core.exact_numbers import exact_total
from evener.distributed.control_channel import Rows
from evener.distributed.hosts import all_gather_single
from evener.distributed.mesh import DIVIDING_TERMS, Mesh
from evener.distributed.session import Session
from evener.hardware.async_read import read
from evener.hardware.memory.step_usage import NOTHING, MemoryUse
from evener.hardware.timers import waiting
from evener.training.step.step import (
    AllRankStats,
    Columns,
    RankStats,
    Results,
    Step,
    read_columns,
    row_of,
    select_ranks,
)

ROWS_EVERY = 16
_KINDS = (math.nan, math.inf, -math.inf)
_PLACES = 2**21
"""Larger than the number of parameters of a model."""


class Exchange(Protocol):
    """Exchanges a few numbers between all ranks."""

    def exchange(self, values: Sequence[float]) -> Rows:
        """Starts to send ``values`` to all ranks. All ranks must call this together, with equally many values."""


@dataclass(slots=True)
class GatheredStep:
    """Numbers of all ranks about a step, as each rank knows them."""

    next_count: float
    skipped: float
    wish: float
    buffers_changed: bool
    missing: Sequence[float]
    """Codes of the parameters without a gradient, of the ranks with the same parameters.

    With sums, only the least and the greatest code.
    """
    divisions: Sequence[float]
    """Codes of how batches are divided; with sums, only the least and the greatest."""
    results: Results
    differing: bool = False
    """True if a rank has new findings about compiled code."""
    rows: AllRankStats | None = None
    """Numbers of each rank, if rows were exchanged."""
    memory: Columns = ()
    speeds: SpeedReport | None = None
    """Sum of all ranks' speed reports, if each rank knows only its own times."""
    lines: Sequence[Sequence[float]] = ()
    """Lines of all ranks' speed models, if they were asked for."""


Hearing = Callable[[], GatheredStep]
"""Waits for the numbers of all ranks. Must be called once."""


class BalanceReporter(Protocol):
    """Gives the balancer's reports. The balancer is of the same kind on all ranks."""

    def voice(self, step: Step | None) -> SpeedReport | None:
        """Returns this rank's speed report for a step. Returns None if all ranks know all times."""

    def line(self) -> Sequence[float]:
        """Returns the line of this rank's speed model if all ranks are asked for theirs; otherwise nothing."""

    @property
    def wants_rows(self) -> bool:
        """True if the times of all ranks must be known for every step."""


class Telling(Protocol):
    """A way to exchange step numbers."""

    def start(self, step: int, signal: RankStats, memory: MemoryUse, measured: Step | None) -> Hearing:
        """Starts to send the numbers of a step, and the times of the step ``measured`` unless None, to all ranks."""

    def results(self, row: torch.Tensor) -> Callable[[], Results]:
        """Sends total, soundness and index of a parameter that is not finite from device to device.

        Args:
            row: Three numbers in float64, on the device of every rank.
        """


class ByRows:
    """Gathers the rows of all ranks. With thousands of ranks, each sum is one call, with no Python loop over ranks.

    Args:
        exact: Whether sums must have the same bits on any division of the samples.
    """

    def __init__(self, control: Exchange, mesh: Mesh, exact: bool = False) -> None:
        self._control, self._mesh, self._exact = control, mesh, exact

    def start(self, step: int, signal: RankStats, memory: MemoryUse, measured: Step | None) -> Hearing:
        pending = self._control.exchange(row_of(signal, memory))
        return lambda: self._heard(*read_columns(pending.wait()))

    def _heard(self, rows: AllRankStats, memory: Columns) -> GatheredStep:
        contributors, missing = self._mesh.data.contributors, [0.0]
        if any(rows.missing):
            missing = [rows.missing[rank] for rank in self._mesh.ranks(*DIVIDING_TERMS)]
        results = Results.from_rows(
            list(zip(rows.total, rows.soundness, rows.unsound, strict=True)), contributors
        )
        next_count: float = sum(select_ranks(contributors, rows.next_count))
        if self._exact:
            next_count = _exact(contributors, rows.next_count, rows.next_count_rest)
            results = results._replace(total=_exact(contributors, rows.total, rows.total_rest))
        return GatheredStep(
            next_count,
            sum(select_ranks(contributors, rows.skipped)),
            max(rows.wish),
            any(rows.buffers_changed),
            missing,
            rows.division,
            results,
            any(rows.differing),
            rows,
            memory,
        )

    def results(self, row: torch.Tensor) -> Callable[[], Results]:
        rows = row.new_empty(self._mesh.layout.world_size, 3)
        if self._mesh.world is None:
            rows.copy_(row)
        else:
            with waiting():
                all_gather_single(rows.view(-1), row, group=self._mesh.world)  # NCCL copies a list row by row
        found, contributors = read(rows), self._mesh.data.contributors
        return lambda: Results.from_rows(_in_threes(found.values()), contributors)


class Alone(ByRows):
    """What the only rank of a run tells itself: its own numbers, without a message."""

    _sent, _columns = NOTHING, list(zip(NOTHING.row(), strict=True))

    def start(self, step: int, signal: RankStats, memory: MemoryUse, measured: Step | None) -> Hearing:
        if memory is not self._sent:  # on a CPU it is read in one of several steps
            self._sent, self._columns = memory, list(zip(memory.row(), strict=True))
        return partial(self._own, signal, self._columns)

    def _own(self, signal: RankStats, memory: Columns) -> GatheredStep:
        rows = AllRankStats._make(zip(signal, strict=True))
        if not math.isfinite(signal.total + signal.soundness):
            return self._heard(rows, memory)
        heard = GatheredStep(
            signal.next_count,
            signal.skipped,
            signal.wish,
            bool(signal.buffers_changed),
            (signal.missing,),
            (signal.division,),
            Results(signal.total),
            bool(signal.differing),
        )
        heard.rows, heard.memory = rows, memory
        return heard


class BySums:
    """Reduces numbers over all ranks, and gathers rows rarely.

    Args:
        control: Exchanges rows.
        mesh: Says which ranks contribute what.
        sums: Reduces over all ranks.
        speech: Returns the reporter of this rank's speed.
    """

    def __init__(
        self, control: Exchange, mesh: Mesh, sums: Summing, speech: Callable[[], BalanceReporter]
    ) -> None:
        self._control, self._mesh, self._sums, self._speech = control, mesh, sums, speech
        self._counts = mesh.rank in set(mesh.data.contributors)
        alike = mesh.layout.slices(DIVIDING_TERMS)
        self._group = next(at for at, ranks in enumerate(alike) if mesh.rank in ranks)
        self._groups, self._above = len(alike), mesh.layout.world_size - mesh.rank
        self._rows_asked = False
        self._retries = 0.0
        self._kept: MemoryUse | None = None
        """Memory use of a step in which this rank noticed something, until it is sent."""

    def start(self, step: int, signal: RankStats, memory: MemoryUse, measured: Step | None) -> Hearing:
        counts, voice = float(self._counts), self._speech().voice(measured)
        self._retries += signal.retries
        self._kept = memory if any(memory.news) else self._kept
        rows = self._rows(signal, memory) if self._is_time(step) else None
        own = float(bool(self._retries or self._kept))
        spoken = voice or SpeedReport((), ())
        # A total that is not finite makes the sum not finite.
        total = signal.total if self._counts else 0.0
        added = (counts * signal.next_count, counts * signal.skipped, total, *spoken.added)
        loss, gradient = loss_code(signal.total, self._above), gradient_code(signal, self._above)
        divisions = signal.division, -signal.division
        flags = (signal.wish, signal.buffers_changed, signal.differing, loss, gradient, own, *divisions)
        sums = self._sums.start(added, (*flags, *self._missing(signal.missing), *spoken.greatest))
        row = self._speech().line()
        lines = self._control.exchange(row) if row else None
        return lambda: self._heard(*sums.wait(), rows, lines, voice is not None)

    def _is_time(self, step: int) -> bool:
        return step % ROWS_EVERY == 0 or self._rows_asked or self._speech().wants_rows

    def _rows(self, signal: RankStats, memory: MemoryUse) -> Rows:
        row = row_of(signal._replace(retries=self._retries), self._kept or memory)
        self._retries, self._kept = 0.0, None
        return self._control.exchange(row)

    def _missing(self, code: float) -> list[float]:
        """Returns codes of missing parameters, for a maximum over ranks.

        For each set of ranks with the same parameters these are a code and its negative, which give the greatest and
        the least.
        """
        codes = [-math.inf] * (2 * self._groups)
        codes[2 * self._group : 2 * self._group + 2] = code, -code
        return codes

    def _heard(
        self,
        added: list[float],
        greatest: list[float],
        rows: Rows | None,
        lines: Rows | None,
        spoken: bool,
    ) -> GatheredStep:
        next_count, skipped, total, *heard = added
        wish, buffers_changed, differing, loss, gradient, own, division, least_division, *rest = greatest
        missing, speeds = rest[: 2 * self._groups], rest[2 * self._groups :]
        most, least = missing[2 * self._group : 2 * self._group + 2]
        self._rows_asked = bool(own)
        world_size = self._mesh.layout.world_size
        found = GatheredStep(
            next_count,
            skipped,
            wish,
            bool(buffers_changed),
            (-least, most),
            (-least_division, division),
            results_of(total, loss, gradient, world_size),
            bool(differing),
            speeds=SpeedReport(tuple(heard), tuple(speeds)) if spoken else None,
            lines=lines.wait() if lines else (),
        )
        if rows is None:
            return found
        told, memory = read_columns(rows.wait())
        return replace(found, rows=told, memory=memory)

    def results(self, row: torch.Tensor) -> Callable[[], Results]:
        """Reduces the row with two all-reduces of the devices' own backend."""
        total, soundness, place = row.unbind()
        zero, above = torch.zeros_like(total), self._above
        kind = torch.where(total.isnan(), 1.0, torch.where(total > 0, 2.0, 3.0))
        codes = torch.stack(
            [
                torch.where(total.isfinite(), zero, above * 4.0 + kind),
                torch.where(soundness.isfinite(), zero, above * float(_PLACES) + place),
            ]
        )
        sums = (total if self._counts else zero).reshape(1).clone()
        assert self._mesh.world is not None
        with waiting():
            dist.all_reduce(sums, group=self._mesh.world)
            dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=self._mesh.world)
        found, world_size = read(torch.cat([sums, codes])), self._mesh.layout.world_size

        def wait() -> Results:
            total, loss, gradient = found.values()
            return results_of(total, loss, gradient, world_size)

        return wait


def _exact(ranks: Sequence[int], numbers: Sequence[float], rests: Sequence[float]) -> float:
    return exact_total([*select_ranks(ranks, numbers), *select_ranks(ranks, rests)])


def adds_up(session: Session, exact: bool = False) -> bool:
    """Returns True if a session has too many ranks for rows. False for ranks that are only simulated, and in a run that
    is exact in bits."""
    if exact or session.world is None or dist.get_backend(session.world) in SUBSTITUTES:
        return False
    return session.world_size > MOST_ROWS


@contextmanager
def way_to_tell(
    session: Session,
    mesh: Mesh,
    control: Exchange,
    speech: Callable[[], BalanceReporter],
    exact: bool = False,
) -> Iterator[Telling]:
    """Yields the way to exchange step numbers: rows, or sums for many ranks. A collective call.

    Args:
        exact: Whether sums must have the same bits on any division of the samples, for which rows are needed.
    """
    if session.world is None or not adds_up(session, exact):
        yield (ByRows if session.world_size > 1 else Alone)(control, mesh, exact)
        return
    with session.watchdog.wait("start of the sums over all ranks"):
        sums = Levels(session.world, session.timeout_seconds, session.watchdog)
    with closing(sums):
        yield BySums(control, mesh, sums, speech)


def loss_code(total: float, above: int) -> float:
    """Returns 0 if the total is finite. Otherwise a number that encodes what it is, greater for lower ranks.

    Args:
        above: Number of ranks from this one on, itself included.
    """
    if math.isfinite(total):
        return 0.0
    return above * 4.0 + (1 if math.isnan(total) else 2 if total > 0 else 3)


def gradient_code(signal: RankStats, above: int) -> float:
    """Returns 0 if a rank's gradients are finite. Otherwise encodes the parameter, greater for lower ranks."""
    return 0.0 if math.isfinite(signal.soundness) else above * float(_PLACES) + signal.unsound


def results_of(total: float, loss: float, gradient: float, world_size: int) -> Results:
    """Returns the results from the sum of all totals, and the greatest codes."""
    above, kind = divmod(int(loss), 4)
    bad_loss = (world_size - above, _KINDS[kind - 1]) if loss else None
    above, place = divmod(int(gradient), _PLACES)
    return Results(total, bad_loss, (world_size - above, float(place)) if gradient else None)


def _in_threes(flat: Sequence[float]) -> list[tuple[float, float, float]]:
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
