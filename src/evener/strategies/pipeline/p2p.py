"""What the ranks of a pipeline send each other, in order, without any of them waiting for a receiver.

Between two ranks messages in one direction never pass each other: they are received in the order in which they were
sent, whichever is needed first, and what came too early is kept. The two directions have a group each, since on a
device one group is one queue, in which a send that waits for its receiver would hold up what comes the other way.
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

from evener.core.phase_marks import marked
from evener.distributed.mesh import Mesh
from evener.hardware.timers import waiting

_PINGS = 8


class Line:
    """Between the ranks along one axis of a mesh, which make it together."""

    def __init__(self, mesh: Mesh, axis: str, device: torch.device) -> None:
        self._index, self._device = mesh.index(axis), device
        self._groups = {rising: mesh.new_group(axis) for rising in (True, False)}
        self._under_way: list[tuple[dist.Work | None, Tensor]] = []

    def _group(self, rising: bool) -> dist.ProcessGroup:
        group = self._groups[rising]
        assert group is not None
        return group

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Sends them to rank ``to`` of the axis, and waits for nothing."""
        for tensor in tensors:
            moved = tensor.detach().contiguous()
            work = dist.isend(moved, group=self._group(to > self._index), group_dst=to)
            self._under_way.append((work, moved))

    def receive(self, rooms: Sequence[Tensor], source: int) -> list[dist.Work | None]:
        """Begins to fill ``rooms`` with what rank ``source`` of the axis sends next; :meth:`wait` ends it."""
        group = self._group(self._index > source)
        return [dist.irecv(room, group=group, group_src=source) for room in rooms]

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether a message may be awaited before it is needed. On a device what is sent would queue behind it."""
        return dist.get_backend(self._group(True)) == dist.Backend.GLOO

    def wait(self, under_way: Iterable[dist.Work | None]) -> None:
        """Until all of it is done."""
        with waiting(), marked("another stage of the pipeline"):
            for work in under_way:
                if work is not None:
                    work.wait()

    def tell(self, words: Any, to: int) -> None:
        """Sends an object that can be pickled."""
        text = torch.frombuffer(bytearray(pickle.dumps(words)), dtype=torch.uint8).to(self._device)
        self.send([torch.tensor([len(text)], device=self._device), text], to)

    def hear(self, source: int) -> Any:
        """The object that rank ``source`` told next. The host waits for it."""
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.wait(self.receive([length], source))
        text = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self.wait(self.receive([text], source))
        return pickle.load(io.BytesIO(bytes(text.cpu().tolist())))

    def finish(self) -> None:
        """All that was sent has come."""
        self.wait(work for work, _ in self._under_way)
        self._under_way.clear()

    def one_way(self, nbytes: int) -> float:
        """See :func:`one_way`."""
        return one_way(nbytes, self._group(True), self._device)


LINES: dict[str, Callable[[Mesh, str, torch.device], Line]] = {}
"""By backend of the world; a stand-in for ranks that are not there brings its own."""


def line_along(mesh: Mesh, axis: str, device: torch.device) -> Line:
    """Between the ranks along an axis of the mesh, which make it together."""
    backend = "" if mesh.world is None else dist.get_backend(mesh.world)
    return LINES.get(backend, Line)(mesh, axis, device)


def one_way(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds for which a message of so many bytes to a neighbour is on its way, the least of some; 0 for a rank that
    has none. All ranks of the group call it, neighbours in pairs."""
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
        room[0].item()  # the host has not waited for a device yet
    return (time.perf_counter() - began) / 2


Key = Any


class Inbox:
    """What comes from one rank, in the order ``expected``; taken in any.

    The next message is awaited while the rank still works with the one before, so that it comes without a wait for this
    rank's word that it has room.

    Args:
        begin: Begins to receive what is named, which is the next one; the function that it gives waits for it.
    """

    def __init__(
        self, expected: Sequence[Key], begin: Callable[[Key], Callable[[], Any]], ahead: bool
    ) -> None:
        self._expected, self._begin, self._ahead = deque(expected), begin, ahead
        self._kept: dict[Key, Any] = {}
        self._coming: Callable[[], Any] | None = None
        self._look_ahead()

    def take(self, key: Key) -> Any:
        """What is named, when it has come."""
        while key not in self._kept:
            following = self._expected[0]
            come = self._coming or self._begin(following)
            self._kept[following] = come()
            self._expected.popleft()
            self._look_ahead()
        return self._kept.pop(key)

    def _look_ahead(self) -> None:
        self._coming = self._begin(self._expected[0]) if self._ahead and self._expected else None
