"""Creates a subgroup of a process group, with only the ranks of that group taking part.

``dist.new_group`` must be called by every rank of the world. With ``use_local_synchronization`` this is not so, but
then the group's name consists of its ranks and the number of groups that each of them has. A rank with one more group,
such as a leader, would wait under another name; and a group that is created again after it was destroyed would find the
old addresses in the store. Here the first member draws a random, unused name instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist

from evener.distributed.hosts import all_gather, destroy
from evener.torch_internals.process_groups import backends_of, named_group


def subgroup(
    parent: dist.ProcessGroup, members: Sequence[int], timeout_seconds: float, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Creates a process group of ``members`` (ranks in ``parent``, ascending). Returns None on ranks that are no
    members.

    All ranks of ``parent`` must call this together. They may pass different members, if these sets do not overlap.
    ``backend`` None takes that of ``parent``.

    The members are connected when this returns. Otherwise a rank of gloo that destroyed its group at once would
    disconnect ranks that still connect to it. NCCL connects in the first call of a group, which all of its ranks must
    make together: messages of two of them would wait for the others.
    """
    token = all_gather(secrets.token_hex(8), parent)[members[0]]
    world = dist.get_process_group_ranks(parent)
    ranks = [world[member] for member in members]
    is_member = dist.get_rank(parent) in members
    backend, timeout = backend or dist.get_backend_config(parent), timedelta(seconds=timeout_seconds)
    if not is_member:
        return None
    made = named_group(f"evener_{token}", ranks, backend, timeout)
    if "nccl" in backends_of(made):
        dist.barrier(made, device_ids=[torch.cuda.current_device()])
    else:
        all_gather(None, made)
    return made


def owned_subgroup(
    owner: ExitStack,
    parent: dist.ProcessGroup,
    members: Sequence[int],
    timeout_seconds: float,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Does the same as :func:`subgroup`, and destroys the group when ``owner`` is closed."""
    made = subgroup(parent, members, timeout_seconds, backend)
    if made is not None:
        owner.callback(destroy, made)
    return made
