"""Decided divisions of batches, as data: a ``Rule`` says how batches are divided from a step on.

In a trial two divisions take turns, so that their steps can be compared with each other::

    step        e    e+1  e+2  e+3  e+4  e+5 ...
    division    new  old  old  new  new  old

Each comes before the other as often as after it, so a steady drift of the machine's speed favours neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

from evener.balance.shares import solve
from evener.balance.time_model import Line

MaxShares = Sequence[int | None]


class Divides(Protocol):
    """Interface of a division: divides batches of any size."""

    def __call__(
        self, batch_size: int, max_shares: MaxShares, share_multiple_of: int, placeholder: int = 0
    ) -> list[int]:
        """Returns the shares of all ranks. Raises ShareError if the batch exceeds the limits.

        Args:
            batch_size: Sum of the shares.
            max_shares: The most samples of each rank, None for no limit.
            share_multiple_of: Shares are multiples of it, except the one share that holds the remainder of the batch.
            placeholder: Samples that a rank without a share computes all the same. A smaller share saves no time, so
                each rank gets this many if the batch has enough.
        """

    def near(self, shares: Sequence[int]) -> Divides:
        """Returns a division by the same lines that leaves each rank at least `LEAST_PART` of its share in ``shares``,
        except shares of up to `CERTAIN` samples."""

    def seconds(self, rank: int, n: int) -> float:
        """Returns the predicted seconds of ``rank`` for ``n`` samples."""

    def slowest(self, shares: Sequence[int]) -> float:
        """Returns the predicted seconds of the slowest rank with these shares."""

    def values(self) -> list[Any]:
        """Returns the division as values that JSON can hold."""


LEAST_PART = 0.25
"""A change leaves each rank at least this fraction of its share: a line is not trusted far from measured sizes."""
CERTAIN = 6
"""Shares of up to this many samples may become 0 at once, because little remains to be measured below them."""


@dataclass(frozen=True)
class Division:
    """Divides batches by the ranks' lines."""

    lines: tuple[Line, ...]
    floors: tuple[float, ...] = ()
    """The least fraction of the batch for each rank; empty: 0 for all."""

    def __call__(
        self, batch_size: int, max_shares: MaxShares, share_multiple_of: int, placeholder: int = 0
    ) -> list[int]:
        """Implements :class:`Divides`."""
        return solve(
            self._times(batch_size, share_multiple_of, placeholder), batch_size, max_shares, share_multiple_of
        )

    def _times(
        self, batch_size: int, share_multiple_of: int, placeholder: int
    ) -> list[Callable[[int], float]]:
        floors = self.floors or (0.0,) * len(self.lines)
        free = placeholder if batch_size >= placeholder * len(self.lines) else 0
        least = [
            max(free, int(floor * batch_size) // share_multiple_of * share_multiple_of) for floor in floors
        ]
        return [_free_up_to(line, n) for line, n in zip(self.lines, least, strict=True)]

    def values(self) -> list[Any]:
        return [[list(astuple(line)) for line in self.lines], list(self.floors)]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Division:
        lines, floors = values
        return cls(tuple(Line.from_values(line) for line in lines), tuple(floors))

    def near(self, shares: Sequence[int]) -> Division:
        total = max(1, sum(shares))
        least = [LEAST_PART * n / total if n > CERTAIN else 0.0 for n in shares]
        return Division(self.lines, tuple(least) if any(least) else ())

    def seconds(self, rank: int, n: int) -> float:
        return self.lines[rank](n)

    def slowest(self, shares: Sequence[int]) -> float:
        return max(line(n) for line, n in zip(self.lines, shares, strict=True))


def _free_up_to(line: Line, least: int) -> Callable[[int], float]:
    return (lambda n: 0.0 if n <= least else line(n)) if least else line


@dataclass
class Rule:
    """Says how batches of any size are divided from step ``effective`` on."""

    effective: int
    division: Divides
    challenger: Divides | None = None
    """In a trial, the division that takes turns with ``division``; it has the first turn."""
    probe: int | None = None
    """An idle rank that gets one multiple nevertheless, taken from the rank with the largest share."""
    solved: dict[tuple[bool, int], list[int]] = field(default_factory=dict, repr=False)

    def values(self) -> list[Any]:
        """Returns the rule as values that JSON can hold."""
        challenger = self.challenger and self.challenger.values()
        return [self.effective, self.division.values(), challenger, self.probe]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Rule:
        effective, division, challenger, probe = values
        tried = Division.from_values(challenger) if challenger else None
        return cls(effective, Division.from_values(division), tried, probe)

    def challenges(self, step: int) -> bool:
        """Returns True if ``step`` is the challenger's turn."""
        return self.challenger is not None and (step - self.effective) % 4 in (0, 3)

    def divide(
        self, step: int, batch_size: int, max_shares: MaxShares, share_multiple_of: int, placeholder: int = 0
    ) -> list[int]:
        """Returns the shares of ``step``. Other arguments: see `Divides`. Each batch size is solved only once."""
        key = self.challenges(step), batch_size
        if key not in self.solved:
            self.solved[key] = self._solve(*key, max_shares, share_multiple_of, placeholder)
        return list(self.solved[key])

    def _solve(
        self,
        challenges: bool,
        batch_size: int,
        max_shares: MaxShares,
        share_multiple_of: int,
        placeholder: int,
    ) -> list[int]:
        division = self.challenger if challenges and self.challenger else self.division
        shares = division(batch_size, max_shares, share_multiple_of, placeholder)
        if self.probe is None or shares[self.probe]:
            return shares
        donor = max(range(len(shares)), key=shares.__getitem__)
        if shares[donor] >= 2 * share_multiple_of:
            shares[donor] -= share_multiple_of
            shares[self.probe] += share_multiple_of
        return shares


def tilted(lines: Sequence[Line], step: int, spread: float) -> Division:
    """Returns a division by ``lines`` in which odd and even ranks take larger and smaller shares, in turn."""
    return Division(
        tuple(
            line.scaled(1.0 / (1.0 + spread if (rank + step) % 2 else 1.0 - spread))
            for rank, line in enumerate(lines)
        )
    )
