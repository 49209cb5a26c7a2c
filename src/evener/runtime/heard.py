"""Messages of which only some ranks' are heard, though all take part.

Ranks that compute the same samples together all know the same sums. Adding them up over all ranks would count each
sample once a rank; so of each such team one rank is heard, and whoever adds need not know of teams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from evener.runtime.channel import Pending


class Exchange(Protocol):
    """What tells all ranks a few numbers."""

    def exchange(self, values: Sequence[float]) -> Pending:
        """Starts telling all ranks ``values``, as many on every rank."""


class Heard:
    """An exchange of all ranks that answers with the values of ``ranks`` alone, in their order."""

    def __init__(self, channel: Exchange, ranks: Sequence[int]) -> None:
        self._channel, self._ranks = channel, ranks

    def exchange(self, values: Sequence[float]) -> Pending:
        return _Chosen(self._channel.exchange(values), self._ranks)


class _Chosen(Pending):
    def __init__(self, pending: Pending, ranks: Sequence[int]) -> None:
        self._pending, self._ranks = pending, ranks

    def wait(self) -> list[list[float]]:
        rows = self._pending.wait()
        return [rows[rank] for rank in self._ranks]


def heard(channel: Exchange, ranks: Sequence[int], world_size: int) -> Exchange:
    """``channel``, of which only ``ranks`` are heard."""
    return channel if len(ranks) == world_size else Heard(channel, ranks)
