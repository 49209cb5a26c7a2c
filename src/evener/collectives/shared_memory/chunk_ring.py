"""A ring of slots in shared memory, through which the CPU ranks of one host pass tensors in chunks.

Every rank has its own few slots, which stay in its cache, and chunk c uses slot c mod S of every rank. A chunk has a
piece for each rank. A transfer consists of some of these stages; a rank publishes each as soon as it is done::

    rank r, chunk c                                              publishes
    copy in     the other ranks' pieces, to the slot of r        entered[r] = c + 1
    copy own    the piece of r, to the slot of r                 entered[r] = c + 1
    add up      the piece of r in the slots of all, in order     reduced[r] = c + 1 or left[r] = c + 1
    copy out    the other ranks' pieces, each from their slots   left[r]    = c + 1

A rank works on successive chunks in one step, one in each stage. Because of this pipeline, other ranks have mostly
finished a stage before a rank waits for it. A slot is written again once all other ranks have left the chunk that it
held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.shared_memory.in_place import add_terms
from evener.distributed.shm.slots import DTYPE_CODES, ENTERED, LEFT, Slots
from evener.errors import ConfigurationError

SLOTS = 4
"""Slots of a rank. Copying in is two chunks ahead of copying out: with fewer than three, all ranks would deadlock."""
_FORMS = 512


class Chunk(NamedTuple):
    """One chunk of a tensor, with a piece for each rank."""

    number: int
    pieces: Sequence[Tensor]
    """Every rank's piece, in this rank's tensor."""
    terms: list[Tensor]
    """This rank's piece, in every rank's slot."""
    give: list[Tensor]
    """Every rank's piece, in this rank's slot."""
    take: list[Tensor]
    """Every rank's piece, in its own slot."""


_Views = list[tuple[list[Tensor], list[Tensor], list[Tensor]]]
"""The terms, give and take of a chunk in each slot."""


class ChunkRing:
    """The slots of all ranks of a group. All ranks must create it together, and pass the same chunks in one order.

    Args:
        group: Ranks of one host.
        slot_nbytes: Size of a slot in bytes.
        timeout_seconds: The longest wait for a rank.
        what: Name of the operation, for error messages.

    Raises:
        ConfigurationError: The ranks do not share a host, or the machine does not support it; on every rank alike.
    """

    def __init__(
        self, group: dist.ProcessGroup, slot_nbytes: int, timeout_seconds: float, what: str = "all-reduce"
    ) -> None:
        self.slots = Slots(group, SLOTS, slot_nbytes, timeout_seconds, what)
        self.rank, self._ranks = group.rank(), range(group.size())
        self._others = [(self.rank + distance) % group.size() for distance in self._ranks[1:]]
        self._views: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], _Views] = {}
        self._wholes: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}
        self.count = 0
        """Number of chunks so far, which is the number of the next one."""

    def next_number(self) -> int:
        """Returns the number of the next chunk, and counts it."""
        self.count += 1
        return self.count - 1

    def wholes(self, number: int, like: Tensor) -> list[Tensor]:
        """Returns views of every rank's slot of chunk ``number``, each with the elements of ``like``."""
        key = like.dtype, like.numel()
        views = self._wholes.get(key)
        if views is None:
            if len(self._wholes) == _FORMS:
                self._wholes.clear()
            views = self._wholes[key] = [
                [self.slots.view(rank, slot, key[0], 0, key[1]) for rank in self._ranks]
                for slot in range(SLOTS)
            ]
        return views[number % SLOTS]

    def chunk(self, pieces: Sequence[Tensor], sizes: tuple[int, ...], starts: tuple[int, ...]) -> Chunk:
        """Returns the next chunk.

        Args:
            pieces: Every rank's piece, in this rank's tensor; shape (elements,) each.
            sizes: The number of elements of each piece.
            starts: Where each piece starts in a slot, in elements. If every rank copies only its own piece, all may
                start at 0.
        """
        number = self.next_number()
        key = pieces[0].dtype, sizes, starts
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _FORMS:
                self._views.clear()
            views = self._views[key] = [self._view(slot, *key) for slot in range(SLOTS)]
        return Chunk(number, pieces, *views[number % SLOTS])

    def _view(
        self, slot: int, dtype: torch.dtype, sizes: Sequence[int], starts: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        def piece(holder: int, of: int) -> Tensor:
            return self.slots.view(holder, slot, dtype, starts[of], sizes[of])

        return (
            [piece(rank, self.rank) for rank in self._ranks],
            [piece(self.rank, rank) for rank in self._ranks],
            [piece(rank, rank) for rank in self._ranks],
        )

    def copy_in(self, chunk: Chunk) -> None:
        """Stage: copies the other ranks' pieces to this rank's slot."""
        self.slots.wait(LEFT, chunk.number - SLOTS + 1)
        for rank in self._others:
            chunk.give[rank].copy_(chunk.pieces[rank])
        self.slots.publish(ENTERED, chunk.number + 1)

    def copy_own(self, chunk: Chunk) -> None:
        """Stage: copies this rank's piece to its slot."""
        self.slots.wait(LEFT, chunk.number - SLOTS + 1)
        chunk.give[self.rank].copy_(chunk.pieces[self.rank])
        self.slots.publish(ENTERED, chunk.number + 1)

    def add_up(self, chunk: Chunk, out: Tensor, stage: int) -> None:
        """Stage: writes the sum of this rank's piece to ``out``. Its own term is read from its tensor."""
        terms = chunk.terms.copy()
        terms[self.rank] = chunk.pieces[self.rank]
        self.slots.wait(ENTERED, chunk.number + 1)
        add_terms(terms, out)
        self.slots.publish(stage, chunk.number + 1)

    def copy_out(self, chunk: Chunk, stage: int = ENTERED) -> None:
        """Stage: copies the other ranks' pieces from their slots to this rank's tensor, as soon as they have come to
        ``stage``."""
        self.slots.wait(stage, chunk.number + 1)
        for rank in self._others:
            chunk.pieces[rank].copy_(chunk.take[rank])
        self.slots.publish(LEFT, chunk.number + 1)


def run(chunks: Sequence[Chunk], *stages: Callable[[Chunk], None]) -> None:
    """Takes all chunks through the stages. In each step a stage works on the chunk behind that of the stage before it::

    step        0     1     2     3     4
    copy in     c0    c1    c2    c3    c4
    add up            c0    c1    c2    c3
    copy out                c0    c1    c2
    """
    for step in range(len(chunks) + len(stages) - 1):
        for lag, stage in enumerate(stages):
            if 0 <= step - lag < len(chunks):
                stage(chunks[step - lag])


def check_carried(tensor: Tensor, does: str) -> None:
    """Raises ConfigurationError if the tensor is not on the CPU, or torch cannot add its dtype.

    Args:
        tensor: The tensor.
        does: What is done to tensors, in the third person.
    """
    if tensor.dtype not in DTYPE_CODES or tensor.device.type != "cpu":
        raise ConfigurationError(
            f"shared memory {does} CPU tensors of the dtypes that torch adds, not {tensor.dtype} on {tensor.device}; "
            f"'native' {does} what the backend can"
        )
