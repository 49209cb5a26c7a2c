"""Sums tensors in place, without copies, if they lie in shared memory that all ranks of the host have mapped.

Each such tensor has a *home* (:mod:`.shared_tensors`)::

    rank r                                                     says when done
    its tensor is filled                                       entered[r] = c + 1, with the number of its home
    adds slice r of all ranks, in their order, a chunk at a    left[r] = c + 1
    time, and writes each sum into the tensor of every rank
    has the whole sum when all others have done so

Until all ranks are done, only rank r reads and writes slice r of any tensor. So one chunk number c of
:mod:`.all_reduce`, for which nothing is copied, is enough to synchronize the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from evener.collectives.shared_memory.shared_tensors import STRANGE, WANTED, Home, Homes
from evener.core.half_precision import is_half
from evener.distributed.shm.slots import ENTERED, LEFT, Slots, tag_of

_CHUNK_NBYTES = 256 * 1024  # part of a slice: stays in a core's cache from addition to last copy
_LINE_NBYTES = 64


class InPlace:
    """Sums tensors in their homes. All ranks must make the same calls.

    Args:
        slots: Shared counters, by which ranks publish their progress.
        group: Ranks of one host.
    """

    def __init__(self, slots: Slots, group: dist.ProcessGroup) -> None:
        self._slots, self._homes = slots, Homes(group)
        self._rank = dist.get_rank(group)
        self._slices: dict[int, RankSlice] = {}

    def sum(self, tensor: Tensor, chunk: int) -> bool:
        """Sums a tensor if it has a home or gets one. Uses up the chunk number ``chunk``.

        Returns:
            True if it was summed, False if it has no home.

        Raises:
            ConfigurationError: The ranks passed different tensors.
        """
        said = self._agreed(tensor, chunk)
        home = self._home(tensor, said)
        if home is not None:
            self._slice(home).sum()
        self._slots.publish(LEFT, chunk + 1)
        if home is not None:
            self._slots.wait(LEFT, chunk + 1)
        return home is not None

    def leave(self) -> None:
        """Releases the memory of the other ranks, which may continue without this rank."""
        self._slices.clear()
        self._homes.leave()

    def _agreed(self, tensor: Tensor, chunk: int) -> set[int]:
        """Waits for all ranks, and returns the set of home numbers (or ``STRANGE``, ``WANTED``) of their tensors."""
        tag = tag_of(tensor, self._homes.home_number(tensor))
        self._slots.begin(chunk, tag)
        self._slots.publish(ENTERED, chunk + 1)
        self._slots.wait(ENTERED, chunk + 1)
        return set(self._slots.extras(chunk, tag))

    def _home(self, tensor: Tensor, said: set[int]) -> Home | None:
        if STRANGE in said:
            return None
        if len(said) == 1 and WANTED not in said:
            return self._homes.home_of(tensor)
        return self._homes.settle(tensor)

    def _slice(self, home: Home) -> RankSlice:
        if home.number not in self._slices:
            kept = self._homes.numbers
            self._slices = {number: each for number, each in self._slices.items() if number in kept}
            self._slices[home.number] = RankSlice(home.flats, self._rank)
        return self._slices[home.number]


class RankSlice:
    """The slice that one rank adds up, in the shared tensors of all ranks.

    Args:
        flats: The tensors of all ranks, in order of rank; each of shape (elements,).
        rank: The rank that adds.
    """

    def __init__(self, flats: Sequence[Tensor], rank: int) -> None:
        start, stop = slice_of(flats[0].numel(), flats[0].dtype, len(flats), rank)
        length = _CHUNK_NBYTES // flats[0].element_size()
        borders = [*range(start, stop, length), stop]
        self._chunks = [[flat[begin:end] for flat in flats] for begin, end in pairwise(borders)]
        self._total = flats[0].new_empty(min(length, stop - start)) if len(flats) > 2 else None
        self._rank = rank

    def sum(self) -> None:
        """Writes the sum into this slice of every rank's tensor."""
        for terms in self._chunks:
            total = terms[self._rank] if self._total is None else self._total[: terms[0].numel()]
            add_terms(terms, total)
            for term in terms:
                if term is not total:
                    term.copy_(total)


def slice_of(count: int, dtype: torch.dtype, world_size: int, rank: int) -> tuple[int, int]:
    """Returns (start, stop) of the slice of ``count`` elements that a rank adds up. Slices are equal and consist of
    whole cache lines, so that no two ranks write to the same line."""
    line = max(1, _LINE_NBYTES // dtype.itemsize)
    length = -(-count // (world_size * line)) * line
    return min(rank * length, count), min((rank + 1) * length, count)


@lru_cache(maxsize=1024)
def slices_of(count: int, dtype: torch.dtype, world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the starts and the sizes of all ranks' slices (:func:`slice_of`)."""
    slices = [slice_of(count, dtype, world_size, rank) for rank in range(world_size)]
    return tuple(start for start, _ in slices), tuple(stop - start for start, stop in slices)


def add_chunks(terms: Sequence[Tensor], out: Tensor) -> None:
    """Does the same as :func:`add_terms`, in chunks that stay in a core's cache until the last term is added."""
    if len(terms) == 2:
        add_terms(terms, out)
        return
    length = _CHUNK_NBYTES // out.element_size()
    for *parts, into in zip(*(torch.split(each, length) for each in (*terms, out)), strict=True):
        add_terms(parts, into)


def add_terms(terms: Sequence[Tensor], out: Tensor) -> None:
    """Writes the sum of two or more terms, added from left to right, to ``out``. ``out`` may be one of the first two
    terms, but no later one."""
    if len(terms) > 2 and is_half(out):
        total = terms[0].float()
        for term in terms[1:]:
            total += term.float()
        out.copy_(total)
        return
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)
