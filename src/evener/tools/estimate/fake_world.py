"""Runs one rank of a job whose other ranks do not exist: its session, and the answers of the other ranks.

When ranks exchange numbers or objects of the host, this rank gets its own values back as those of all others: in an
estimate all ranks would send the same. Sums leave a tensor as it is. So the strategies' own code runs, and makes all
its buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store

from evener.collectives.base import AllReduce, Done, Work
from evener.collectives.reduce_scatter import NativeOwners, Pending, RangeOwners
from evener.collectives.registry import SUBSTITUTES, Substitute
from evener.collectives.shared_memory.all_reduce import shared_nbytes
from evener.collectives.shared_memory.reduce_scatter import ROOMS, SHARED_NBYTES, rooms_nbytes
from evener.data.prefetch import DELIVERIES, NoTransfer
from evener.distributed.control_channel import Channel, LocalChannel, Rows
from evener.distributed.control_channel import Pending as Exchange
from evener.distributed.environment import Environment
from evener.distributed.session import Session
from evener.distributed.watchdog.watchdog import Watchdog
from evener.errors import ConfigurationError
from evener.hardware.async_copy import SENDERS, by_copy
from evener.hardware.async_read import READERS
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import BUCKETS, UNCOUNTED
from evener.hardware.timers import STOPWATCHES, HostStopwatch
from evener.nn import rng as drawing
from evener.strategies import base
from evener.strategies.context import context
from evener.strategies.pipeline.p2p import LINES
from evener.strategies.sharded.exchange_order import Turns
from evener.tools.estimate.fake_p2p import PostOffice
from evener.tools.estimate.traffic import Traffic
from evener.tools.estimate.unknown import UnknownMemoryError
from evener.torch_internals.process_groups import FAKE_BACKEND, open_fake_group


class World:
    """A job of which only one rank exists.

    Args:
        device: Device of this rank's fake tensors.
        mail: Messages between pipeline stages so far.
        traffic: Gets the messages of this rank.
        on_host: Whether the run would be on the CPU, where ranks of a host sum in shared memory.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        mail: PostOffice,
        traffic: Traffic,
        on_host: bool,
    ) -> None:
        self.rank, self.world_size, self.device, self.mail = rank, world_size, device, mail
        self.traffic, self.on_host = traffic, on_host
        self.shared_nbytes = 0
        """Bytes of shared memory that this rank would allocate."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Opens this rank's session. Inside, fakes replace all that depends on the kind of device or process group."""
        if dist.is_initialized():
            raise ConfigurationError(
                "memory is estimated in a process that belongs to no process group; this one is rank "
                f"{dist.get_rank()} of {dist.get_world_size()}: estimate before the ranks are started"
            )
        kind = self.device.type
        with ExitStack() as stack:
            if self.world_size > 1:
                # A group puts its rank before errors.
                stack.callback(setattr, sys, "excepthook", sys.excepthook)
                open_fake_group(self.rank, self.world_size)
                stack.callback(dist.destroy_process_group)
            registries: list[tuple[dict[str, Any], str, Any]] = [
                (READERS, kind, Unread),
                (SENDERS, kind, by_copy),
                (STOPWATCHES, kind, HostStopwatch),
                (DELIVERIES, kind, lambda device, convert, ahead: NoTransfer(convert)),
                (SUBSTITUTES, FAKE_BACKEND, Substitute(self._all_reduce, self._owners)),
                (LINES, FAKE_BACKEND, partial(self.mail.line, traffic=self.traffic)),
            ]
            for registry, key, entry in registries:
                stack.enter_context(mock.patch.dict(registry, {key: entry}))
            for owner, name, replacement in _PATCHES:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield stack.enter_context(PretendedSession(self))

    def _all_reduce(self, name: str | None, group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
        if name not in (None, "native", "shared-memory") and (name != "auto" or self.on_host):
            raise UnknownMemoryError(
                f"what all-reduce {name!r} holds is not known before the run: estimate with allreduce=native, or leave "
                "it out"
            )
        if self.on_host and name != "native":
            self.shared_nbytes += shared_nbytes(group.size())
        return FakeInPlaceSum(group, timeout_seconds, self.traffic)

    def _owners(self, name: str | None, group: dist.ProcessGroup, timeout_seconds: float) -> RangeOwners:
        if self.on_host and name != "native":
            self._share(SHARED_NBYTES)
            return InTheirPlace(group, self._share, self.traffic)
        return NativeOwners(group)

    def _share(self, nbytes: int) -> None:
        self.shared_nbytes += nbytes


def _all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
    found[:] = [value] * len(found)


def _broadcast_object_list(values: list[Any], *_: Any, **__: Any) -> None:
    pass


_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (dist, "all_gather_object", _all_gather_object),
    (dist, "broadcast_object_list", _broadcast_object_list),
    # These functions read values of tensors, but memory does not depend on them.
    (Turns, "compare", lambda *_: None),
    (drawing, "common_seed", lambda: 0),
    (context, "check_likeness", lambda *_: None),
    (base, "check_room", lambda *_: None),  # the memory of this machine does not matter
)


