"""All-reduce between CPU ranks of one host, through shared memory.

Gloo moves bytes between ranks of one machine through TCP sockets, and each byte crosses the kernel twice. Here each
rank has a ring of a few slots that stay in its cache. A tensor is cut into chunks of the size of a slot, and each
chunk goes through three stages. In each turn a rank works on three successive chunks, one in each stage. Because of
this pipeline, other ranks have mostly finished a stage before a rank waits for it::

    rank r, chunk c, slot c mod S                      what it says when done
    ------------------------------------------------   ----------------------
    copy in    the slices that other ranks will add    entered[r] = c + 1
    reduce     slice r of all ranks, in their order    reduced[r] = c + 1
    copy out   the slices that other ranks added       left[r]    = c + 1

    turn        0     1     2     3     4
    copy in     c0    c1    c2    c3    c4
    reduce            c0    c1    c2    c3
    copy out                c0    c1    c2

A slot is written again once all other ranks have left the chunk that it held. A small tensor needs one stage less:
every rank copies all of it in and adds up all ranks' slots by itself.

*The same bits on all ranks*: one rank adds up an element, or every rank adds it from the same slots, always in the
order of ranks 0, 1, 2, ... float16 and bfloat16 are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import AllReduce, Done, Key, Work
from evener.collectives.shared_memory.in_place import InPlace, add_terms, slice_of
from evener.distributed.shm.slots import DTYPE_CODES, ENTERED, LEFT, REDUCED, Slots, tag_of
from evener.distributed.watchdog.watchdog import TIMEOUT_SECONDS
from evener.errors import ConfigurationError, EvenerError, RankError

_SLOTS = 4
_SLICE_NBYTES = 256 * 1024  # part of a slot for each rank: slices of all ranks stay in a core's cache
_SLOT_NBYTES = (512 * 1024, 2 * 1024 * 1024)
_ONE_SHOT_NBYTES = 512 * 1024  # divided by the number of ranks, as every rank reads the tensors of all
_CHUNK_NBYTES = 64 * 1024
_VIEWS = 512


class _Views(NamedTuple):
    """Views of the slots for chunks of one dtype and length; the first index is the slot, the second a rank."""

    sizes: list[int]
    """Number of elements of each rank's slice."""
    whole: list[list[Tensor]]
    """The whole chunk, in every rank's slot."""
    terms: list[list[Tensor]]
    """This rank's slice, in every rank's slot."""
    give: list[list[Tensor]]
    """Every rank's slice, in this rank's slot."""
    take: list[list[Tensor]]
    """Every rank's slice, in its own slot."""


def slot_nbytes(world_size: int) -> int:
    """Returns the bytes of a slot for this number of ranks."""
    smallest, largest = _SLOT_NBYTES
    return min(max(smallest, _SLICE_NBYTES * world_size), largest)


def shared_nbytes(world_size: int) -> int:
    """Returns the bytes of shared memory that each of ``world_size`` ranks allocates."""
    return _SLOTS * slot_nbytes(world_size) if world_size > 1 else 0


