"""One rank of a world that is not there: its session, and what it hears from the others.

What ranks tell each other with numbers and objects of the host comes back as if all had said what this one says, which
in an estimate they would. Sums leave a tensor as it is. So the strategies' own code runs, to the last buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store

from evener.collectives.base import AllReduce, Done, Work
from evener.collectives.reduce_scatter import NativeOwners, Owners, Pending
from evener.collectives.registry import SUBSTITUTES, Substitute
from evener.collectives.shared_memory.all_reduce import shared_nbytes
from evener.collectives.shared_memory.reduce_scatter import ROOMS, SHARED_NBYTES, rooms_nbytes
from evener.data.prefetch import DELIVERIES, Stay
from evener.distributed.control_channel import Channel, LocalChannel
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
from evener.strategies.context import context
from evener.strategies.pipeline.p2p import LINES
from evener.strategies.sharded.exchange_order import Turns
from evener.tools.estimate.fake_p2p import PostOffice
from evener.torch_internals.fake_group import BACKEND, open_fake_group


class World:
    """Ranks of which one is here.

    Args:
        device: Of the tensors that this rank pretends to have.
        mail: What the ranks of a pipeline have sent each other so far.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, mail: PostOffice) -> None:
        self.rank, self.world_size, self.device, self.mail = rank, world_size, device, mail
        self.shared_nbytes = 0
        """Shared memory that this rank would make, in bytes."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        """This rank's, with what depends on the kind of device or group in place."""
        if dist.is_initialized():
            raise ConfigurationError(
                "memory is estimated in a process that belongs to no process group; this one is rank "
                f"{dist.get_rank()} of {dist.get_world_size()}: estimate before the ranks are started"
            )
        kind = self.device.type
        with ExitStack() as stack:
            if self.world_size > 1:
                open_fake_group(self.rank, self.world_size)
                stack.callback(dist.destroy_process_group)
            registries: list[tuple[dict[str, Any], str, Any]] = [
                (READERS, kind, Unread),
                (SENDERS, kind, by_copy),
                (STOPWATCHES, kind, HostStopwatch),
                (DELIVERIES, kind, lambda device: Stay()),
                (SUBSTITUTES, BACKEND, Substitute(self._all_reduce, self._owners)),
                (LINES, BACKEND, self.mail.line),
            ]
            for registry, key, entry in registries:
                stack.enter_context(mock.patch.dict(registry, {key: entry}))
            for owner, name, replacement in _PATCHES:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield stack.enter_context(PretendedSession(self))

    def _all_reduce(self, name: str | None, group: dist.ProcessGroup, timeout_seconds: float) -> AllReduce:
        on_host = self.device.type == "cpu"
        if name not in (None, "native", "shared-memory") and (name != "auto" or on_host):
            raise ConfigurationError(
                f"what all-reduce {name!r} holds is not known before the run: estimate with allreduce=native, or leave "
                "it out"
            )
        if on_host and name != "native":
            self.shared_nbytes += shared_nbytes(group.size())
        return InPlace(group, timeout_seconds)

    def _owners(self, name: str | None, group: dist.ProcessGroup, timeout_seconds: float) -> Owners:
        if self.device.type == "cpu" and name != "native":
            self._share(SHARED_NBYTES)
            return InTheirPlace(group, self._share)
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
    # Numbers that are read, and on which no memory depends.
    (Turns, "compare", lambda *_: None),
    (drawing, "common_seed", lambda: 0),
    (context, "check_likeness", lambda *_: None),
)


class Unread:
    """Numbers that nobody reads: of no interest to memory, and sound."""

    def __init__(self, numbers: float | Tensor) -> None:
        self.tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)

    def value(self) -> float:
        return 1.0

    def values(self) -> list[float]:
        return [1.0] * self.tensor.numel()


class InPlace(AllReduce):
    """A sum that makes no tensor, as that through shared memory, and those of gloo and NCCL."""

    name = "native"

    def start(self, tensor: Tensor) -> Work:
        return Done(tensor)


class InTheirPlace(Owners):
    """The sums to owners through shared memory.

    Args:
        share: Told how many bytes of it the ranks make.
    """

    words = "shared-memory"

    def __init__(self, group: dist.ProcessGroup, share: Callable[[int], None]) -> None:
        self._rank, self._share, self._room_nbytes = group.rank(), share, 0

    def prepare(self, nbytes: int) -> None:
        self._room_nbytes = rooms_nbytes(nbytes)
        self._share(self._room_nbytes)

    def room(self, like: Tensor, count: int) -> Tensor:
        with made_as(UNCOUNTED if ROOMS * like.element_size() * count <= self._room_nbytes else BUCKETS):
            return like.new_empty(count)

    def summed(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        own = flat.new_empty(sizes[self._rank])
        return lambda: own

    def gather(self, flat: Tensor, sizes: Sequence[int]) -> None:
        pass


class Said(Exchange):
    """What every rank said, which is what this one did."""

    def __init__(self, rows: list[list[float]]) -> None:
        self._rows = rows

    def wait(self) -> list[list[float]]:
        return self._rows


class Echo(LocalChannel):
    """All ranks say what this one says."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def exchange(self, values: Sequence[float]) -> Exchange:
        return Said([[float(value) for value in values] for _ in range(self._world_size)])

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self._world_size

    def gather_to(self, value: Any, rank: int) -> list[Any] | None:
        return [value] * self._world_size


class PretendedSession(Session):
    """A session of one rank, in which it is alone."""

    def __init__(self, world: World) -> None:
        place = Environment(world.rank, world.world_size, world.rank, world.world_size)
        super().__init__(world.device.type, environment=place)
        self._pretended = world

    def _take_device(self) -> torch.device:
        return self._pretended.device

    def _open_store(self) -> Store:
        return HashStore()

    def _enter_watchdog(self, stack: ExitStack, store: Store) -> Watchdog:
        return Watchdog(self.rank, self.world_size, store)  # never started: nobody is late

    def _enter_control(self, stack: ExitStack) -> Channel:
        return Echo(self.world_size)
