"""All-reduce between CPU ranks of one host, through shared memory.

Gloo moves bytes between ranks of one machine through TCP sockets, and each byte crosses the kernel twice. Here a tensor
goes through a ring of slots (:mod:`.chunk_ring`) in chunks of the size of a slot, and each chunk through three stages::

    rank r, chunk c, slot c mod S                      what it says when done
    ------------------------------------------------   ----------------------
    copy in    the slices that other ranks will add    entered[r] = c + 1
    reduce     slice r of all ranks, in their order    reduced[r] = c + 1
    copy out   the slices that other ranks added       left[r]    = c + 1

A small tensor needs one stage less: every rank copies all of it in and adds up all ranks' slots by itself.

*The same bits on all ranks*: one rank adds up an element, or every rank adds it from the same slots, always in the
order of ranks 0, 1, 2, ... float16 and bfloat16 are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.base import AllReduce, Done, Key, Work
from evener.collectives.shared_memory.chunk_ring import SLOTS, Chunk, ChunkRing, check_carried, run
from evener.collectives.shared_memory.in_place import InPlace, add_terms, slices_of
from evener.core.config.time_limit import TIMEOUT_SECONDS
from evener.distributed.shm.slots import ENTERED, LEFT, REDUCED, tag_of
from evener.errors import ConfigurationError, EvenerError, RankError

_SLICE_NBYTES = 256 * 1024  # part of a slot for each rank: slices of all ranks stay in a core's cache
_SLOT_NBYTES = (512 * 1024, 2 * 1024 * 1024)
_ONE_SHOT_NBYTES = 512 * 1024  # divided by the number of ranks, as every rank reads the tensors of all
_CHUNK_NBYTES = 64 * 1024


def slot_nbytes(world_size: int) -> int:
    """Returns the bytes of a slot for this number of ranks."""
    smallest, largest = _SLOT_NBYTES
    return min(max(smallest, _SLICE_NBYTES * world_size), largest)


def shared_nbytes(world_size: int) -> int:
    """Returns the bytes of shared memory that each of ``world_size`` ranks allocates."""
    return SLOTS * slot_nbytes(world_size) if world_size > 1 else 0


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
    waits = True
    adds_halves_in_float32 = True

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        super().__init__(group, timeout_seconds)
        self._slot_nbytes = slot_nbytes(self.world_size)
        self.held_nbytes = self.world_size * shared_nbytes(self.world_size)  # every rank maps all
        self._one_shot_nbytes = _ONE_SHOT_NBYTES // self.world_size
        self._ring: ChunkRing | None = None
        self._in_place: InPlace | None = None
        if self.world_size > 1:
            self._ring = ChunkRing(self.group, self._slot_nbytes, timeout_seconds)
            self._in_place = InPlace(self._ring.slots, self.group)
        self._closed = False
        self._failure: EvenerError | None = None

    def start(self, tensor: Tensor) -> Work:
        self._sum(tensor, lasting=False)
        return Done(tensor)

    def start_lasting(self, tensor: Tensor, key: Key) -> Work:
        self._sum(tensor, lasting=True)
        return Done(tensor)

    def _sum(self, tensor: Tensor, lasting: bool) -> None:
        ring = self._ready(tensor)
        if ring is None:
            return
        with self._failing():
            if tensor.nbytes <= self._one_shot_nbytes:
                self._one_shot(ring, tensor.view(-1))
            elif not (lasting and self._summed_in_place(ring, tensor)):
                self._two_shots(ring, tensor.view(-1))

    def _summed_in_place(self, ring: ChunkRing, tensor: Tensor) -> bool:
        assert self._in_place is not None
        return self._in_place.sum(tensor, ring.next_number())

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
        ring = self._ready(tensor)
        if ring is None:
            return
        with self._failing():
            for piece in torch.split(tensor.view(-1), self._slot_nbytes // tensor.element_size()):
                self._broadcast(ring, piece, source)

    def close(self) -> None:
        self._closed, self._ring, self._in_place = True, None, None

    def _ready(self, tensor: Tensor) -> ChunkRing | None:
        """Checks that the tensor can be summed. Returns the ring, or None if there is nothing to do.

        Raises:
            ConfigurationError: This object is closed, or the tensor's dtype or device is not supported.
            EvenerError: An earlier call failed.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ConfigurationError("this all-reduce through shared memory has been closed")
        check_carried(tensor, "sums")
        return self._ring if tensor.numel() else None

    def _one_shot(self, ring: ChunkRing, flat: Tensor) -> None:
        slots, chunk, tag = ring.slots, ring.next_number(), tag_of(flat)
        terms = ring.wholes(chunk, flat)
        # The slot still holds an older chunk: a rank that has not left that chunk may be reading it.
        slots.wait(LEFT, chunk - SLOTS + 1)
        terms[self.rank].copy_(flat)
        # The count is published last: a rank that sees it may read the data and the tag.
        slots.begin(chunk, tag)
        slots.publish(ENTERED, chunk + 1)
        slots.wait(ENTERED, chunk + 1)
        slots.check(chunk, tag)
        add_terms(terms, flat)
        # REDUCED is skipped: counts only grow, and the next chunk in two shots raises it beyond this chunk.
        slots.publish(LEFT, chunk + 1)

    def _two_shots(self, ring: ChunkRing, flat: Tensor) -> None:
        first, tag = ring.count, tag_of(flat)
        chunks = []
        for piece in torch.split(flat, self._chunk_length(flat)):
            starts, sizes = slices_of(piece.numel(), piece.dtype, self.world_size)
            chunks.append(ring.chunk(piece.split_with_sizes(sizes), sizes, starts))
        # No rank still needs the tag in this slot. A call in two shots was checked when it was reduced, and a call in
        # one shot before the rank entered the next. Only the last call may be unchecked, and it has another slot.
        ring.slots.begin(first, tag)

        def reduce(chunk: Chunk) -> None:
            if chunk.number == first:
                ring.slots.wait(ENTERED, first + 1)
                ring.slots.check(first, tag)
            # The sum is first written to this rank's slot, where no other rank writes. Only sums are written to that
            # place of the slot, so that no rank can take a term for a sum.
            result = chunk.give[self.rank]
            ring.add_up(chunk, result, REDUCED)
            # The sum is published before this copy, for which no other rank needs to wait.
            chunk.pieces[self.rank].copy_(result)

        # A chunk that is copied out was reduced a step ago: this rank needs no more terms or sums of it, in any slot.
        run(chunks, ring.copy_in, reduce, partial(ring.copy_out, stage=REDUCED))

    def _broadcast(self, ring: ChunkRing, piece: Tensor, source: int) -> None:
        slots, chunk = ring.slots, ring.next_number()
        slot = ring.wholes(chunk, piece)[source]
        slots.wait(LEFT, chunk - SLOTS + 1)
        if self.rank == source:
            slot.copy_(piece)
        slots.publish(ENTERED, chunk + 1)
        slots.wait(ENTERED, chunk + 1)
        if self.rank != source:
            piece.copy_(slot)
        slots.publish(LEFT, chunk + 1)

    def _chunk_length(self, flat: Tensor) -> int:
        """Returns the number of elements in a chunk: those of a slot, or fewer, so that small tensors are pipelined."""
        nbytes = min(self._slot_nbytes, max(_CHUNK_NBYTES, flat.nbytes // SLOTS))
        return nbytes // flat.element_size()


def _failed(error: BaseException) -> EvenerError:
    """Returns the error for calls after one that failed with ``error``, when the ranks are out of step."""
    return RankError(f"an earlier all-reduce through shared memory failed: {error}")
