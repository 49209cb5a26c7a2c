"""Keeping DistributedDataParallel from making its buckets anew before its second forward pass: ``_rebuild_buckets``.

The order of gradients, by which it would, is read from the memory of a tensor in C++, and a fake tensor has none. The
new buckets have as many bytes in all.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist


@contextmanager
def buckets_kept() -> Iterator[None]:
    """In the block DDP leaves its buckets as they were made first."""
    with mock.patch.object(dist.Reducer, "_rebuild_buckets", return_value=False):
        yield
