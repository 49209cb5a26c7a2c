"""What ranks send each other of plain tensors; :mod:`evener.nn.collectives` gives it gradients.

It stands on what gloo and NCCL do alike. Neither gathers pieces of unequal length in one call on both, nor scatters
sums of such pieces, so that::

    gathered    pieces of one length by an all_gather, of several by a broadcast each, into their place
    scattered   an all_to_all of the terms, which the receiver adds in order of rank
    shifted     a send and a receive that are started together, so that no order of ranks can block

Every wait is marked for the watchdog and left out of the rank's own time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from evener.core.half_precision import added_in_float32
from evener.core.phase_marks import marked
from evener.hardware.timers import waiting

_MOST_DIMS = 64
"""Of a tensor, by torch's own limit."""
_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


class Description(NamedTuple):
    """What a rank says of its tensor before it sends it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    """Whether backward will pass through it."""
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {self.shape}, {'with' if self.trained else 'without'} gradient"


def descriptions(x: Tensor, group: ProcessGroup, numbers: Sequence[int] = ()) -> list[Description]:
    """Of every rank's tensor, in order of rank, with as many ``numbers`` of each. The host waits for them."""
    trained = int(x.requires_grad and torch.is_grad_enabled())
    padding = [0] * (_MOST_DIMS - x.dim())
    own = [_DTYPES.index(x.dtype), trained, x.dim(), *x.shape, *padding, *numbers]
    said = gathered(torch.tensor([own], device=x.device), 0, [1] * group.size(), group).tolist()
    return [
        Description(tuple(sizes[:dims]), _DTYPES[kind], bool(trains), tuple(sizes[_MOST_DIMS:]))
        for kind, trains, dims, *sizes in said
    ]


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks, the same bits on all."""
    moved = _sent(x, group)
    with _wait("all_reduce"):
        added_in_float32(moved, lambda wide: dist.all_reduce(wide, group=group))
    return moved.to(x.device)


def largest(x: Tensor, group: ProcessGroup) -> Tensor:
    """The largest of the ranks' numbers, each for itself."""
    moved = _sent(x, group)
    with _wait("all_reduce"):
        dist.all_reduce(moved, dist.ReduceOp.MAX, group=group)
    return moved.to(x.device)


def gathered(x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """The pieces of all ranks, of the lengths ``sizes``, side by side along ``dim``."""
    own = _sent(x.movedim(dim, 0), group)
    whole = own.new_empty(sum(sizes), *own.shape[1:])
    pieces = torch.split(whole, list(sizes))
    with _wait("all_gather"):
        if len({*sizes}) == 1:
            dist.all_gather(list(pieces), own, group=group)
        else:
            pieces[group.rank()].copy_(own)
            _broadcast_each(pieces, group)
    return _arrived(whole, dim, x)


def _broadcast_each(pieces: Sequence[Tensor], group: ProcessGroup) -> None:
    works = [
        dist.broadcast(piece, group=group, group_src=source, async_op=True)
        for source, piece in enumerate(pieces)
        if piece.numel()
    ]
    for work in works:
        work.wait()


def exchanged(
    x: Tensor, dim: int, splits: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> Tensor:
    """Cuts ``x`` along ``dim`` into pieces of ``splits``, one for each rank; joins what comes, in order of rank."""
    own = _sent(x.movedim(dim, 0), group)
    came = own.new_empty(sum(received), *own.shape[1:])
    with _wait("all_to_all"):
        dist.all_to_all_single(came, own, list(received), list(splits), group=group)
    return _arrived(came, dim, x)


def scattered(x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """This rank's piece of the sum over the ranks, which has pieces of the lengths ``sizes``."""
    degree, own = group.size(), sizes[group.rank()]
    terms = exchanged(x, dim, sizes, [own] * degree, group)
    stacked = terms.view(*x.shape[:dim], degree, own, *x.shape[dim + 1 :])
    return stacked.sum(dim, dtype=x.dtype)


def copied(x: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """The tensor of rank ``source`` of the group."""
    moved = _sent(x, group)
    with _wait("broadcast"):
        dist.broadcast(moved, group=group, group_src=source)
    return moved.to(x.device)


def summed_at(x: Tensor, target: int, group: ProcessGroup) -> Tensor:
    """The sum over the ranks on rank ``target`` of the group, zeros on others."""
    moved = _sent(x, group)
    with _wait("reduce"):
        dist.reduce(moved, group=group, group_dst=target)
    return moved.to(x.device) if group.rank() == target else torch.zeros_like(x)


def shifted(x: Tensor, by: int, shape: Sequence[int], group: ProcessGroup) -> Tensor:
    """Sends ``x`` to the rank ``by`` places on, around the end, and receives one of ``shape`` from as many back."""
    return shifting(x, by, shape, group)()


def shifting(
    x: Tensor, by: int, shape: Sequence[int], group: ProcessGroup, tag: int = 0
) -> Callable[[], Tensor]:
    """Starts :func:`shifted`, and gives the function that waits for its end and has what came.

    Args:
        tag: Tells apart what is on its way between the same ranks at the same time.
    """
    rank, degree = group.rank(), group.size()
    own = _sent(x, group)
    came = own.new_empty(tuple(shape))
    messages = [
        dist.P2POp(dist.isend, own, group=group, group_peer=(rank + by) % degree, tag=tag),
        dist.P2POp(dist.irecv, came, group=group, group_peer=(rank - by) % degree, tag=tag),
    ]
    works = dist.batch_isend_irecv(messages)

    def arrived() -> Tensor:
        with _wait("shift"):
            for work in works:
                work.wait()
        return came.to(x.device)

    return arrived


@contextmanager
def _wait(name: str) -> Iterator[None]:
    with waiting(), marked(name):
        yield


def _sent(x: Tensor, group: ProcessGroup) -> Tensor:
    """A contiguous copy where the group's messages live: gloo's on the CPU."""
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else x.device
    return x.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def _arrived(came: Tensor, dim: int, like: Tensor) -> Tensor:
    """What lies with its pieces along dimension 0, with them along ``dim``, where ``like`` is."""
    return came.movedim(0, dim).contiguous().to(like.device)
