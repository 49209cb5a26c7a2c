"""Named axes over the ranks of a run, and what of them the division of a batch has to know.

Ranks are numbered along the axes, the last axis fastest. On 2 x 2 ranks, with a model divided over the axis ``tensor``
whose second rank speaks::

                 tensor 0   tensor 1            part   team     speaks
    data 0       rank 0     rank 1              0      0 1      1
    data 1       rank 2     rank 3              1      2 3      3

The axes ``data`` and ``shard`` divide the samples of a batch. Ranks that differ on other axes alone have the same
samples, as a team, for which one of them speaks. Along ``context`` each has a piece of every sample's terms, and one
rank speaks for each piece: totals and counts are added up over the pieces. Shares, counts and evaluation know nothing
of axes: all that they need is the :class:`DataAxis`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evener.core.config import strategy_names as short_names
from evener.distributed.hosts import connected, destroy
from evener.errors import ConfigurationError

AXES = short_names.AXES
"""From the axis whose messages are fewest to the one whose are most: neighbors on the last share a host first."""
DIVIDING_SAMPLES = ("data", "shard")
DIVIDING_TERMS = (*DIVIDING_SAMPLES, "context")

T = TypeVar("T")


@dataclass(frozen=True)
class DataAxis:
    """Who computes which part of a batch. Ranks are those of the world."""

    index: int
    """The part that this rank computes, alone or in a team."""
    teams: tuple[tuple[int, ...], ...]
    """For each part, the ranks that compute it together."""
    speakers: tuple[int, ...]
    """For each part, the rank whose outputs and metrics count."""
    contributors: tuple[int, ...]
    """The ranks whose totals and counts add up to those of the batch: the speakers, or where the terms of a sample are
    divided too, those who speak for a piece of it."""

    @property
    def degree(self) -> int:
        """How many parts a batch has."""
        return len(self.teams)

    @property
    def team(self) -> tuple[int, ...]:
        """The ranks that compute this rank's part."""
        return self.teams[self.index]

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes a part of its own."""
        return all(len(team) == 1 for team in self.teams)

    def of_parts(self, rows: Sequence[T]) -> list[T]:
        """What the speaker of each part said, of what all ranks said."""
        return [rows[speaker] for speaker in self.speakers]

    def of_contributors(self, rows: Sequence[T]) -> list[T]:
        """What is to be added up, of what all ranks said."""
        return [rows[rank] for rank in self.contributors]

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The time of each part, that of the slowest of its team; NaN if that of one is."""
        of_teams = [[seconds[rank] for rank in team] for team in self.teams]
        return [math.nan if any(map(math.isnan, each)) else max(each) for each in of_teams]

    def owners(self, values: Sequence[T]) -> list[T]:
        """For every rank, the value of its part."""
        of_rank = {rank: value for team, value in zip(self.teams, values, strict=True) for rank in team}
        return [of_rank[rank] for rank in sorted(of_rank)]


