"""Data slots in shared memory for the ranks of one host, and counters with which ranks wait for each other's progress.

A rank stores how many chunks it has brought to a stage, a number that only grows. The others wait for that number: they
spin briefly, yield while no other thread wants the core, and then sleep in the kernel
(:mod:`evener.distributed.shm.spin_wait` says why). A rank that is about to sleep says so in a word of its own, and then
reads the counter once more. A rank that publishes stores the counter, and then reads these words. Both have a fence
between their store and their load, so that at least one of them sees the other's store.

*Ordering*. A counter is stored after the data that it announces, and loaded before that data. x86 keeps
stores in order, and loads too, so plain stores are enough; the streaming stores that a large ``memcpy`` may use
are not in order, but the C library fences them before it returns. Machines with weaker ordering (arm64) need a fence
that Python cannot issue; there :func:`map_segments` raises an error on every rank.

*No locks*. Each counter has one writer, its rank, and only grows. A reader that sees an old number waits a little
longer, and never takes data as ready too early. Before a rank overwrites a slot, it must have waited until all others
have published that they no longer need its content; the caller is responsible for that.
"""

from __future__ import annotations

import os
import platform
import time

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.phase_marks import marked
from evener.distributed.environment import usable_cores
from evener.distributed.hosts import all_gather
from evener.distributed.recovery.replacement import check_recall
from evener.distributed.shm.futex import fence, sleep, wake
from evener.distributed.shm.segment import Announcement, Segment, describe, has_died
from evener.distributed.shm.spin_wait import CROWD, give_way
from evener.distributed.watchdog.watchdog import backstop, departed, standings
from evener.errors import ConfigurationError, RankError, RankTimeoutError

ENTERED, REDUCED, LEFT = range(3)
"""Stages of a chunk: the rank has copied its data in; has summed its slice; does not need the chunk any more."""
_CALLS = 3
_ASLEEP = 4
"""Not 0 while the rank sleeps or is about to: the number (`_bell`) of the counter that it waits for."""
_TAGS = 5
_STAGES = 3

_ORDERED_MACHINES = ("x86_64", "amd64")
_SPIN_SECONDS = 20e-6
_YIELD_SECONDS = 2e-3
_LOOK_SECONDS = 0.05


