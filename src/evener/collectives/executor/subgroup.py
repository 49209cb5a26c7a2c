"""A process group of some ranks of another, made by the ranks of that other alone.

``dist.new_group`` wants to be called by every rank of the world, or else (``use_local_synchronization``) names the
group after its ranks and the number of groups that each of them has: a rank that has made one more, as a leader does,
waits for the others under another name, and a group that was destroyed and is made again meets the addresses of the
first in the store. Here the first member draws a name that nobody has had.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from evener.distributed.hosts import all_gather
from evener.torch_internals.named_group import named_group


def subgroup(
    parent: dist.ProcessGroup, members: Sequence[int], timeout_seconds: float, backend: str | None = None
) -> dist.ProcessGroup | None:
    """A group of the ``members`` (ranks in ``parent``, ascending); None on a rank of no member.

    Its ``backend`` is that of ``parent`` if None.

    A collective call of the ranks of ``parent``, which may name different members if those do not overlap.
    """
    token = all_gather(secrets.token_hex(8), parent)[members[0]]
    world = dist.get_process_group_ranks(parent)
    ranks = [world[member] for member in members]
    is_member = dist.get_rank(parent) in members
    backend, timeout = backend or dist.get_backend_config(parent), timedelta(seconds=timeout_seconds)
    made = named_group(f"evener_{token}", ranks, backend, timeout) if is_member else None
    all_gather(
        None, parent
    )  # who gives its group back at once would break off those that still connect to it
    return made
