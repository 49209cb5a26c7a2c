"""Shares by speed of many ranks: each learns of itself alone, and tells its line when there is something to decide.

::

    each step        every rank   its time, against its own line ─┐  added up over all ranks: how many are how far
                                  the longest time, a change ─────┘  above their lines, and the greatest of each
    now and then     every rank   its line ─▶ all lines, on all ranks ─▶ the same decision everywhere

So a step costs a rank the same whatever their number, and what is decided by all lines, as arrays, comes seldom. The
decisions are those of :mod:`evener.balance.controller`, a step later: the lines travel with the row of the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from evener.balance.controller import Controller
from evener.balance.division import Divides
from evener.balance.noise_model import LEVEL_STEPS
from evener.balance.policy import Judgement
from evener.balance.speed import SpeedModel
from evener.balance.time_model import Fit, Line, Shape
from evener.balance.vectorized_lines import Array, DivisionOfMany, Lines
from evener.errors import ShareError

BINS, BIN = 64, 0.01
"""How many, and how wide each is, into which logarithms of a time over what was expected are counted; the first and the
last are for all beyond."""
CLIFFS = 3
"""Most that are told of a line."""


class Voice(NamedTuple):
    """What one rank tells of its time in a step."""

    added: tuple[float, ...]
    """1 in the bin that it falls into, if its line is known; to be added up over the ranks."""
    greatest: tuple[float, ...]
    """Seconds, whether they are not known though the rank had samples, and whether it has changed its speed; of each
    the greatest of all ranks counts."""

    @classmethod
    def silent(cls) -> Voice:
        """Of a rank that has nothing to say."""
        return cls((0.0,) * BINS, (0.0, 0.0, 0.0))


class _Row(NamedTuple):
    """A rank's line, as it tells it."""

    known: float
    overhead_seconds: float
    seconds_per_sample: float
    center: float
    level_error: float
    slope_error: float
    sigma: float
    seems_faster: float
    ratio: float
    """Time over that of before, if the rank has changed its speed since it last told; else 1."""


WIDTH = len(_Row._fields) + 2 * CLIFFS
"""Numbers that a rank tells of its line."""