class Slots:
    """Slots and progress counters of all ranks of a group. All ranks must create it together.

    Args:
        group: Ranks of one host.
        slots: Number of slots per rank.
        slot_nbytes: Size of a slot in bytes.
        timeout_seconds: How long to wait for a rank. With a watchdog, waits end a little later, because its report
            says more.
        what: Name of the operation, for error messages.

    Raises:
        ConfigurationError: On every rank, if the ranks do not share a host or the machine does not support it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots: int,
        slot_nbytes: int,
        timeout_seconds: float,
        what: str = "all-reduce",
    ) -> None:
        self.count = slots
        self._what = what
        self._slot_nbytes = slot_nbytes
        self._timeout_seconds = timeout_seconds
        self._rank = dist.get_rank(group)
        self._segments = map_segments(group, slots * slot_nbytes, what)
        numbers = range(_TAGS + slots)
        self._counters = [[segment.counter(n) for segment in self._segments] for n in numbers]
        self._mine = [counters[self._rank] for counters in self._counters]
        others = [rank for rank in range(len(self._segments)) if rank != self._rank]
        self._awaited = [[counters[rank] for rank in others] for counters in self._counters]
        self._words = [[segment.address(n) for segment in self._segments] for n in range(_STAGES)]
        self._bells = [self._bell(stage, self._rank) for stage in range(_STAGES)]
        self._crowded = len(self._segments) > usable_cores()

    def view(self, rank: int, slot: int, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Returns a view of ``count`` elements from element ``start`` of a slot of ``rank``; shape (count,)."""
        return self._segments[rank].view(dtype, slot * self._slot_nbytes + start * dtype.itemsize, count)

    def begin(self, chunk: int, tag: int) -> None:
        """Stores the tag of the call that starts with ``chunk``. Must precede ``publish(ENTERED, ...)``."""
        # The word was last used ``count`` chunks ago, and no rank reads it any more, even one that has not left that
        # chunk: the call before this one has ended here, so all others have reached that call's last chunk, and tags
        # are read at the start of a call.
        self._mine[_TAGS + chunk % self.count][0] = tag
        self.count_call()

    def count_call(self) -> None:
        """Counts one more call of this rank, for error messages."""
        self._mine[_CALLS][0] += 1

    def check(self, chunk: int, tag: int) -> None:
        """Raises ConfigurationError if the ranks' tags differ. All ranks must have entered ``chunk``."""
        for counter in self._awaited[_TAGS + chunk % self.count]:
            if counter[0] != tag:
                self._differ(chunk)

    def extras(self, chunk: int, tag: int) -> list[int]:
        """Returns the ``extra`` of each rank's tag, by rank. All ranks must have entered ``chunk``.

        Raises:
            ConfigurationError: If the ranks' tensors differ, or a rank's tag has no ``extra``.
        """
        found = [counter[0] for counter in self._counters[_TAGS + chunk % self.count]]
        if any(each & _TENSOR != tag & _TENSOR or each <= _TENSOR for each in found):
            self._differ(chunk)
        return [each >> _EXTRA_BIT for each in found]

    def publish(self, stage: int, chunks: int) -> None:
        """Publishes that this rank has brought ``chunks`` chunks to the stage. The data must be written before."""
        self._mine[stage][0] = chunks
        fence()
        for asleep in self._awaited[_ASLEEP]:
            if asleep[0] == self._bells[stage]:
                wake(self._words[stage][self._rank])
                return

    def wait(self, stage: int, chunks: int) -> None:
        """Waits until every other rank has published at least ``chunks`` for the stage.

        Raises:
            RankError: If the process of a rank is gone.
            RankTimeoutError: If a rank does not come in time.
            RecalledError: If this rank must take part in another start.
        """
        for counter in self._awaited[stage]:  # mostly all have come already
            if counter[0] < chunks:
                self._poll(stage, chunks)
                return

    def _late(self, stage: int, chunks: int) -> list[int]:
        return [rank for rank, counter in enumerate(self._counters[stage]) if counter[0] < chunks]

    def _all_came(self, stage: int, chunks: int) -> bool:
        return all(counter[0] >= chunks for counter in self._awaited[stage])

    def _poll(self, stage: int, chunks: int) -> None:
        start = now = time.monotonic()
        while now - start < _SPIN_SECONDS:
            if self._all_came(stage, chunks):
                return
            now = time.monotonic()
        while now - start < _YIELD_SECONDS and not self._crowded and CROWD.may_give_way(now):
            give_way()
            if self._all_came(stage, chunks):
                return
            now = time.monotonic()
        self._sleep(stage, chunks, start)

    def _sleep(self, stage: int, chunks: int, start: float) -> None:
        # Most waits are short, and not worth a mark for the watchdog.
        self._sleep_until(start + _YIELD_SECONDS, stage, chunks)
        if self._all_came(stage, chunks):
            return
        with marked(self._what):
            while True:
                self._sleep_until(time.monotonic() + _LOOK_SECONDS, stage, chunks)
                if self._all_came(stage, chunks):
                    return
                self._look(stage, chunks, time.monotonic() - start)

    def _sleep_until(self, end: float, stage: int, chunks: int) -> None:
        """Sleeps until all ranks have come, or until ``end``."""
        asleep = self._mine[_ASLEEP]
        while (late := self._first_late(stage, chunks)) is not None:
            left = end - time.monotonic()
            if left <= 0:
                return
            asleep[0] = self._bell(stage, late)
            fence()
            seen = self._counters[stage][late][0]
            if seen < chunks:
                sleep(self._words[stage][late], seen, left)
            asleep[0] = 0

    def _first_late(self, stage: int, chunks: int) -> int | None:
        for rank, counter in enumerate(self._counters[stage]):
            if counter[0] < chunks and rank != self._rank:
                return rank
        return None

    def _bell(self, stage: int, rank: int) -> int:
        """Returns the number, from 1, of the counter of ``rank`` for ``stage``."""
        return 1 + stage * len(self._segments) + rank

    def _look(self, stage: int, chunks: int, waited_seconds: float) -> None:
        """Raises if a late rank is dead, if a rank is late for too long, or if this rank is recalled."""
        check_recall()
        late = [rank for rank in self._late(stage, chunks) if rank != self._rank]
        dead = [rank for rank in late if has_died(self._segments[rank])]
        # A rank may have published its last chunk and ended between the two checks above.
        dead = [rank for rank in dead if self._counters[stage][rank][0] < chunks]
        if dead:
            raise RankError(departed(f"{self._describe(dead)}, in {self._call()}"))
        if late and waited_seconds > backstop(self._timeout_seconds):
            raise RankTimeoutError(
                f"waited {waited_seconds:.1f} s in {self._call()}: {self._describe(late)}{standings()}"
            )

    def _call(self) -> str:
        return f"{self._what} {self._mine[_CALLS][0]} through shared memory"

    def _describe(self, ranks: list[int]) -> str:
        return "; ".join(
            f"{describe(self._segments[rank])} ({self._what}s begun: {self._counters[_CALLS][rank][0]})"
            for rank in ranks
        )

    def _differ(self, chunk: int) -> None:
        tags = self._counters[_TAGS + chunk % self.count]
        seen = ", ".join(
            f"rank {segment.owner.rank} {untag(tag[0])}"
            for segment, tag in zip(self._segments, tags, strict=True)
        )
        raise ConfigurationError(f"the ranks called {self._what} with different tensors: {seen}")