class Unread:
    """Stands in for an asynchronous read of values: always returns 1, which is finite."""

    def __init__(self, numbers: float | Tensor) -> None:
        self.tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)

    def value(self) -> float:
        return 1.0

    def values(self) -> list[float]:
        return [1.0] * self.tensor.numel()


class FakeInPlaceSum(AllReduce):
    """An all-reduce that does nothing. It allocates nothing, as shared memory, gloo and NCCL sum in place."""

    name = "native"

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float, traffic: Traffic) -> None:
        super().__init__(group, timeout_seconds)
        self._group_of_traffic, self._traffic = group, traffic

    def start(self, tensor: Tensor) -> Work:
        self._traffic.add_of_group("all_reduce", self._group_of_traffic, tensor.nbytes)
        return Done(tensor)


class InTheirPlace(RangeOwners):
    """Stands in for the reduce-scatter through shared memory.

    Args:
        share: Called with the number of bytes of shared memory that the ranks would allocate.
        traffic: Gets the messages.
    """

    words = "shared-memory"

    def __init__(self, group: dist.ProcessGroup, share: Callable[[int], None], traffic: Traffic) -> None:
        self._rank, self._share, self._room_nbytes = group.rank(), share, 0
        self._group, self._traffic = group, traffic

    def prepare(self, nbytes: int) -> None:
        self._room_nbytes = rooms_nbytes(nbytes)
        self._share(self._room_nbytes)

    def room(self, like: Tensor, count: int) -> Tensor:
        with made_as(UNCOUNTED if ROOMS * like.element_size() * count <= self._room_nbytes else BUCKETS):
            return like.new_empty(count)

    def summed(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        self._traffic.add_of_group("reduce_scatter", self._group, flat.nbytes)
        own = flat.new_empty(sizes[self._rank])
        return lambda: own

    def gather(self, flat: Tensor, sizes: Sequence[int]) -> None:
        self._traffic.add_of_group("all_gather", self._group, flat.nbytes)


class Echo(LocalChannel):
    """A control channel that returns this rank's values as those of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def exchange(self, values: Sequence[float]) -> Rows:
        """Returns a completed exchange, in which every rank sent the same values as this one."""
        rows = [[float(value) for value in values] for _ in range(self._world_size)]
        return Exchange(lambda: rows)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self._world_size

    def gather_to(self, value: Any, rank: int) -> list[Any] | None:
        return [value] * self._world_size


class PretendedSession(Session):
    """The session of one rank without the other ranks."""

    def __init__(self, world: World) -> None:
        place = Environment(world.rank, world.world_size, world.rank, world.world_size)
        super().__init__(world.device.type, environment=place)
        self._pretended = world

    def _take_device(self) -> torch.device:
        return self._pretended.device

    def _open_store(self) -> Store:
        return HashStore()

    def _enter_watchdog(self, stack: ExitStack, store: Store) -> Watchdog:
        return Watchdog(self.rank, self.world_size, store)  # never started: no other rank can be late

    def _enter_control(self, stack: ExitStack) -> Channel:
        return Echo(self.world_size)
