"""How large the buckets are in which DDP sums gradients while backward still computes others.

The best size depends on how fast an all-reduce is against backward. The first is known where all-reduces were
measured; the second is not before the first step, when DDP has to be built. So it is assumed where the size matters
most: that backward takes as long as the sum of all gradients. If it takes longer, it hides any of these buckets but the
last, and smaller ones would gain a part of that one; if it takes less, the links are busy from the first bucket on,
whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable

from evener.collectives.tuning.select import bucket_size

DEFAULT_BUCKET_NBYTES = 25 * 2**20
"""PyTorch's own."""


def bucket_nbytes(
    seconds_of: Callable[[int], float | None], total_nbytes: int, backward_seconds: float | None = None
) -> int:
    """The size of buckets, in bytes, that leaves the least of the all-reduce for after backward.

    Args:
        seconds_of: How long an all-reduce of a size in bytes takes, as ``AllReduce.expected_seconds`` says; None if
            that is not known, and then the size is ``DEFAULT_BUCKET_NBYTES``.
        total_nbytes: Size of all gradients.
        backward_seconds: How long backward takes without communication; as long as one all-reduce of all if None.
    """
    all_at_once = seconds_of(total_nbytes) if total_nbytes > 0 else None
    if all_at_once is None:
        return DEFAULT_BUCKET_NBYTES
    backward = all_at_once if backward_seconds is None else backward_seconds
    return bucket_size(total_nbytes, backward, lambda nbytes: seconds_of(nbytes) or 0.0)
