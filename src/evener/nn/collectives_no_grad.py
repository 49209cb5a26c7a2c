"""Collectives on plain tensors, without autograd; :mod:`evener.nn.collectives` makes them differentiable.

They use only operations that gloo and NCCL have in common. There is no common operation that gathers pieces of unequal
length, or that scatters sums of such pieces. So these are composed::

    gathered    one all_gather for pieces of equal length, else a broadcast of each piece into its place
    scattered   an all_to_all of the terms, which the receiver adds in order of rank
    shifted     a send and a receive that are started together, so that no order of ranks can block

Every wait is marked for the watchdog, and does not count as the rank's own computing time.
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
from evener.core.message_types import sendable
from evener.core.phase_marks import marked
from evener.hardware.timers import waiting

_MOST_DIMS = 64
"""torch's limit for the number of dimensions."""
_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


class Description(NamedTuple):
    """A rank's description of its tensor, exchanged before the tensor is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    """True if backward will pass through the tensor."""
    numbers: tuple[int, ...]
    """Further numbers of the caller, such as lengths of pieces."""

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {self.shape}, {'with' if self.trained else 'without'} gradient"


def descriptions(x: Tensor, group: ProcessGroup, numbers: Sequence[int] = ()) -> list[Description]:
    """Exchanges and returns the descriptions of every rank's tensor, in order of rank. The host waits.

    All ranks must call this together, with equally many ``numbers``.
    """
    trained = int(x.requires_grad and torch.is_grad_enabled())
    padding = [0] * (_MOST_DIMS - x.dim())
    own = [_DTYPES.index(x.dtype), trained, x.dim(), *x.shape, *padding, *numbers]
    said = gathered(torch.tensor([own], device=x.device), 0, [1] * group.size(), group).tolist()
    return [
        Description(tuple(sizes[:dims]), _DTYPES[kind], bool(trains), tuple(sizes[_MOST_DIMS:]))
        for kind, trains, dims, *sizes in said
    ]


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the sum over the ranks, bitwise the same on all; float16 and bfloat16 are added in float32."""
    moved = _sent(x, group)
    with _wait("all_reduce"):
        added_in_float32(moved, lambda wide: dist.all_reduce(wide, group=group))
    return moved.to(x.device)


def largest(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the elementwise maximum over the ranks."""
    moved = _sent(x, group)
    with _wait("all_reduce"):
        dist.all_reduce(moved, dist.ReduceOp.MAX, group=group)
    return moved.to(x.device)


def gathered(x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Concatenates the pieces of all ranks, of the lengths ``sizes``, along ``dim``."""
    own = _sent(x.movedim(dim, 0), group)
    whole = own.new_empty(sum(sizes), *own.shape[1:])
    pieces = torch.split(whole, list(sizes))
    with _wait("all_gather"):
        if len({*sizes}) == 1:
            dist.all_gather(list(map(sendable, pieces)), sendable(own), group=group)
        else:
            pieces[group.rank()].copy_(own)
            _broadcast_each(pieces, group)
    return _arrived(whole, dim, x)


def _broadcast_each(pieces: Sequence[Tensor], group: ProcessGroup) -> None:
    works = [
        dist.broadcast(sendable(piece), group=group, group_src=source, async_op=True)
        for source, piece in enumerate(pieces)
        if piece.numel()
    ]
    for work in works:
        work.wait()


def exchanged(
    x: Tensor, dim: int, splits: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> Tensor:
    """Cuts ``x`` along ``dim`` into pieces of lengths ``splits`` and sends one to each rank. Concatenates the received
    pieces, of lengths ``received``, in order of rank."""
    own = _sent(x.movedim(dim, 0), group)
    came = own.new_empty(sum(received), *own.shape[1:])
    with _wait("all_to_all"):
        dist.all_to_all_single(sendable(came), sendable(own), list(received), list(splits), group=group)
    return _arrived(came, dim, x)


def scattered(x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Returns this rank's piece of the sum over the ranks. The sum is cut along ``dim`` into lengths ``sizes``."""
    degree, own = group.size(), sizes[group.rank()]
    terms = exchanged(x, dim, sizes, [own] * degree, group)
    stacked = terms.view(*x.shape[:dim], degree, own, *x.shape[dim + 1 :])
    return stacked.sum(dim, dtype=x.dtype)


def copied(x: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """Returns the tensor of rank ``source`` of the group."""
    moved = _sent(x, group)
    with _wait("broadcast"):
        dist.broadcast(sendable(moved), group=group, group_src=source)
    return moved.to(x.device)


def summed_at(x: Tensor, target: int, group: ProcessGroup) -> Tensor:
    """Returns the sum over the ranks on rank ``target`` of the group, and zeros on the others; float16 and bfloat16 are
    added in float32."""
    moved = _sent(x, group)
    with _wait("reduce"):
        added_in_float32(moved, lambda wide: dist.reduce(wide, group=group, group_dst=target))
    return moved.to(x.device) if group.rank() == target else torch.zeros_like(x)


def shifted(x: Tensor, by: int, shape: Sequence[int], group: ProcessGroup) -> Tensor:
    """Sends ``x`` to the rank ``by`` places ahead, and returns the tensor of ``shape`` from the rank ``by`` places
    back; ranks form a ring."""
    return shifting(x, by, shape, group)()


def shifting(
    x: Tensor, by: int, shape: Sequence[int], group: ProcessGroup, tag: int = 0
) -> Callable[[], Tensor]:
    """Starts :func:`shifted`. Returns a function that waits for its end and returns the received tensor.

    Args:
        tag: Distinguishes messages that are under way between the same ranks at the same time.
    """
    rank, degree = group.rank(), group.size()
    own = _sent(x, group)
    came = own.new_empty(tuple(shape))
    messages = [
        dist.P2POp(dist.isend, sendable(own), group=group, group_peer=(rank + by) % degree, tag=tag),
        dist.P2POp(dist.irecv, sendable(came), group=group, group_peer=(rank - by) % degree, tag=tag),
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
    """Returns a detached, contiguous copy on the device of the group's messages: the CPU for gloo."""
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else x.device
    return x.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def _arrived(came: Tensor, dim: int, like: Tensor) -> Tensor:
    """Moves dimension 0 of a received tensor to ``dim``, and the tensor to the device of ``like``."""
    return came.movedim(0, dim).contiguous().to(like.device)
