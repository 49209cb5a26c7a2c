"""Point-to-point messages between the ranks of a pipeline. A send does not wait for its receiver.

Messages from one rank to another keep their order: they are received in the order in which they were sent, and kept if
they came too early.

On a device a rank's messages in one process group are one queue, since NCCL takes each for a collective. There a send
that waits for its receiver holds up all that comes after it. With two stages on each of three ranks, ``zero-bubble``
would have all ranks wait for each other. So the messages of each neighbour and direction have a group of their own.
"""

from __future__ import annotations

import io
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.message_types import sendable
from evener.core.phase_marks import marked
from evener.distributed.mesh import Mesh
from evener.hardware.timers import waiting

_PINGS = 8


def lane_of(source: int, target: int, ranks: int) -> tuple[bool, int]:
    """Returns the lane of the messages from one of ``ranks`` in a ring to a neighbour: no rank has messages of two
    neighbours, or of both directions, in one lane.

    A lane is a direction around the ring and a colour, by which the pairs of neighbours that share a rank differ: two
    colours are enough for an even number of ranks, and three for an odd one.
    """
    ahead = target == (source + 1) % ranks
    first = source if ahead else target
    return ahead, 2 if ranks % 2 and first == ranks - 1 else first % 2


class P2PChannel:
    """Messages between neighbours in the ring of ranks along one axis of a mesh. These ranks must create it
    together."""

    def __init__(self, mesh: Mesh, axis: str, device: torch.device) -> None:
        self._index, self._degree, self._device = mesh.index(axis), mesh.degree(axis), device
        ring = [(rank, (rank + 1) % self._degree) for rank in range(self._degree)]
        both_ways = [(*pair, self._degree) for one in ring for pair in (one, one[::-1])]
        self._groups = {lane: mesh.new_group(axis) for lane in sorted({lane_of(*way) for way in both_ways})}
        self._under_way: list[tuple[dist.Work | None, Tensor]] = []

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        group = self._groups[lane_of(source, target, self._degree)]
        assert group is not None
        return group

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Sends tensors to rank ``to`` of the axis, a neighbour, without waiting."""
        group = self._group(self._index, to)
        for tensor in tensors:
            moved = tensor.detach().contiguous()
            work = dist.isend(sendable(moved), group=group, group_dst=to)
            self._under_way.append((work, moved))

    def receive(self, rooms: Sequence[Tensor], source: int) -> list[dist.Work | None]:
        """Begins to receive the next tensors of rank ``source`` of the axis into ``rooms``. :meth:`wait` ends it."""
        group = self._group(source, self._index)
        return [dist.irecv(sendable(room), group=group, group_src=source) for room in rooms]

    @cached_property
    def runs_ahead(self) -> bool:
        """True if a receive may begin before its result is needed. On a device the host would wait for the message
        wherever it waits for all of the device's work."""
        return dist.get_backend(self._group(0, 1)) == dist.Backend.GLOO

    def wait(self, under_way: Iterable[dist.Work | None]) -> None:
        """Waits until all of the given work is done."""
        with waiting(), marked("another stage of the pipeline"):
            for work in under_way:
                if work is not None:
                    work.wait()

    def send_object(self, words: Any, to: int) -> None:
        """Sends an object that can be pickled."""
        text = torch.frombuffer(bytearray(pickle.dumps(words)), dtype=torch.uint8).to(self._device)
        self.send([torch.tensor([len(text)], device=self._device), text], to)

    def receive_object(self, source: int) -> Any:
        """Receives the next object of rank ``source``. The host waits for it."""
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.wait(self.receive([length], source))
        text = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self.wait(self.receive([text], source))
        return pickle.load(io.BytesIO(bytes(text.cpu().tolist())))

    def finish(self) -> None:
        """Waits until everything that was sent has arrived."""
        self.wait(work for work, _ in self._under_way)
        self._under_way.clear()

    def one_way(self, nbytes: int) -> float:
        """See :func:`one_way`."""
        return one_way(nbytes, self._group(0, 1), self._device)


LINES: dict[str, Callable[[Mesh, str, torch.device], P2PChannel]] = {}
"""Channel classes by backend of the world; a simulation of absent ranks registers its own."""


def line_along(mesh: Mesh, axis: str, device: torch.device) -> P2PChannel:
    """Returns the channel between the ranks along an axis of the mesh. These ranks must call this together."""
    backend = "" if mesh.world is None else dist.get_backend(mesh.world)
    return LINES.get(backend, P2PChannel)(mesh, axis, device)


def one_way(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Returns the seconds that a message of ``nbytes`` takes to a neighbour, the least of several; 0 for a rank without
    a neighbour. All ranks of the group must call this together; neighbours measure in pairs."""
    index = group.rank()
    neighbour = index ^ 1
    if neighbour >= group.size():
        return 0.0
    room = torch.zeros(max(1, nbytes), dtype=torch.uint8, device=device)
    return min(_ping(room, group, neighbour, index < neighbour) for _ in range(_PINGS))


def _ping(room: Tensor, group: dist.ProcessGroup, neighbour: int, first: bool) -> float:
    began = time.perf_counter()
    with waiting(), marked("another stage of the pipeline"):
        for sends in (first, not first):
            if sends:
                dist.send(room, group=group, group_dst=neighbour)
            else:
                dist.recv(room, group=group, group_src=neighbour)
        room[0].item()  # makes the host wait for the device
    return (time.perf_counter() - began) / 2


Key = Any


class Inbox:
    """Messages from one rank, received in the order ``expected`` and taken in any order.

    The next message is being received while the rank still works on the one before. So the sender does not have to wait
    until this rank has room.

    Args:
        begin: Begins to receive the message of a key. The returned function waits for it.
        ahead: Whether to begin receiving before the message is needed.
    """

    def __init__(
        self, expected: Sequence[Key], begin: Callable[[Key], Callable[[], Any]], ahead: bool
    ) -> None:
        self._expected, self._begin, self._ahead = deque(expected), begin, ahead
        self._kept: dict[Key, Any] = {}
        self._coming: Callable[[], Any] | None = None
        self._look_ahead()

    def receive(self, key: Key) -> Any:
        """Waits for the message of ``key``, and returns it."""
        while key not in self._kept:
            following = self._expected[0]
            come = self._coming or self._begin(following)
            self._kept[following] = come()
            self._expected.popleft()
            self._look_ahead()
        return self._kept.pop(key)

    def _look_ahead(self) -> None:
        self._coming = self._begin(self._expected[0]) if self._ahead and self._expected else None
