"""Runs the schedule of any algorithm over point-to-point messages of any backend.

Round by round, a schedule would leave the network idle while a rank adds, and the core idle while messages are under
way. So the buffer is cut into segments, each of which runs the whole schedule, and a few of them run at a time. While a
rank waits for a message of one segment, messages of the next are moving::

    segment 0   post 0 | wait 0, add, post 1 |                     | wait 1, add, post 2 |
    segment 1          | post 0              | wait 0, add, post 1 |                     | ...
                                             ^ while this waits, messages of segment 0 move

All ranks go through (segment, round) in the same order. So the messages between two ranks match first in, first out,
and there is no deadlock: no rank waits for a message whose sender first waits for this rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from evener.collectives.base import AllReduce, Done, Key, Promised, Work
from evener.collectives.executor.messages import Messages
from evener.collectives.executor.program import ElementRange, Program, ProgramRound, compile_program
from evener.collectives.executor.streams import Streams
from evener.collectives.executor.worker import Worker
from evener.collectives.schedules.schedule import Algorithm, Schedule, Topology
from evener.core.config.time_limit import TIMEOUT_SECONDS
from evener.distributed.hosts import hosts_of
from evener.errors import EvenerError

SEGMENT_NBYTES = 32 * 1024 * 1024
_IN_FLIGHT = 2
_PROGRAMS = 64

Pending = list[tuple[ElementRange, dist.Work]]
"""Sends that may not be finished, with the ranges that they read."""


class Scheduled(AllReduce):
    """Runs the schedule of ``algorithm``, with messages over its own process group.

    On CPUs (gloo) it runs in a thread, so that a call returns at once. On GPUs (NCCL) it runs on its own stream; that
    path has never been tested on a machine with several GPUs.

    Args:
        name: The name of the all-reduce.
        algorithm: Makes the schedule.
        group: The ranks.
        timeout_seconds: The longest wait for a message; then an error names the missing ranks.
        topology: Which ranks (counted in the group) share a host; None to ask the ranks.
        segment_nbytes: Bytes of a segment. Small segments hide the latency of a network and the time of adding. If the
            ranks' own cores move the bytes (gloo inside a machine), small segments only add messages.
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
        """Starts the sum with the schedule for ``segments``. With 1, the buffer is cut by ``segment_nbytes``."""
        if self.world_size == 1 or not tensor.numel():
            return Done(tensor)
        if tensor.is_cuda:
            return Promised(self._on_stream(tensor, segments))
        return Promised(self._worker.submit(lambda: self._run(tensor, segments)))

    def close(self) -> None:
        self._worker.close()
        self._messages.close()

    def _on_stream(self, tensor: Tensor, segments: int) -> Future[Tensor]:
        """Queues the work on this object's stream. The returned future is done for the host at once; streams that use
        it wait for this stream."""
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
        """Runs all segments: moves each segment in flight on by one round in turn, until all are done."""
        nbytes = self._segment_nbytes if segments == 1 else SEGMENT_NBYTES
        parts = torch.split(flat, max(1, nbytes // flat.element_size()))
        waiting = [self._segment(part, tag, segments) for tag, part in enumerate(parts)]
        flying: list[Iterator[None]] = []
        while waiting or flying:
            joining = _IN_FLIGHT - len(flying)
            flying, waiting = [*flying, *waiting[:joining]], waiting[joining:]
            flying = [segment for segment in flying if _advance(segment)]

    def _segment(self, part: Tensor, tag: int, segments: int) -> Iterator[None]:
        """Runs the program on ``part``, and yields whenever messages are under way."""
        program = self._program(part.numel(), segments)
        scratch = self._borrow(program.scratch, part)
        pending: Pending = []
        for program_round in program.rounds:
            places = _places(program_round, part, scratch)
            received = self._post(program_round, places, part, pending, tag)
            yield None
            _wait_all(received)
            _apply(program_round, places, part, pending)
        _wait_all([work for _, work in pending])
        self._spare.append(scratch)

    def _post(
        self, program_round: ProgramRound, places: list[Tensor], part: Tensor, pending: Pending, tag: int
    ) -> list[dist.Work]:
        receives = []
        for arrival, place in zip(program_round.arrivals, places, strict=True):
            if arrival.peer == self.rank:
                place.copy_(_at(part, arrival.where))
            else:
                if arrival.scratch is None:
                    _settle(pending, arrival.where)
                receives.append((arrival.peer, place))
        sends = [(peer, _at(part, what)) for peer, what in program_round.sends]
        sent, received = self._messages.post(sends, receives, tag)
        pending.extend(zip((what for _, what in program_round.sends), sent, strict=False))
        return received

    def _borrow(self, numel: int, like: Tensor) -> Tensor:
        """Returns scratch memory, an earlier segment's if it is large enough: new memory costs page faults."""
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


def _at(buffer: Tensor, where: ElementRange) -> Tensor:
    return buffer[where.start : where.stop]


def _places(program_round: ProgramRound, part: Tensor, scratch: Tensor) -> list[Tensor]:
    """Returns the tensor into which each arrival is received: scratch memory or its final place."""
    return [_at(scratch, a.scratch) if a.scratch else _at(part, a.where) for a in program_round.arrivals]


def _apply(program_round: ProgramRound, places: list[Tensor], part: Tensor, pending: Pending) -> None:
    """Adds or copies the arrived data, in order. First waits for sends that still read the target ranges."""
    for arrival, place in zip(program_round.arrivals, places, strict=True):
        if arrival.scratch is not None:
            _settle(pending, arrival.where)
            target = _at(part, arrival.where)
            if arrival.reduce:
                target.add_(place)
            else:
                target.copy_(place)


def _settle(pending: Pending, where: ElementRange) -> None:
    """Waits for the pending sends that overlap ``where``, and removes them from ``pending``."""
    _wait_all([work for what, work in pending if what.overlaps(where)])
    pending[:] = [(what, work) for what, work in pending if not what.overlaps(where)]


def _wait_all(works: list[dist.Work]) -> None:
    """Waits for each work. Each must be waited for once only: a second wait would wait for another message in gloo."""
    for work in works:
        work.wait()


def _advance(segment: Iterator[None]) -> bool:
    """Moves the segment on by one round. Returns True if it is not finished."""
    try:
        next(segment)
    except StopIteration:
        return False
    return True