@dataclass(frozen=True)
class Layout:
    """How many ranks there are along each axis.

    Args:
        degrees: At least 1 each; axes that are left out have one rank. Their order is that of ``AXES``.
        speaks: The index on an axis whose rank speaks for its team, counted from the end if negative. By default the
            last on ``pipeline``, where the loss is, and the first on any other.

    Raises:
        ConfigurationError: For an axis that there is not, a degree below 1 or an index beyond a degree.
    """

    degrees: Mapping[str, int]
    speaks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        short_names.check_axes((*self.degrees, *self.speaks))
        wrong = [axis for axis, degree in self.degrees.items() if degree < 1]
        if wrong:
            raise ConfigurationError(
                f"axis {wrong[0]!r} has the degree {self.degrees[wrong[0]]}; it must be at least 1"
            )
        for axis, index in self.speaks.items():
            if not -self.degree(axis) <= index < self.degree(axis):
                raise ConfigurationError(
                    f"rank {index} of axis {axis!r} cannot speak: it has {self.degree(axis)}"
                )

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    def degree(self, axis: str) -> int:
        """Ranks along the axis."""
        return self.degrees.get(axis, 1)

    def place(self, rank: int) -> dict[str, int]:
        """The rank's index on every axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.degree(axis))
        return place

    def slices(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """The ranks divided into those that differ on ``axes`` alone, in order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.place(rank)
            found.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def across_hosts(self, ranks_of_a_host: int) -> list[str]:
        """The busy axes, ``tensor`` and ``context``, of whose groups some have ranks on several hosts that could do
        with one."""
        return [
            axis
            for axis in ("tensor", "context")
            if 1 < self.degree(axis) <= ranks_of_a_host
            and any(len({rank // ranks_of_a_host for rank in ranks}) > 1 for ranks in self.slices([axis]))
        ]

    def data_axis(self, rank: int) -> DataAxis:
        """Who computes which part of a batch, as ``rank`` sees it."""
        teams = self.slices([axis for axis in AXES if axis not in DIVIDING_SAMPLES])
        index = next(part for part, team in enumerate(teams) if rank in team)
        speakers = tuple(next(r for r in team if self._speaks(r, DIVIDING_SAMPLES)) for team in teams)
        contributors = tuple(r for r in range(self.world_size) if self._speaks(r, DIVIDING_TERMS))
        return DataAxis(index, tuple(teams), speakers, contributors)

    def _speaks(self, rank: int, free: Sequence[str]) -> bool:
        """Whether the rank stands where it speaks on all axes but the ``free`` ones."""
        place = self.place(rank)
        return all(place[axis] == self._speaker(axis) for axis in AXES if axis not in free)

    def _speaker(self, axis: str) -> int:
        return self.speaks.get(axis, -1 if axis == "pipeline" else 0) % self.degree(axis)


class Mesh:
    """The axes of a run as this rank sees them, with the process groups along them.

    Groups are made when they are first asked for, by all ranks of the world together.

    Args:
        layout: The axes; as many ranks as the world has.
        rank: This rank.
        world: The group of all ranks; None for one rank alone.
        timeout_seconds: How long to wait for a rank.
        group_timeout: Of the groups that are made.
        device_type: Of the ranks' devices.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        world: dist.ProcessGroup | None,
        timeout_seconds: float,
        group_timeout: timedelta,
        device_type: str = "cpu",
    ) -> None:
        self.layout, self.rank, self.world = layout, rank, world
        self.device_type = device_type
        self.timeout_seconds = timeout_seconds
        self.data = layout.data_axis(rank)
        self._group_timeout = group_timeout
        self._owned = ExitStack()
        self._place = layout.place(rank)
        self._groups: dict[tuple[str, frozenset[str]], dist.ProcessGroup | None] = {}

    def degree(self, axis: str) -> int:
        """Ranks along the axis."""
        return self.layout.degree(axis)

    def index(self, axis: str) -> int:
        """This rank's place on the axis."""
        return self._place[axis]

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """The ranks of the world that differ from this one on ``axes`` alone, in order; this one among them."""
        return next(ranks for ranks in self.layout.slices(axes) if self.rank in ranks)

    def group(self, *axes: str, use: str = "") -> dist.ProcessGroup | None:
        """The group of :meth:`ranks`; None where that is this rank alone.

        Args:
            use: Those who name one share a group of its own, whose messages never meet those of another.
        """
        key = use, frozenset(axis for axis in axes if self.degree(axis) > 1)
        if key not in self._groups:
            whole = math.prod(map(self.degree, key[1])) == self.layout.world_size
            self._groups[key] = self.world if whole and not use else self.new_group(*sorted(key[1]))
        return self._groups[key]

    def new_group(self, *axes: str) -> dist.ProcessGroup | None:
        """As :meth:`group`, but a group of its own, whose messages never meet those of another."""
        if self.world is None or math.prod(map(self.degree, axes)) == 1:
            return None
        mine = None
        for ranks in self.layout.slices(axes):
            made = dist.new_group(list(ranks), timeout=self._group_timeout)
            if self.rank in ranks:
                mine = made
        assert isinstance(mine, dist.ProcessGroup)
        self._owned.callback(destroy, mine)
        return connected(mine)

    def own(self, close: Callable[[], None]) -> None:
        """Has ``close`` called when the mesh is closed, before the groups that were made earlier are."""
        self._owned.callback(close)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The axes of more than one rank as PyTorch's own mesh, over the same groups."""
        axes = [axis for axis in AXES if self.degree(axis) > 1] or ["data"]
        shape = [self.degree(axis) for axis in axes]
        groups = [group for axis in axes if (group := self.group(axis)) is not None]
        ranks = torch.arange(self.layout.world_size).view(shape)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(axes))
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))

    def close(self) -> None:
        """Gives back the groups that were made, and what stands on them."""
        self._groups.clear()
        self._owned.close()
