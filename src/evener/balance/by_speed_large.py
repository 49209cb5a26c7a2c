"""Load balancing by speed for many ranks: each rank learns only its own speed, and sends its line when asked.

::

    each step        every rank   its time, against its own line ─┐  added up over all ranks: how many are how far
                                  the longest time, a change ─────┘  above their lines, and the greatest of each
    now and then     every rank   its line ─▶ all lines, on all ranks ─▶ the same decision everywhere

So a step costs a rank the same for any number of ranks, and computations over all lines (as arrays) are rare. The
decisions are those of :mod:`evener.balance.controller`, one step later: the lines are sent with the next step's report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from evener.balance.controller import Controller
from evener.balance.division import Divides
from evener.balance.noise_model import LEVEL_STEPS
from evener.balance.policy import PredictedChange
from evener.balance.speed import SpeedModel
from evener.balance.time_model import Fit, Line, Shape
from evener.balance.vectorized_lines import Array, DivisionOfMany, Lines
from evener.errors import ShareError

BINS, BIN = 64, 0.01
"""Number and width of the histogram bins for log(measured time / expected time). The first and the last bin also count
all values beyond."""
CLIFFS = 3
"""Most cliffs of a line that are sent."""


class SpeedReport(NamedTuple):
    """One rank's report of its time in a step, or the reduction of the reports of all ranks."""

    added: tuple[float, ...]
    """To be summed over the ranks: 1 in the bin of this rank's time if its line is known, 0 elsewhere."""
    greatest: tuple[float, ...]
    """To be reduced by maximum: the seconds; 1 if they are unknown though the rank had samples; 1 if the rank has
    changed its speed."""

    @classmethod
    def silent(cls) -> SpeedReport:
        """Returns the report of a rank that has nothing to report."""
        return cls((0.0,) * BINS, (0.0, 0.0, 0.0))


class _Row(NamedTuple):
    """One rank's line, its errors and its state, as sent to the other ranks."""

    known: float
    overhead_seconds: float
    seconds_per_sample: float
    center: float
    level_error: float
    slope_error: float
    sigma: float
    seems_faster: float
    ratio: float
    """New time over old time if the rank has changed its speed since it last sent its line; else 1."""


WIDTH = len(_Row._fields) + 2 * CLIFFS
"""How many numbers a rank sends to describe its line."""