class SharedMemory(AllReduce):
    """Sums CPU tensors through shared memory. The sum is there when the call returns.

    It supports every dtype that torch adds: 64-bit and smaller integers (which wrap around), bool (or), floating and
    complex numbers. If a rank's process died, the error names it at once; if a rank is stopped or does not take part,
    after the timeout. The object cannot be used after an error.

    Args:
        group: Ranks of one host, of any backend that can gather objects.
        timeout_seconds: The longest wait for a rank.

    Raises:
        ConfigurationError: The ranks do not share a host, or the machine does not support it; on every rank alike.
    """

    name = "shared-memory"
    adds_halves_in_float32 = True

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        super().__init__(group, timeout_seconds)
        self._slot_nbytes = slot_nbytes(self.world_size)
        self.held_nbytes = self.world_size * shared_nbytes(self.world_size)  # every rank maps all
        self._one_shot_nbytes = _ONE_SHOT_NBYTES // self.world_size
        self._slots: Slots | None = None
        self._in_place: InPlace | None = None
        if self.world_size > 1:
            self._slots = Slots(self.group, _SLOTS, self._slot_nbytes, timeout_seconds)
            self._in_place = InPlace(self._slots, self.group)
        self._closed = False
        self._views: dict[tuple[torch.dtype, int], _Views] = {}
        self._others = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self._chunks = 0
        self._failure: EvenerError | None = None

    def start(self, tensor: Tensor) -> Work:
        self._sum(tensor, lasting=False)
        return Done(tensor)

    def start_lasting(self, tensor: Tensor, key: Key) -> Work:
        self._sum(tensor, lasting=True)
        return Done(tensor)

    def _sum(self, tensor: Tensor, lasting: bool) -> None:
        slots = self._ready(tensor)
        if slots is None:
            return
        with self._failing():
            if tensor.nbytes <= self._one_shot_nbytes:
                self._one_shot(slots, tensor.view(-1))
            elif not (lasting and self._summed_in_place(tensor)):
                self._two_shots(slots, tensor.view(-1))

    def _summed_in_place(self, tensor: Tensor) -> bool:
        assert self._in_place is not None
        chunk, self._chunks = self._chunks, self._chunks + 1
        return self._in_place.sum(tensor, chunk)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Context that disables this object after an error: the ranks are out of step, and others may still write."""
        try:
            yield
        except BaseException as error:
            self._failure = _failed(error)
            if self._in_place is not None:
                self._in_place.leave()
            raise

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copies a contiguous ``tensor`` from rank ``source`` of the group to all others. All ranks must call this."""
        slots = self._ready(tensor)
        if slots is None:
            return
        with self._failing():
            for piece in torch.split(tensor.view(-1), self._slot_nbytes // tensor.element_size()):
                self._broadcast(slots, piece, source)

    def close(self) -> None:
        self._closed, self._slots, self._views, self._in_place = True, None, {}, None

    def _ready(self, tensor: Tensor) -> Slots | None:
        """Checks that the tensor can be summed. Returns the slots, or None if there is nothing to do.

        Raises:
            ConfigurationError: This object is closed, or the tensor's dtype or device is not supported.
            EvenerError: An earlier call failed.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ConfigurationError("this all-reduce through shared memory has been closed")
        if tensor.dtype not in DTYPE_CODES or tensor.device.type != "cpu":
            raise ConfigurationError(
                f"shared memory sums CPU tensors of the dtypes that torch adds, not {tensor.dtype} on "
                f"{tensor.device}; 'native' sums what the backend can"
            )
        return self._slots if tensor.numel() else None

    def _one_shot(self, slots: Slots, flat: Tensor) -> None:
        chunk, tag = self._chunks, tag_of(flat)
        self._chunks = chunk + 1
        terms = self._views_of(slots, flat).whole[chunk % _SLOTS]
        # The slot still holds chunk - _SLOTS: a rank that has not left that chunk may be reading it.
        slots.wait(LEFT, chunk - _SLOTS + 1)
        terms[self.rank].copy_(flat)
        # The count is published last: a rank that sees it may read the data and the tag.
        slots.begin(chunk, tag)
        slots.publish(ENTERED, chunk + 1)
        slots.wait(ENTERED, chunk + 1)
        slots.check(chunk, tag)
        add_terms(terms, flat)
        # REDUCED is skipped: counts only grow, and the next chunk in two shots raises it beyond this chunk.
        slots.publish(LEFT, chunk + 1)

    def _two_shots(self, slots: Slots, flat: Tensor) -> None:
        first, tag = self._chunks, tag_of(flat)
        work = []
        for chunk, piece in enumerate(torch.split(flat, self._chunk_length(flat)), start=first):
            views = self._views_of(slots, piece)
            work.append((slots, views, piece.split_with_sizes(views.sizes), chunk))
        self._chunks = first + len(work)
        # No rank still needs the tag in this slot. A call in two shots was checked when it was reduced, and a call in
        # one shot before the rank entered the next. Only the last call may be unchecked, and it has another slot.
        slots.begin(first, tag)
        for turn in range(len(work) + 2):
            if turn < len(work):
                self._copy_in(*work[turn])
            if turn == 1:
                slots.wait(ENTERED, first + 1)
                slots.check(first, tag)
            if 1 <= turn <= len(work):
                self._reduce(*work[turn - 1])
            if turn >= 2:
                self._copy_out(*work[turn - 2])

    def _copy_in(self, slots: Slots, views: _Views, slices: tuple[Tensor, ...], chunk: int) -> None:
        # Copying in is two chunks ahead of copying out: with fewer than three slots, all ranks would deadlock here.
        slots.wait(LEFT, chunk - _SLOTS + 1)
        give = views.give[chunk % _SLOTS]
        for rank in self._others:
            give[rank].copy_(slices[rank])
        slots.publish(ENTERED, chunk + 1)

    def _reduce(self, slots: Slots, views: _Views, slices: tuple[Tensor, ...], chunk: int) -> None:
        """Adds up this rank's slice. Its own term is read from the tensor. The sum is first written to this rank's
        slot, where no other rank writes, and then copied to the tensor.

        Only sums are written to that place of the slot, so that no rank can take a term for a sum.
        """
        mine, result = slices[self.rank], views.give[chunk % _SLOTS][self.rank]
        terms = views.terms[chunk % _SLOTS].copy()
        terms[self.rank] = mine
        slots.wait(ENTERED, chunk + 1)
        add_terms(terms, result)
        slots.publish(REDUCED, chunk + 1)  # before the copy, for which no other rank needs to wait
        mine.copy_(result)

    def _copy_out(self, slots: Slots, views: _Views, slices: tuple[Tensor, ...], chunk: int) -> None:
        slots.wait(REDUCED, chunk + 1)
        take = views.take[chunk % _SLOTS]
        for rank in self._others:
            slices[rank].copy_(take[rank])
        # The chunk was reduced a turn ago: this rank needs no more terms or sums of it, in any slot.
        slots.publish(LEFT, chunk + 1)

    def _broadcast(self, slots: Slots, piece: Tensor, source: int) -> None:
        chunk = self._chunks
        self._chunks = chunk + 1
        slot = slots.view(source, chunk % _SLOTS, piece.dtype, 0, piece.numel())
        slots.wait(LEFT, chunk - _SLOTS + 1)
        if self.rank == source:
            slot.copy_(piece)
        slots.publish(ENTERED, chunk + 1)
        slots.wait(ENTERED, chunk + 1)
        if self.rank != source:
            piece.copy_(slot)
        slots.publish(LEFT, chunk + 1)

    def _chunk_length(self, flat: Tensor) -> int:
        """Returns the number of elements in a chunk: those of a slot, or fewer, so that small tensors are pipelined."""
        nbytes = min(self._slot_nbytes, max(_CHUNK_NBYTES, flat.nbytes // _SLOTS))
        return nbytes // flat.element_size()

    def _views_of(self, slots: Slots, piece: Tensor) -> _Views:
        key = piece.dtype, piece.numel()
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _VIEWS:
                self._views.clear()
            views = self._views[key] = _make_views(slots, self.rank, self.world_size, *key)
        return views


def _failed(error: BaseException) -> EvenerError:
    """Returns the error for calls after one that failed with ``error``, when the ranks are out of step."""
    return RankError(f"an earlier all-reduce through shared memory failed: {error}")


def _make_views(slots: Slots, rank: int, world_size: int, dtype: torch.dtype, count: int) -> _Views:
    slices = [slice_of(count, dtype, world_size, rank) for rank in range(world_size)]
    starts, sizes = [start for start, _ in slices], [stop - start for start, stop in slices]
    ranks = range(world_size)

    def piece(slot: int, owner: int, of: int) -> Tensor:
        return slots.view(owner, slot, dtype, starts[of], sizes[of])

    return _Views(
        sizes=sizes,
        whole=[[slots.view(r, slot, dtype, 0, count) for r in ranks] for slot in range(_SLOTS)],
        terms=[[piece(slot, r, rank) for r in ranks] for slot in range(_SLOTS)],
        give=[[piece(slot, rank, r) for r in ranks] for slot in range(_SLOTS)],
        take=[[piece(slot, r, r) for r in ranks] for slot in range(_SLOTS)],
    )