class BySpeedOfMany(Controller):
    """Shares by learned speed, where every rank knows its own times alone.

    Args:
        world_size: Parts of a batch.
        own: The part of this rank.
        teams: The ranks that compute each part together, whose slowest counts; a rank for each part if None.

    The others are those of :class:`~evener.balance.controller.Controller`.
    """

    def __init__(
        self, world_size: int, own: int, teams: Sequence[Sequence[int]] | None = None, **limits: Any
    ) -> None:
        self._own = own
        self._teams = np.arange(world_size)[:, None] if teams is None else np.array(teams)
        super().__init__(world_size, **limits)

    def _know_nothing(self) -> None:
        self._told = np.zeros((self.world_size, WIDTH))
        self._model, self._ratio = SpeedModel(), 1.0
        self._stirs = self._stirred = self.asks = False

    # What the ranks tell each other

    def voice(self, n: int, seconds: float) -> Voice:
        """What this rank tells of a step in which its ``n`` samples took so long; NaN where that says nothing."""
        known = n > 0 and seconds > 0 and math.isfinite(seconds)
        counts = [0.0] * BINS
        apart = self._model.residual(n, seconds) if known else None
        if apart is not None:
            counts[max(0, min(BINS - 1, math.floor(apart / BIN) + BINS // 2))] = 1.0
        return Voice(
            tuple(counts), (seconds if known else 0.0, float(n > 0 and not known), float(self._stirs))
        )

    asks: bool
    """Whether the ranks are to tell their lines with the next step; the same on all."""

    def line(self) -> tuple[float, ...]:
        """This rank's, in :data:`WIDTH` numbers; to be told to all when they ask."""
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
        told: Voice,
        lines: Sequence[Sequence[float]] = (),
    ) -> None:
        """Takes in a step; for every one, in order, on all ranks.

        Args:
            step: Its number.
            sizes: The shares.
            seconds: Of this rank's own work; NaN where that says nothing.
            told: Of all ranks, added up, and the greatest.
            lines: If they were asked for, what every rank told by :meth:`line`.
        """
        if not self._notices(step, sizes):
            return
        self._learn(sizes[self._own], seconds, told)
        slowest, unknown, stirred = told.greatest
        if stirred and not self._stirred:
            self._look_early()
        self._stirred |= bool(stirred)
        self._compare(step, sizes, math.nan if unknown or not slowest else slowest)
        if self.asks and len(lines):
            self.asks = False
            self._take(np.array(lines), sizes)
            if not self._trial:  # that of shares which are to be taken back may have begun meanwhile
                self._look(step, self._batch_size)
            self._stirred = False
        elif self._is_time_to_look(step):
            self.asks = True

    def _learn(self, n: int, seconds: float, told: Voice) -> None:
        now = _median(told.added, self._level)
        self._level += (now - self._level) / LEVEL_STEPS
        ratio = self._model.observe(n, seconds / math.exp(now), self._doubt.sudden)
        if ratio is not None:
            self._ratio *= ratio
            self._stirs = True

    def _take(self, rows: Array, sizes: Sequence[int]) -> None:
        """Of a part that several ranks compute the line of the one that is slowest with its share."""
        of_teams = rows[self._teams]
        n = np.array(sizes)[:, None]
        slowest = np.argmax(of_teams[..., 1] + of_teams[..., 2] * n, axis=1)
        self._told = of_teams[np.arange(len(of_teams)), slowest]
        changed = np.flatnonzero(self._column("known") * (self._column("ratio") != 1.0))
        self._changed = {int(part): float(self._column("ratio")[part]) for part in changed}

    def _column(self, name: str) -> Array:
        column: Array = self._told[:, _Row._fields.index(name)]
        return column

    # What is known

    @property
    def _has_changed(self) -> bool:
        return self._stirred or bool(self._changed)

    def _lines(self) -> Lines:
        """Of all; a part of which nothing is known is taken for an average one."""
        known = self._column("known") > 0
        if not known.any():
            return Lines.even(self.world_size)
        straight = [self._column(name) for name in ("overhead_seconds", "seconds_per_sample")]
        told = self._told[:, len(_Row._fields) :]
        pairs = [(told[:, 2 * at], told[:, 2 * at + 1]) for at in range(CLIFFS)]
        cliffs = tuple((np.where(sizes > 0, sizes, math.inf), least) for sizes, least in pairs if sizes.any())
        overhead, price = (np.where(known, each, np.median(each[known])) for each in straight)
        return Lines(overhead, price, cliffs)

    def _by_speed(self) -> DivisionOfMany:
        return DivisionOfMany(self._lines())

    def _tilted(self, step: int) -> DivisionOfMany:
        return DivisionOfMany(self._lines().tilted(step, self._policy.calibration_spread))

    def _equally(self) -> DivisionOfMany:
        return DivisionOfMany(Lines.even(self.world_size))

    def _judge(self, divided: Divides, old: Sequence[int], new: Sequence[int]) -> Judgement:
        """As :func:`~evener.balance.policy.judge`."""
        assert isinstance(divided, DivisionOfMany)
        was, becomes = np.array(old, dtype=np.float64), np.array(new, dtype=np.float64)
        before, after = divided.lines(was), divided.lines(becomes)
        slowest, gaining = int(np.argmax(before)), becomes > was
        errors = self._errors(becomes, after)[gaining].max(initial=0.0), self._errors(was, before)[slowest]
        error = math.sqrt(sum(float(each) ** 2 for each in errors))
        return Judgement(float(before.max()), float(after.max()), error / float(before.max()))

    def _errors(self, n: Array, seconds: Array) -> Array:
        level, slope = self._column("level_error"), self._column("slope_error") * (n - self._column("center"))
        known = np.where(self._column("known") > 0, np.sqrt(level**2 + slope**2), Shape.USUAL_ERROR * seconds)
        return np.where(n > 0, known, 0.0)

    def _seems_faster(self, rank: int) -> bool:
        return bool(self._column("seems_faster")[rank])

    # State

    def state_dict(self) -> dict[str, Any]:
        """The lines as they were last told: what each rank has seen since then, it alone knows."""
        return {"lines": self._told.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the lines, of as many parts as there are still, and learns anew from them."""
        told = np.array(state.get("lines", ()))[
            : self.world_size
        ]  # another balancer's state says nothing here
        self._know_nothing()
        self._restart()
        self._told[: len(told)] = told.reshape(-1, WIDTH)
        row = _Row(*self._told[self._own, : len(_Row._fields)])
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
        """Raises:
        ShareError: Always; a rank tells what it knows by :meth:`voice` and :meth:`line`.
        """
        raise ShareError("the ranks of this balancer know their own times alone: call hear, not observe")


def _cliffs(line: Line) -> list[float]:
    """The highest, in order of size; 0 where there are none."""
    highest = sorted(sorted(line.cliffs, key=lambda cliff: cliff[1])[-CLIFFS:])
    flat = [float(number) for cliff in highest for number in cliff]
    return [*flat, *[0.0] * (2 * CLIFFS - len(flat))]


def _median(counts: Sequence[float], level: float) -> float:
    """Of what is counted in bins the middle, to a bin's width; ``level`` where nothing is, and as one more vote if they
    are an even number. See :func:`~evener.balance.noise_model.common`."""
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