class BySpeedOfMany(Controller):
    """Divides batches by learned speeds, where every rank knows only its own times.

    Args:
        world_size: Number of parts of a batch.
        own: Index of the part that this rank computes.
        teams: For each part the ranks that compute it together; the slowest of them counts. None: one rank per part.
        limits: The other arguments of :class:`~evener.balance.controller.Controller`.
    """

    def __init__(
        self, world_size: int, own: int, teams: Sequence[Sequence[int]] | None = None, **limits: Any
    ) -> None:
        self._own = own
        self._teams = np.arange(world_size)[:, None] if teams is None else np.array(teams)
        super().__init__(world_size, **limits)

    def _know_nothing(self) -> None:
        self._rows = np.zeros((self.world_size, WIDTH))
        self._model, self._ratio = SpeedModel(), 1.0
        self._stirs = self._stirred = self.asks = False

    # What the ranks tell each other

    def voice(self, n: int, seconds: float, cost: float | None = None) -> SpeedReport:
        """Returns this rank's report of a step: ``n`` samples took ``seconds`` (NaN if not measured).

        Args:
            cost: What they cost, in samples of mean cost, if the task gives costs. The seconds in the report are then
                moved along this rank's line to ``n``, so that steps can be compared.
        """
        known = n > 0 and seconds > 0 and math.isfinite(seconds)
        counts = [0.0] * BINS
        apart = self._model.residual(n if cost is None else cost, seconds) if known else None
        if known and cost is not None:
            seconds = self._model.moved(seconds, cost, n)
        if apart is not None:
            counts[max(0, min(BINS - 1, math.floor(apart / BIN) + BINS // 2))] = 1.0
        return SpeedReport(
            tuple(counts), (seconds if known else 0.0, float(n > 0 and not known), float(self._stirs))
        )

    asks: bool
    """True if the ranks must send their lines with the next step. The same on all ranks."""

    def line(self) -> tuple[float, ...]:
        """Returns this rank's line as :data:`WIDTH` numbers, to be sent to all ranks when ``asks`` is True."""
        ratio, self._ratio, self._stirs = self._ratio, 1.0, False
        if not self._model.known:
            return (0.0,) * WIDTH
        fit, faster = self._model.fit(), float(self._model.seems_faster)
        line, errors = fit.line, (fit.center, fit.level_error, fit.slope_error, fit.sigma)
        row = _Row(1.0, line.overhead_seconds, line.seconds_per_sample, *errors, faster, ratio)
        return (*row, *_cliffs(line))

    def hear(
        self,
        step: int,
        sizes: Sequence[int],
        seconds: float,
        reduced: SpeedReport,
        lines: Sequence[Sequence[float]] = (),
        cost: float | None = None,
    ) -> None:
        """Learns from one step. All ranks must call this for every step, in order.

        Args:
            step: The number of the step.
            sizes: The shares of the step.
            seconds: Compute time of this rank; NaN if not measured.
            reduced: The reports of all ranks, reduced by sum and by maximum.
            lines: If ``asks`` was True, the :meth:`line` of every rank.
            cost: As in :meth:`voice`.
        """
        if not self._notices(step, sizes):
            return
        self._learn(sizes[self._own], seconds, reduced, cost)
        slowest, unknown, stirred = reduced.greatest
        if stirred and not self._stirred:
            self._look_early()
        self._stirred |= bool(stirred)
        self._compare(step, sizes, math.nan if unknown or not slowest else slowest)
        if self.asks and len(lines):
            self.asks = False
            self._take(np.array(lines), sizes)
            if not self._trial:  # a trial of the old shares may have begun meanwhile
                self._look(step, self._batch_size)
            self._stirred = False
        elif self._is_time_to_look(step):
            self.asks = True

    def _learn(self, n: int, seconds: float, reduced: SpeedReport, cost: float | None) -> None:
        now = _median(reduced.added, self._level)
        self._level += (now - self._level) / LEVEL_STEPS
        known, sudden = seconds / math.exp(now), self._doubt.sudden
        ratio = (
            self._model.observe(n, known, sudden)
            if cost is None
            else self._model.observe_cost(cost, known, sudden)
        )
        if ratio is not None:
            self._ratio *= ratio
            self._stirs = True

    def _take(self, rows: Array, sizes: Sequence[int]) -> None:
        """Takes over the lines in ``rows`` (one row per rank). A part that several ranks compute gets the line of the
        rank that is slowest with the part's share."""
        of_teams = rows[self._teams]
        n = np.array(sizes)[:, None]
        slowest = np.argmax(of_teams[..., 1] + of_teams[..., 2] * n, axis=1)
        self._rows = of_teams[np.arange(len(of_teams)), slowest]
        changed = np.flatnonzero(self._column("known") * (self._column("ratio") != 1.0))
        self._changed = {int(part): float(self._column("ratio")[part]) for part in changed}

    def _column(self, name: str) -> Array:
        column: Array = self._rows[:, _Row._fields.index(name)]
        return column

    # What is known

    @property
    def _has_changed(self) -> bool:
        return self._stirred or bool(self._changed)

    def _lines(self) -> Lines:
        """Returns the lines of all parts. A part of unknown speed gets the median overhead and time per sample."""
        known = self._column("known") > 0
        if not known.any():
            return Lines.even(self.world_size)
        straight = [self._column(name) for name in ("overhead_seconds", "seconds_per_sample")]
        columns = self._rows[:, len(_Row._fields) :]
        pairs = [(columns[:, 2 * at], columns[:, 2 * at + 1]) for at in range(CLIFFS)]
        cliffs = tuple((np.where(sizes > 0, sizes, math.inf), least) for sizes, least in pairs if sizes.any())
        overhead, price = (np.where(known, each, np.median(each[known])) for each in straight)
        return Lines(overhead, price, cliffs)

    def _by_speed(self) -> DivisionOfMany:
        return DivisionOfMany(self._lines())

    def _tilted(self, step: int) -> DivisionOfMany:
        return DivisionOfMany(self._lines().tilted(step, self._policy.calibration_spread))

    def _equally(self) -> DivisionOfMany:
        return DivisionOfMany(Lines.even(self.world_size))

    def _judge(self, divided: Divides, old: Sequence[int], new: Sequence[int]) -> PredictedChange:
        """Computes the same as :func:`~evener.balance.policy.judge`, with arrays."""
        assert isinstance(divided, DivisionOfMany)
        was, becomes = np.array(old, dtype=np.float64), np.array(new, dtype=np.float64)
        before, after = divided.lines(was), divided.lines(becomes)
        slowest, gaining = int(np.argmax(before)), becomes > was
        errors = self._errors(becomes, after)[gaining].max(initial=0.0), self._errors(was, before)[slowest]
        error = math.sqrt(sum(float(each) ** 2 for each in errors))
        return PredictedChange(float(before.max()), float(after.max()), error / float(before.max()))

    def _errors(self, n: Array, seconds: Array) -> Array:
        level, slope = self._column("level_error"), self._column("slope_error") * (n - self._column("center"))
        known = np.where(self._column("known") > 0, np.sqrt(level**2 + slope**2), Shape.USUAL_ERROR * seconds)
        return np.where(n > 0, known, 0.0)

    def _seems_faster(self, rank: int) -> bool:
        return bool(self._column("seems_faster")[rank])

    # State

    def state_dict(self) -> dict[str, Any]:
        """Returns the lines that were last sent. What ranks have learned since then is not included."""
        return {"lines": self._rows.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the lines of the parts that still exist, and starts learning again with them as prior."""
        saved = np.array(state.get("lines", ()))[: self.world_size]  # absent in another balancer's state
        self._know_nothing()
        self._restart()
        self._rows[: len(saved)] = saved.reshape(-1, WIDTH)
        row = _Row(*self._rows[self._own, : len(_Row._fields)])
        self._model, self._ratio, self._stirs, self._stirred, self.asks = (
            SpeedModel(),
            1.0,
            False,
            False,
            False,
        )
        if row.known:
            line = Line(row.overhead_seconds, row.seconds_per_sample)
            errors = row.center, row.level_error, row.slope_error, row.sigma
            self._model.expect(Fit(line, *errors))

    def observe(self, step: int, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Raises ShareError always: this balancer is fed by :meth:`voice`, :meth:`line` and :meth:`hear`."""
        raise ShareError("the ranks of this balancer know their own times alone: call hear, not observe")


def _cliffs(line: Line) -> list[float]:
    """Returns size and seconds of the highest cliffs of ``line``, in order of size, padded with 0."""
    highest = sorted(sorted(line.cliffs, key=lambda cliff: cliff[1])[-CLIFFS:])
    flat = [float(number) for cliff in highest for number in cliff]
    return [*flat, *[0.0] * (2 * CLIFFS - len(flat))]


def _median(counts: Sequence[float], level: float) -> float:
    """Returns the median of a histogram, to a bin's width.

    An even count gets ``level`` as one more vote, as in :func:`~evener.balance.noise_model.common`. With fewer than two
    counts the result is ``level``.
    """
    total = sum(counts)
    if total < 2:
        return level
    votes = list(counts)
    if total % 2 == 0:
        votes[max(0, min(BINS - 1, math.floor(level / BIN) + BINS // 2))] += 1
    reached, half = 0.0, sum(votes) / 2
    for place, count in enumerate(votes):
        reached += count
        if reached >= half:
            return (place - BINS // 2 + 0.5) * BIN
    raise AssertionError("half of the votes are reached before all are")
