"""Named axes over the ranks of a run, and the ``DataAxis``, which says how the ranks divide a batch.

Ranks are numbered along the axes, the last axis fastest. Example: 2 x 2 ranks, a model divided over the axis
``tensor``, and ``speaks={"tensor": 1}``::

                 tensor 0   tensor 1            part   team     speaks
    data 0       rank 0     rank 1              0      0 1      1
    data 1       rank 2     rank 3              1      2 3      3

The axes ``data`` and ``shard`` divide the samples of a batch. Ranks that differ only on other axes have the same
samples. They form a team, and the outputs and metrics of one of them, the speaker, count for the team. Along
``context`` each rank has a piece of every sample's terms: totals and counts are summed over one rank for each piece.
Shares, counts and evaluation do not depend on the axes. They need only the :class:`DataAxis`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from evener.core.config import strategy_names as short_names
from evener.distributed.hosts import connected, destroy
from evener.errors import ConfigurationError
from evener.torch_internals.process_groups import backends_of

AXES = short_names.AXES
"""The axes, ordered from least to most communication: neighbors on the last axis are the first to share a host."""
DIVIDING_SAMPLES = ("data", "shard")
DIVIDING_TERMS = (*DIVIDING_SAMPLES, "context")

T = TypeVar("T")


@dataclass(frozen=True)
class DataAxis:
    """Says which ranks compute which part of a batch. All ranks are global ranks."""

    index: int
    """The part that this rank computes, alone or with its team."""
    teams: tuple[tuple[int, ...], ...]
    """For each part, the ranks that compute it together."""
    speakers: tuple[int, ...]
    """For each part, the rank whose outputs and metrics count."""
    contributors: tuple[int, ...]
    """The ranks whose totals and counts sum to those of the batch: the speakers, or with an axis ``context`` one rank
    for each piece of each part."""

    @property
    def degree(self) -> int:
        """Number of parts of a batch."""
        return len(self.teams)

    @property
    def team(self) -> tuple[int, ...]:
        """The ranks that compute this rank's part."""
        return self.teams[self.index]

    @property
    def is_whole(self) -> bool:
        """True if every rank computes a part alone."""
        return all(len(team) == 1 for team in self.teams)

    def of_parts(self, rows: Sequence[T]) -> list[T]:
        """Selects from ``rows`` (one per rank) the rows of the speakers, one for each part."""
        return [rows[speaker] for speaker in self.speakers]

    def of_contributors(self, rows: Sequence[T]) -> list[T]:
        """Selects from ``rows`` (one per rank) those that must be summed."""
        return [rows[rank] for rank in self.contributors]

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Returns the time of each part: that of the slowest rank of its team, or NaN if any of them is NaN."""
        of_teams = [[seconds[rank] for rank in team] for team in self.teams]
        return [math.nan if any(map(math.isnan, each)) else max(each) for each in of_teams]

    def owners(self, values: Sequence[T]) -> list[T]:
        """Returns for every rank the value of its part. ``values`` has one value for each part."""
        of_rank = {rank: value for team, value in zip(self.teams, values, strict=True) for rank in team}
        return [of_rank[rank] for rank in sorted(of_rank)]


@dataclass(frozen=True)
class Layout:
    """Number of ranks along each axis.

    Args:
        degrees: Ranks per axis, at least 1 each. Omitted axes have one rank. The axes are ordered as in ``AXES``.
        speaks: For an axis, the index of the team's speaker, counted from the end if negative. By default the last on
            ``pipeline``, where the loss is, and the first on any other axis.

    Raises:
        ConfigurationError: For an unknown axis, a degree below 1, or an index that is out of range.
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
        """Returns the number of ranks along the axis."""
        return self.degrees.get(axis, 1)

    def place(self, rank: int) -> dict[str, int]:
        """Returns the rank's index on every axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.degree(axis))
        return place

    def slices(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Divides the ranks into groups whose members differ only on ``axes``. Ranks and groups are in order."""
        order = sorted(range(len(AXES)), key=lambda number: AXES[number] in axes)
        size = math.prod(self.degree(axis) for axis in AXES if axis in axes)
        return [tuple(ranks) for ranks in self._grid().transpose(order).reshape(-1, size).tolist()]

    def _grid(self) -> NDArray[np.int64]:
        """Returns the ranks in an array with a dimension for each axis, since a loop over 100,000 takes seconds."""
        return np.arange(self.world_size).reshape([self.degree(axis) for axis in AXES])

    def across_hosts(self, ranks_of_a_host: int) -> list[str]:
        """Returns those of the axes ``tensor`` and ``context`` (which communicate most) that have a group spread over
        several hosts although it would fit one host."""
        return [
            axis
            for axis in ("tensor", "context")
            if 1 < self.degree(axis) <= ranks_of_a_host
            and any(len({rank // ranks_of_a_host for rank in ranks}) > 1 for ranks in self.slices([axis]))
        ]

    def data_axis(self, rank: int) -> DataAxis:
        """Returns the `DataAxis` of ``rank``."""
        teams = self.slices([axis for axis in AXES if axis not in DIVIDING_SAMPLES])
        index = next(part for part, team in enumerate(teams) if rank in team)
        return DataAxis(index, tuple(teams), self._speakers(DIVIDING_SAMPLES), self._speakers(DIVIDING_TERMS))

    def _speakers(self, free: Sequence[str]) -> tuple[int, ...]:
        """Returns the ranks that have the speaker's index on all axes except the ``free`` ones."""
        chosen = tuple(slice(None) if axis in free else self._speaker(axis) for axis in AXES)
        return tuple(self._grid()[chosen].ravel().tolist())

    def _speaker(self, axis: str) -> int:
        return self.speaks.get(axis, -1 if axis == "pipeline" else 0) % self.degree(axis)


class Mesh:
    """This rank's place on the axes of a run, and the process groups along them.

    A process group is created when it is first asked for. All ranks of the world must ask for it together.

    Args:
        layout: The axes; its world size must be that of ``world``.
        rank: This rank.
        world: Process group of all ranks; None in a run of one rank.
        timeout_seconds: How long to wait for other ranks.
        group_timeout: Timeout of the process groups that are created.
        device_type: Type of the ranks' devices.
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
        """Returns the number of ranks along the axis."""
        return self.layout.degree(axis)

    def index(self, axis: str) -> int:
        """Returns this rank's index on the axis."""
        return self._place[axis]

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Returns the global ranks that differ from this one only on ``axes``, in order, including this one."""
        return next(ranks for ranks in self.layout.slices(axes) if self.rank in ranks)

    def group(self, *axes: str, use: str = "") -> dist.ProcessGroup | None:
        """Returns the process group of :meth:`ranks`. Returns None if this rank is alone there.

        All ranks of the world must make the first call for the same arguments together.

        Args:
            use: Name of a separate group over the same ranks. Callers with the same name share it, and its messages
                cannot be mixed up with those of other groups.
        """
        key = use, frozenset(axis for axis in axes if self.degree(axis) > 1)
        if key not in self._groups:
            whole = math.prod(map(self.degree, key[1])) == self.layout.world_size
            self._groups[key] = self.world if whole and not use else self.new_group(*sorted(key[1]))
        return self._groups[key]

    def new_group(self, *axes: str) -> dist.ProcessGroup | None:
        """Creates a new process group of :meth:`ranks`. All ranks of the world must call this together."""
        if self.world is None or math.prod(map(self.degree, axes)) == 1:
            return None
        if "nccl" in backends_of(self.world):
            torch.cuda.synchronize()  # NCCL splits off a communicator on which nothing is outstanding
        mine = None
        for ranks in self.layout.slices(axes):
            made = dist.new_group(list(ranks), timeout=self._group_timeout)
            if self.rank in ranks:
                mine = made
        assert isinstance(mine, dist.ProcessGroup)
        self._owned.callback(destroy, mine)
        return connected(mine)

    def close_with_mesh(self, close: Callable[[], None]) -> None:
        """Registers ``close`` to be called when the mesh is closed, before any group created earlier is destroyed."""
        self._owned.callback(close)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Returns PyTorch's ``DeviceMesh`` of the axes with more than one rank, over the same process groups."""
        axes = [axis for axis in AXES if self.degree(axis) > 1] or ["data"]
        shape = [self.degree(axis) for axis in axes]
        groups = [group for axis in axes if (group := self.group(axis)) is not None]
        ranks = torch.arange(self.layout.world_size).view(shape)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(axes))
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))

    def close(self) -> None:
        """Destroys the created groups and calls what `close_with_mesh` registered, in reverse order."""
        self._groups.clear()
        self._owned.close()
