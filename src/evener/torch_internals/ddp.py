"""What DistributedDataParallel tells of its buckets, where it broadcasts buffers, and what it leaves alone:
``_get_ddp_logging_data``, ``_distributed_broadcast_coalesced``, the option that switches that broadcast off, and
``_set_params_and_buffers_to_ignore_for_model``.

The reducer is C++, and its collectives are seen nowhere in Python; what it logs about itself is all there is.
Broadcasts of buffers go through one method. Their option is public, but torch 2.13 renamed it.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

BROADCAST_BUFFERS = "_distributed_broadcast_coalesced"
"""The method of DDP that is called with the buffers, before a forward pass."""


def logged(model: DistributedDataParallel) -> Mapping[str, Any]:
    """What the reducer says of itself: ``bucket_sizes`` and, after the first steps, ``rebuilt_bucket_sizes``."""
    found: Mapping[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return found


def leave_out(module: nn.Module, names: Sequence[str]) -> None:
    """Has DDP, which is to wrap ``module``, neither compare nor sum the parameters of these names."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]


def no_buffer_broadcast() -> dict[str, Any]:
    """The option under its present name, for torch warns about the old one."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}
