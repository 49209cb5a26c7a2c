"""Emulates unequal devices on a machine with equal ones: ranks sleep in proportion to their own compute time.

A rank at half its speed computes, then sleeps as long as it computed. This shows how load balancing converges and how a
run reacts to a slowdown. It says nothing about the memory or the kernels of a real slower device, whose times are not
proportional everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from evener.errors import ConfigurationError


class Change(NamedTuple):
    """A change of speed: from ``step`` on, ``rank`` runs at the fraction ``factor`` of its own speed."""

    step: int
    rank: int
    factor: float


@dataclass(frozen=True)
class Throttle:
    """Fractions of their own speed at which the ranks run. Raises ConfigurationError for invalid values."""

    factors: tuple[float, ...]
    """By rank, above 0 and at most 1 (full speed)."""
    changes: tuple[Change, ...] = field(default=())
    """Changes in any order. Of two for the same rank and step, the later in the list applies."""

    def __post_init__(self) -> None:
        for rank, factor in enumerate(self.factors):
            _check_factor(rank, factor)
        for step, rank, factor in self.changes:
            _check_factor(rank, factor)
            if step < 0 or not 0 <= rank < len(self.factors):
                raise ConfigurationError(
                    f"throttle change at step {step} of rank {rank}: steps start at 0, and there are "
                    f"{len(self.factors)} ranks, from 0"
                )
        object.__setattr__(self, "changes", tuple(sorted(self.changes, key=lambda change: change.step)))

    @classmethod
    def parse(cls, text: str | None, changes: Sequence[str], world_size: int) -> Throttle:
        """Parses factors such as ``"1,0.5,0.25"`` (one per rank; None: all 1) and changes ``"STEP:RANK:FACTOR"``."""
        factors = (1.0,) * world_size if text is None else _parse_factors(text)
        if len(factors) != world_size:
            raise ConfigurationError(
                f"--throttle {text} has {len(factors)} factors for {world_size} ranks: give one for each rank"
            )
        return cls(factors, tuple(_parse_change(change) for change in changes))

    @property
    def words(self) -> str:
        """Warning, to be shown with every figure of a throttled run, that the speeds are emulated."""
        factors = ", ".join(f"{factor:g}" for factor in self.factors)
        changes = "".join(
            f"; rank {rank} at {factor:g} from step {step}" for step, rank, factor in self.changes
        )
        return f"EMULATION of unequal devices by sleeping: ranks run at {factors} of their speed{changes}"

    def factor(self, step: int, rank: int) -> float:
        """Returns the fraction of its speed at which ``rank`` runs in ``step``."""
        factor = self.factors[rank]
        for change in self.changes:
            if change.rank == rank and change.step <= step:
                factor = change.factor
        return factor

    def sleep_seconds(self, step: int, rank: int, compute_seconds: float) -> float:
        """Returns how long ``rank`` sleeps after computing for ``compute_seconds``: ``t * (1 / factor - 1)``."""
        return compute_seconds * (1.0 / self.factor(step, rank) - 1.0)


def _check_factor(rank: int, factor: float) -> None:
    if not (math.isfinite(factor) and 0 < factor <= 1):
        raise ConfigurationError(
            f"rank {rank} cannot run at {factor} of its speed: throttle factors are above 0 and at most 1"
        )


def _parse_factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(
            f"--throttle {text!r}: write one factor for each rank, such as 1,0.5"
        ) from None


def _parse_change(text: str) -> Change:
    try:
        step, rank, factor = text.split(":")
        return Change(int(step), int(rank), float(factor))
    except ValueError:
        raise ConfigurationError(
            f"--throttle-at {text!r}: write STEP:RANK:FACTOR, such as 100:1:0.5"
        ) from None