_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_DTYPES = (*_INTEGERS, *_FLOATS)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
"""Codes for :func:`tag_of` of the dtypes that torch can add."""


_EXTRA_BIT = 48
_TENSOR = 2**_EXTRA_BIT - 1
MOST_EXTRA = 2**16 - 1


def tag_of(tensor: Tensor, extra: int = 0) -> int:
    """Packs number of elements, dtype and ``extra`` (at most ``MOST_EXTRA``) into one 64-bit word."""
    return extra << _EXTRA_BIT | tensor.numel() << 8 | DTYPE_CODES[tensor.dtype]


def untag(tag: int) -> str:
    """Formats a tag for messages: ``10 x float32``."""
    description = f"{(tag & _TENSOR) >> 8} x {str(_DTYPES[tag & 0xFF]).removeprefix('torch.')}"
    return f"{description} in lasting memory" if tag > _TENSOR else description


def map_segments(group: dist.ProcessGroup, nbytes: int, what: str) -> list[Segment]:
    """Creates a segment of ``nbytes`` on every rank, and returns all segments, by rank in the group.

    All ranks must call this together. ``what`` names the operation in the error message.

    Raises:
        ConfigurationError: On every rank, if any rank could not create its segment or open another's.
    """
    mine, problem = _create(nbytes)
    announced: list[Announcement | None] = all_gather(mine.owner if mine else None, group)
    segments: list[Segment] = []
    if mine and all(announced):
        segments, problem = _open_all(mine, [found for found in announced if found])
    problems = [text for text in all_gather(problem, group) if text]
    if mine:
        mine.hide()
    if problems:
        raise ConfigurationError(f"no {what} through shared memory: " + "; ".join(problems))
    return segments


def _create(nbytes: int) -> tuple[Segment | None, str | None]:
    rank = dist.get_rank()
    if platform.machine().lower() not in _ORDERED_MACHINES or not hasattr(os, "memfd_create"):
        return None, f"rank {rank} runs on {platform.system()} {platform.machine()}, not on Linux on x86"
    try:
        return Segment.create(nbytes, rank), None
    except OSError as error:
        return None, f"rank {rank} got no {nbytes} bytes of shared memory ({error})"


def _open_all(mine: Segment, announced: list[Announcement]) -> tuple[list[Segment], str | None]:
    segments = []
    for found in announced:
        try:
            segments.append(mine if found == mine.owner else Segment.open(found))
        except OSError as error:
            return [], f"rank {mine.owner.rank} cannot see the memory of rank {found.rank} ({error})"
    return segments, None
