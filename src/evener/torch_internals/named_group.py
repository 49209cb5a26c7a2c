"""Process groups by a name of one's own, and their number: ``_new_process_group_helper``, ``_world``, ``GroupName``.

``dist.new_group`` chooses the name itself. Where only the members of a group call it, that name depends on how many
groups each of them has been in, so that members wait for each other under different names.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from evener.torch_internals.default_store import default_store

_world: Any = distributed_c10d._world
_GroupName: Any = getattr(distributed_c10d, "GroupName", str)


def named_group(name: str, ranks: Sequence[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """What ``dist.new_group`` does once it has chosen a name; called by the members alone.

    Args:
        name: One that no group has had, the same on all members.
        ranks: The members, of which this rank is one, ascending.
        backend: As ``dist.Backend`` takes it, or for each type of device, ``"cpu:gloo,cuda:gloo"``.
    """
    # Of several, torch takes none for the default where a module has registered its fake backend, and warns of it.
    backends = {each.rpartition(":")[2] for each in backend.split(",")}
    made: dist.ProcessGroup
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backends.pop() if len(backends) == 1 else backend),
        default_store(),
        _GroupName(name),
        timeout=timeout,
        group_desc="evener_collectives",
    )
    _world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def groups_open() -> int:
    """Number of process groups that this process is in; torch has no other count."""
    return len(_world.pg_map)
