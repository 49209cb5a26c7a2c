"""Runs the schedule of any algorithm over point-to-point messages of any backend.

Played round by round, a schedule leaves the network idle while a rank adds, and the core idle while messages are on
their way. So the buffer is cut into segments, each of which runs the whole schedule, a few of them in flight: when a
rank waits for a message of one segment, those of the next are moving::

    segment 0   post 0 | wait 0, add, post 1 |                     | wait 1, add, post 2 |
    segment 1          | post 0              | wait 0, add, post 1 |                     | ...
                                             ^ while this waits, messages of segment 0 move

All ranks go through (segment, round) in the same order, so the messages between two ranks match first in, first out,
and nobody waits for a message that its sender posts only after a wait of its own for this rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from evener.collectives.base import AllReduce, Done, Key, Promised, Work
from evener.collectives.executor.messages import Messages
from evener.collectives.executor.program import Program, Range, Turn, compile_program
from evener.collectives.executor.streams import Streams
from evener.collectives.executor.worker import Worker
from evener.collectives.schedules.schedule import Algorithm, Schedule, Topology
from evener.distributed.hosts import hosts_of
from evener.distributed.watchdog.watchdog import TIMEOUT_SECONDS
from evener.errors import EvenerError

SEGMENT_NBYTES = 32 * 1024 * 1024
_IN_FLIGHT = 2
_PROGRAMS = 64

Pending = list[tuple[Range, dist.Work]]
"""Sends that may not be over, and what they read."""


class Scheduled(AllReduce):
    """Carries out the schedule of ``algorithm``, with messages over a process group of its own.

    On CPUs (gloo) in a thread of its own, so that a call returns at once. On GPUs (NCCL) on a stream of its own:
    that path has never run on a machine with several GPUs.

    Args:
        name: What to call it.
        algorithm: Makes the schedule.
        group: The ranks.
        timeout_seconds: How long to wait for a message before the missing ranks are named.
        topology: Which ranks (counted in the group) share a host; asked of the ranks if None.
        segment_nbytes: Bytes of a segment. Small ones hide the latency of a network and the time of adding; where
            the ranks' own cores move the bytes (gloo inside a machine), they only add messages.
    """

    def __init__(
        self,
        name: str,
        algorithm: Algorithm,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        topology: Topology | None = None,
        segment_nbytes: int = SEGMENT_NBYTES,
    ) -> None:
        super().__init__(group, timeout_seconds)
        self.name = name
        self._algorithm, self._topology = algorithm, topology or Topology(hosts_of(self.group))
        self._schedules: dict[int, Schedule] = {1: algorithm(self._topology)}
        self._segment_nbytes = segment_nbytes
        self._messages = Messages(self.group, timeout_seconds)
        self._programs: dict[tuple[int, int], Program] = {}
        self._worker = Worker(f"evener all-reduce {name}")
        self._streams = Streams()
        self._spare: list[Tensor] = []
        self._failure: EvenerError | None = None

    def start(self, tensor: Tensor) -> Work:
        return self.start_in(tensor, 1)

    def start_in(self, tensor: Tensor, segments: int, key: Key = None) -> Work:
        """As ``start``, with the schedule of ``segments``; with 1 the buffer is cut by bytes, as it was made to be."""
        if self.world_size == 1 or not tensor.numel():
            return Done(tensor)
        if tensor.is_cuda:
            return Promised(self._on_stream(tensor, segments))
        return Promised(self._worker.submit(lambda: self._run(tensor, segments)))

    def close(self) -> None:
        self._worker.close()
        self._messages.close()

    def _on_stream(self, tensor: Tensor, segments: int) -> Future[Tensor]:
        """Only queues work: the future is done for the host at once, and for a stream when ours gets there."""
        stream = self._streams.behind(tensor)
        future: Future[Tensor] = Future(devices=[tensor.device])
        with torch.cuda.stream(stream):
            future.set_result(self._run(tensor, segments))
        return future

    def _run(self, tensor: Tensor, segments: int) -> Tensor:
        if self._failure is not None:
            raise self._failure
        try:
            self._run_segments(tensor.view(-1), segments)
        except RuntimeError as error:
            self._failure = self.roll_call.explain(error)
            raise self._failure from error
        return tensor

    def _run_segments(self, flat: Tensor, segments: int) -> None:
        """Takes each of the segments in flight one turn further, again and again, until all are done."""
        nbytes = self._segment_nbytes if segments == 1 else SEGMENT_NBYTES
        parts = torch.split(flat, max(1, nbytes // flat.element_size()))
        waiting = [self._segment(part, tag, segments) for tag, part in enumerate(parts)]
        flying: list[Iterator[None]] = []
        while waiting or flying:
            joining = _IN_FLIGHT - len(flying)
            flying, waiting = [*flying, *waiting[:joining]], waiting[joining:]
            flying = [segment for segment in flying if _advance(segment)]

    def _segment(self, part: Tensor, tag: int, segments: int) -> Iterator[None]:
        """Runs the program on ``part``, and yields wherever messages are on their way."""
        program = self._program(part.numel(), segments)
        scratch = self._borrow(program.scratch, part)
        pending: Pending = []
        for turn in program.turns:
            places = _places(turn, part, scratch)
            received = self._post(turn, places, part, pending, tag)
            yield None
            _wait_all(received)
            _apply(turn, places, part, pending)
        _wait_all([work for _, work in pending])
        self._spare.append(scratch)

    def _post(
        self, turn: Turn, places: list[Tensor], part: Tensor, pending: Pending, tag: int
    ) -> list[dist.Work]:
        receives = []
        for arrival, place in zip(turn.arrivals, places, strict=True):
            if arrival.peer == self.rank:
                place.copy_(_at(part, arrival.where))
            else:
                if arrival.scratch is None:
                    _settle(pending, arrival.where)
                receives.append((arrival.peer, place))
        sends = [(peer, _at(part, what)) for peer, what in turn.sends]
        sent, received = self._messages.post(sends, receives, tag)
        pending.extend(zip((what for _, what in turn.sends), sent, strict=False))
        return received

    def _borrow(self, numel: int, like: Tensor) -> Tensor:
        """Scratch memory, that of an earlier segment if that is large enough: fresh memory costs page faults."""
        for index, spare in enumerate(self._spare):
            if spare.dtype == like.dtype and spare.device == like.device and spare.numel() >= numel:
                return self._spare.pop(index)
        del self._spare[:-_IN_FLIGHT]
        return like.new_empty(numel)

    def _program(self, numel: int, segments: int) -> Program:
        program = self._programs.get((numel, segments))
        if program is None:
            if len(self._programs) == _PROGRAMS:
                self._programs.clear()
            if segments not in self._schedules:
                self._schedules[segments] = self._algorithm(self._topology, segments)
            program = compile_program(self._schedules[segments], self.rank, numel)
            self._programs[numel, segments] = program
        return program


def _at(buffer: Tensor, where: Range) -> Tensor:
    return buffer[where.start : where.stop]


def _places(turn: Turn, part: Tensor, scratch: Tensor) -> list[Tensor]:
    """Where each arrival is received."""
    return [_at(scratch, a.scratch) if a.scratch else _at(part, a.where) for a in turn.arrivals]


def _apply(turn: Turn, places: list[Tensor], part: Tensor, pending: Pending) -> None:
    """Adds or copies what arrived, in order, once nothing that it changes is still being sent."""
    for arrival, place in zip(turn.arrivals, places, strict=True):
        if arrival.scratch is not None:
            _settle(pending, arrival.where)
            target = _at(part, arrival.where)
            if arrival.reduce:
                target.add_(place)
            else:
                target.copy_(place)


def _settle(pending: Pending, where: Range) -> None:
    """Waits for the sends of what overlaps ``where``, and forgets them."""
    _wait_all([work for what, work in pending if what.overlaps(where)])
    pending[:] = [(what, work) for what, work in pending if not what.overlaps(where)]


def _wait_all(works: list[dist.Work]) -> None:
    """Each only once: to gloo, a second wait for a message is a wait for a second message."""
    for work in works:
        work.wait()


def _advance(segment: Iterator[None]) -> bool:
    """Whether the segment goes on."""
    try:
        next(segment)
    except StopIteration:
        return False
    return True
