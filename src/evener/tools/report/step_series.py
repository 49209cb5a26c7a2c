"""What the steps of a run say, by column and by rank: series, totals, memory and the timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evener.tools.report import schema
from evener.tools.report.columns import KeptRows, Numbers, Spread, spread_over, widened
from evener.tools.report.schema import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    INPUT,
    MEMORY,
    SHARE,
    WAITING,
    Columns,
    MemoryOfRank,
    Series,
    Span,
    TimelineStep,
)
from evener.tools.report.step_reader import COMPUTE as COMPUTED
from evener.tools.report.step_reader import (
    FIELDS,
    HELD,
    LOSS,
    PEAK,
    SAMPLES,
    SECONDS,
    SHARES,
    STEP,
    WAIT,
    Steps,
)
from evener.tools.report.step_reader import FORWARD as FORWARDED
from evener.tools.report.step_reader import INPUT as LOADED

MOST_RANKS = 64
"""The most ranks that all have series of their own. Of more ranks, the slowest ones have."""
SLOWEST = 8
WARM = 3
"""The first steps, which are slow and do not count in medians."""
_DRAWN = 16
"""The most ranks in a timeline."""
_LEAST_GROWTH, _STEADY = 0.02, 0.8
"""Memory grows if it grew in the second half by this part of itself, and a line explains this part of its variance."""
_LEAST_READINGS = 8

UNITS = {SHARE: "1", MEMORY: "B"}


class StepTables:
    """Tables of numbers over steps, made of what was read.

    Args:
        steps: The steps. There must be at least one.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps, self.number = steps, steps.bins.rows
        self._rows, self._extremes = _tables(steps.kept), _tables(steps.extremes)
        ranks = max(self._rows["share"].shape[1], self._extremes["share"].shape[1])
        for tables in (self._rows, self._extremes):
            for name, table in tables.items():
                tables[name] = np.pad(table, ((0, 0), (0, ranks - table.shape[1])), constant_values=np.nan)
        self.ranks = ranks if np.isfinite(self._rows[COMPUTE]).any() else 0
        """Ranks whose times are known."""

    @cached_property
    def columns(self) -> Columns:
        """The first and the last step of each column."""
        spread = self.steps.bins.spread(STEP)
        return Columns(tuple(map(int, spread.minimum)), tuple(map(int, spread.maximum)))

    @cached_property
    def _columns_of_rows(self) -> NDArray[np.int64]:
        return np.array(self.steps.kept.steps, dtype=np.int64) // self.steps.bins.width

    # Series

    def series(self) -> Iterable[Series]:
        """Yields the series of the whole run, and those of each rank."""
        bins, spread = self.steps.bins, self.steps.bins.spread
        yield _series(schema.LOSS, "", spread(LOSS))
        positions, rates = zip(*self.steps.rates, strict=True)
        columns = np.array(positions, dtype=np.int64) // bins.width
        values = np.array(rates)[:, None]
        yield _series(schema.LR, "", _first(spread_over(columns, values, len(bins))))
        seconds, inputs = spread(SECONDS), self.first_input()
        seconds = Spread(seconds.minimum + inputs, seconds.mean + inputs, seconds.maximum + inputs)
        yield _series(schema.STEP_SECONDS, "s", seconds)
        with np.errstate(invalid="ignore", divide="ignore"):
            samples = bins.total[:, SAMPLES] / bins.known[:, SAMPLES]
            rate = [
                np.where(each > 0, samples / each, np.nan)
                for each in (seconds.maximum, seconds.mean, seconds.minimum)
            ]
        yield _series(schema.THROUGHPUT, "samples/s", Spread(*rate))
        for name in (SHARE, COMPUTE, WAITING, COMMUNICATION, INPUT, FORWARD, BACKWARD, MEMORY):
            yield from self._series_of_ranks(name)

    def _series_of_ranks(self, name: str) -> Iterable[Series]:
        rows, extremes = self._rows[name], self._extremes[name]
        if not np.isfinite(rows).any():
            return
        width = self.steps.bins.width
        spread = spread_over(self._columns_of_rows, rows, len(self.steps.bins))
        spread = widened(spread, np.array(self.steps.extremes.steps, dtype=np.int64) // width, extremes)
        unit = UNITS.get(name, "s")
        over_ranks = Spread(
            np.fmin.reduce(spread.minimum, axis=1),
            _means(spread.mean, 1),
            np.fmax.reduce(spread.maximum, axis=1),
        )
        yield _series(name, unit, over_ranks)
        for rank in self._shown():
            column = Spread(spread.minimum[:, rank], spread.mean[:, rank], spread.maximum[:, rank])
            yield _series(name, unit, column, rank)

    def _shown(self) -> Sequence[int]:
        """Returns the ranks that have series of their own: all of few, the slowest of many."""
        ranks = self._rows["share"].shape[1]
        if ranks <= MOST_RANKS:
            return range(ranks)
        busy = self.medians(COMPUTE) + np.nan_to_num(self.medians(INPUT))
        return sorted(np.argsort(-np.nan_to_num(busy, nan=-1.0), kind="stable")[:SLOWEST].tolist())

    # By rank

    def medians(self, name: str) -> Numbers:
        """Returns the median of each rank over the steps, without the first ones; NaN where nothing is known."""
        rows = self._rows[name]
        warm = np.array(self.steps.kept.steps) >= WARM
        rows = rows[warm] if warm.sum() > WARM else rows
        return np.array([_median(column) for column in rows.T])

    def totals(self, name: str) -> Numbers:
        """Returns the sum of each rank over all steps, of which those that were kept are a sample. NaN for a rank of
        which nothing is known; a rank counts in the steps in which it was there."""
        rows = self._rows[name]
        known = np.isfinite(rows)
        told = max(1, int(known.any(axis=1).sum()))
        return np.where(
            known.any(axis=0), np.where(known, rows, 0.0).sum(axis=0) * self.number / told, np.nan
        )

    def mean_total(self, name: str) -> float:
        """Returns the sum over all steps of the mean over the ranks that were there; 0 if nothing is known."""
        of_rows = _means(self._rows[name], 1)
        return float(np.nan_to_num(_means(of_rows, 0)) * self.number)

    def slowest(self) -> Numbers:
        """Returns for each rank the fraction of the steps in which it took longest for its work and its samples."""
        busy = self._rows[COMPUTE] + np.nan_to_num(self._rows[INPUT])
        busy = busy[np.isfinite(busy).any(axis=1)]
        first = np.nan_to_num(busy, nan=-1.0).argmax(axis=1) if busy.size else np.empty(0, dtype=np.int64)
        return np.bincount(first, minlength=busy.shape[1]) / max(1, len(busy))

    def sample_seconds(self) -> Numbers:
        """Returns the median compute seconds per sample of each rank; NaN for a rank without samples. A step counts as
        many samples as the steps of its column have on average: it may be a round of many batches."""
        bins = self.steps.bins
        with np.errstate(invalid="ignore", divide="ignore"):
            samples = (bins.total[:, SAMPLES] / bins.known[:, SAMPLES])[self._columns_of_rows]
            each = self._rows[COMPUTE] / (self._rows[SHARE] * samples[:, None])
        return np.array([_median(column[np.isfinite(column)]) for column in each.T])

    def first_input(self) -> Numbers:
        """Returns the mean input seconds of rank 0 in each column, which its step does not contain; 0 if not known."""
        rows = self._rows[INPUT][:, :1]
        if not rows.size:
            return np.zeros(len(self.steps.bins))
        return np.nan_to_num(spread_over(self._columns_of_rows, rows, len(self.steps.bins)).mean[:, 0])

    def memory(self, limits: Sequence[int | None]) -> Iterable[MemoryOfRank]:
        """Yields the peak memory of each rank, with its parts in the last step that was read as a whole."""
        peaks = np.fmax.reduce(np.concatenate([self._rows[MEMORY], self._extremes[MEMORY]]), axis=0)
        parts = self.steps.last.get("memory_parts")
        for rank, peak in enumerate(peaks.tolist()):
            if math.isfinite(peak):
                limit = limits[rank] if rank < len(limits) else None
                yield MemoryOfRank(rank, int(peak), limit, _parts_of(parts, rank), self._growth(rank))

    def _growth(self, rank: int) -> float | None:
        """Returns the bytes a step by which the memory of a rank grew steadily in the second half; else None."""
        held, at = self._rows["held"][:, rank], np.array(self.steps.kept.steps, dtype=np.float64)
        late = np.isfinite(held) & (at >= self.number / 2)
        held, at = held[late], at[late]
        if len(at) < _LEAST_READINGS or len(np.unique(held)) < _LEAST_READINGS // 2:
            return None
        slope, start = np.polyfit(at, held, 1)
        explained = 1 - np.var(held - (slope * at + start)) / np.var(held)
        grown = slope * (at[-1] - at[0])
        return float(slope) if grown > _LEAST_GROWTH * held[0] and explained > _STEADY else None

    # The timeline

    def timeline(self) -> Iterable[TimelineStep]:
        """Yields a typical step, the slowest one and the last one, of those whose times by rank are known."""
        parts = [np.nan_to_num(self._rows[name]) for name in (COMPUTE, WAITING, COMMUNICATION, INPUT)]
        lengths = np.sum(parts, axis=0).max(axis=1, initial=0.0)
        known = np.flatnonzero(np.isfinite(self._rows[COMPUTE]).any(axis=1)).tolist()
        if not known:
            return
        late = [at for at in known if self.steps.kept.steps[at] >= WARM] or known
        by_length = sorted(late, key=lengths.__getitem__)
        picked = {known[-1]: "last", by_length[len(by_length) // 2]: "typical", by_length[-1]: "slowest"}
        for at, why in sorted(picked.items()):
            yield self._drawn(at, why, float(lengths[at]))

    def _drawn(self, at: int, why: str, seconds: float) -> TimelineStep:
        told = np.isfinite(self._rows[FORWARD][at]).any()
        names = (INPUT, *((FORWARD, BACKWARD) if told else (COMPUTE,)), WAITING, COMMUNICATION)
        spans = []
        for rank in [rank for rank in self._shown() if rank < self.ranks][:_DRAWN]:
            begin = 0.0
            for name in names:
                length = float(self._rows[name][at, rank])
                if length > 0:
                    spans.append(Span(rank, name, rounded(begin), rounded(length)))
                    begin += length
        return TimelineStep(self._step_at(self.steps.kept.steps[at]), rounded(seconds), why, tuple(spans))

    def _step_at(self, position: int) -> int:
        """Returns the number of the step at a position, exact unless steps were repeated."""
        first, last = self.columns.first, self.columns.last
        column = position // self.steps.bins.width
        return min(first[column] + position % self.steps.bins.width, last[column])


def _tables(kept: KeptRows) -> dict[str, Numbers]:
    """Returns the numbers of [rows, ranks] by name. What a rank waited is split: the rank that waited least waited for
    nobody, so that its wait is communication, and what others waited longer is waiting for ranks."""
    table = kept.table()
    if not table.size:
        table = np.empty((len(kept.rows), len(FIELDS), 0))
    wait = table[:, WAIT]
    least = np.fmin.reduce(wait, axis=1, initial=np.inf)[:, None] if wait.size else wait
    communication = np.where(np.isnan(wait), np.nan, least)
    return {
        SHARE: table[:, SHARES],
        COMPUTE: table[:, COMPUTED],
        WAITING: wait - communication,
        COMMUNICATION: communication,
        INPUT: table[:, LOADED],
        FORWARD: table[:, FORWARDED],
        BACKWARD: table[:, COMPUTED] - table[:, FORWARDED],
        MEMORY: table[:, PEAK],
        "held": table[:, HELD],
    }


def _series(name: str, unit: str, spread: Spread, rank: int | None = None) -> Series:
    return Series(name, unit, _plain(spread.minimum), _plain(spread.mean), _plain(spread.maximum), rank)


def _plain(values: Numbers) -> tuple[float | None, ...]:
    return tuple(rounded(value) if math.isfinite(value) else None for value in values.tolist())


def rounded(value: float) -> float:
    """Returns a number with six significant digits, which is more than any measurement has."""
    return float(f"{value:.6g}")


def _first(spread: Spread) -> Spread:
    return Spread(spread.minimum[:, 0], spread.mean[:, 0], spread.maximum[:, 0])


def _means(values: Numbers, axis: int) -> Numbers:
    known = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(known, values, 0.0).sum(axis=axis) / known.sum(axis=axis))


def _median(values: Numbers) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _parts_of(parts: Any, rank: int) -> dict[str, int]:
    """Returns what a rank's memory was used for, as far as a record tells it as it should."""
    if not isinstance(parts, dict):
        return {}
    return {
        str(name)[:100]: int(values[rank])
        for name, values in list(parts.items())[:20]
        if isinstance(values, list)
        and rank < len(values)
        and type(values[rank]) is int
        and abs(values[rank]) < 1 << 60
    }
