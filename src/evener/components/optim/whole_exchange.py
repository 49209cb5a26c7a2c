"""Exchanges lists of tensors of any types and lengths between ranks, in one message each way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from evener.hardware.timers import waiting

_LINE = 16
"""Alignment of the tensors in a message, in bytes."""

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def start_exchange(
    group: dist.ProcessGroup,
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[Form]],
    device: torch.device,
) -> Callable[[], list[list[Tensor]]]:
    """Starts to send tensors to each rank of ``group``, and to receive as many as it sends. All its ranks must call
    this together.

    Args:
        outgoing: The tensors for each rank.
        incoming: The forms of the tensors that each rank sends.
        device: The device of the message.

    Returns:
        A function that waits, and returns the received tensors of each rank: views of one message.
    """
    sent = [[(tuple(each.shape), each.dtype) for each in tensors] for tensors in outgoing]
    flat, came = (
        torch.empty(sum(map(_nbytes, forms)), dtype=torch.uint8, device=device) for forms in (sent, incoming)
    )
    for tensors, places in zip(outgoing, _views(flat, sent), strict=True):
        for tensor, place in zip(tensors, places, strict=True):
            place.copy_(tensor)
    counts = [_nbytes(forms) for forms in incoming], [_nbytes(forms) for forms in sent]
    work = dist.all_to_all_single(came, flat, *counts, group=group, async_op=True)

    def wait() -> list[list[Tensor]]:
        with waiting():
            assert work is not None
            work.wait()
        return _views(came, incoming)

    return wait


def _nbytes(forms: Sequence[Form]) -> int:
    return sum(-(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE for shape, dtype in forms)


def _views(flat: Tensor, forms: Sequence[Sequence[Form]]) -> list[list[Tensor]]:
    """Returns the tensors of each rank in a message."""
    found, start = list[list[Tensor]](), 0
    for of_rank in forms:
        views = []
        for shape, dtype in of_rank:
            length = math.prod(shape) * dtype.itemsize
            views.append(flat[start : start + length].view(dtype).view(shape))
            start += _nbytes([(shape, dtype)])
        found.append(views)
    return found
