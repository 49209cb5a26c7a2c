"""Chooses the size of DDP's gradient buckets, which are summed while backward still computes other gradients.

The best size depends on the time of an all-reduce compared with backward. The time of an all-reduce may have been
measured. The time of backward is unknown, as DDP is built before the first step. So backward is assumed to take as long
as the sum of all gradients, the case in which the size matters most. If backward takes longer, it hides all buckets but
the last, and smaller buckets would save only a part of that one. If it takes less, the links are busy from the first
bucket on, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable

from evener.collectives.tuning.select import bucket_size

DEFAULT_BUCKET_NBYTES = 25 * 2**20
"""PyTorch's default bucket size."""


def bucket_nbytes(
    seconds_of: Callable[[int], float | None], total_nbytes: int, backward_seconds: float | None = None
) -> int:
    """Returns the bucket size, in bytes, for which the least communication time remains after backward.

    Args:
        seconds_of: Returns the time of an all-reduce of a size in bytes, as ``AllReduce.expected_seconds`` does. If it
            returns None, the result is ``DEFAULT_BUCKET_NBYTES``.
        total_nbytes: Size of all gradients, in bytes.
        backward_seconds: Time of backward without communication; None for the time of one all-reduce of all gradients.
    """
    all_at_once = seconds_of(total_nbytes) if total_nbytes > 0 else None
    if all_at_once is None:
        return DEFAULT_BUCKET_NBYTES
    backward = all_at_once if backward_seconds is None else backward_seconds
    return bucket_size(total_nbytes, backward, lambda nbytes: seconds_of(nbytes) or 0.0)
