"""Names of DistributedDataParallel: what it tells of its buckets, keeps of them, broadcasts and leaves alone.

- ``_get_ddp_logging_data`` is all there is to see of the reducer's collectives: it is C++, and Python sees none.
- ``_rebuild_buckets`` makes buckets anew before the second forward pass. The order of gradients, by which it does, is
  read from the memory of a tensor in C++, and a fake tensor has none. The new buckets have as many bytes in all.
- ``_distributed_broadcast_coalesced`` is the method through which buffers are broadcast. The option that switches that
  off is public, but torch 2.13 renamed it.
- ``_set_params_and_buffers_to_ignore_for_model`` names what DDP leaves alone, for which it has no option.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BROADCAST_BUFFERS = "_distributed_broadcast_coalesced"
"""The method of DDP that is called with the buffers, before a forward pass."""


def logged(model: DistributedDataParallel) -> Mapping[str, Any]:
    """Returns what the reducer says of itself: ``bucket_sizes`` and, after first steps, ``rebuilt_bucket_sizes``."""
    found: Mapping[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return found


def leave_out(module: nn.Module, names: Sequence[str]) -> None:
    """Has DDP, which is to wrap ``module``, neither compare nor sum the parameters of these names."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]


def no_buffer_broadcast() -> dict[str, Any]:
    """Returns the option under its present name, for torch warns about the old one."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


@contextmanager
def buckets_kept() -> Iterator[None]:
    """Has DDP leave its buckets in the block as they were made first."""
    with mock.patch.object(dist.Reducer, "_rebuild_buckets", return_value=False):
        yield
