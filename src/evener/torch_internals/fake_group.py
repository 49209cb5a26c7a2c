"""A process group with nobody at the other end: the backend ``fake`` of ``torch.testing._internal``.

Its collectives are over at once and leave tensors as they are, which is all that tensors without numbers can tell.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

BACKEND = "fake"


def open_fake_group(rank: int, world_size: int) -> None:
    """Makes this process rank ``rank`` of a world that is not there."""
    dist.init_process_group(BACKEND, store=FakeStore(), rank=rank, world_size=world_size)
