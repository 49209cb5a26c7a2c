"""Sends several tensors as one message, because every message has a fixed cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evener.core.message_types import sendable
from evener.hardware.profile_ranges import named_range
from evener.hardware.timers import waiting

T = TypeVar("T")


def in_buckets(items: Iterable[T], nbytes: int, tensor_of: Callable[[T], Tensor]) -> Iterator[list[T]]:
    """Yields buckets of items whose tensors have the same layout, type and device, and so can be sent as one.

    A bucket has about ``nbytes`` bytes; a tensor that is larger is alone in its bucket.
    """
    open_buckets: dict[Any, list[T]] = {}
    sizes: dict[Any, int] = {}
    for item in items:
        tensor = tensor_of(item)
        size = 0 if tensor.is_sparse else tensor.nbytes
        if size >= nbytes:
            yield [item]
            continue
        kind = tensor.is_sparse, tensor.dtype, tensor.device
        open_buckets.setdefault(kind, []).append(item)
        sizes[kind] = sizes.get(kind, 0) + size
        if sizes[kind] >= nbytes:
            sizes[kind] = 0
            yield open_buckets.pop(kind)
    yield from open_buckets.values()


def sent_in_buckets(tensors: Iterable[Tensor], send: Callable[[Tensor], Any], nbytes: int) -> None:
    """Passes all dense ``tensors`` to ``send``, which changes them in place, in buckets of about ``nbytes`` bytes."""
    with waiting():
        for number, bucket in enumerate(in_buckets(tensors, nbytes, lambda tensor: tensor)):
            with named_range("message", number):
                sent_as_one(bucket, send)


def sent_as_one(tensors: Sequence[Tensor], send: Callable[[Tensor], Any]) -> None:
    """Concatenates ``tensors``, passes the result to ``send``, which changes it in place, and copies it back. The
    tensors must be dense, of one type and on one device. A single contiguous tensor is not copied."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        send(tensors[0])
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    send(flat)
    for tensor, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def broadcast_together(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None, source: int, nbytes: int
) -> None:
    """Broadcasts the tensors of rank ``source`` of ``group``, in buckets; None for all ranks. All ranks must call this
    together."""
    sent_in_buckets(
        tensors, lambda tensor: dist.broadcast(sendable(tensor), group=group, group_src=source), nbytes
    )
