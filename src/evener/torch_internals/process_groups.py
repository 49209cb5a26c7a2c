"""Names of process groups: one by a name of one's own, the store of the default one, and one that has nobody in it.

- ``_get_default_store`` gives the store through which a process group that is there already was made. Nothing public
  leads to it, and in a script of the user's own it is the only place that all ranks are known to share. A store of
  Evener's own would need an address that all hosts reach.
- ``_new_process_group_helper``, ``_world`` and ``GroupName`` make a group under a given name, and count groups.
  ``dist.new_group`` chooses the name itself. Where only the members of a group call it, that name depends on how many
  groups each of them has been in, so that members wait for each other under different names.
- ``FakeStore`` of ``torch.testing._internal`` belongs to the backend ``fake``, a group with nobody at the other end.
  Its collectives are over at once and leave tensors as they are, which is all that tensors without numbers can tell.
  Its module registers the backend, and is imported when such a group is opened.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d

_world: Any = distributed_c10d._world
_GroupName: Any = getattr(distributed_c10d, "GroupName", str)

FAKE_BACKEND = "fake"


def default_store() -> Store:
    """Returns the store of the default process group.

    Raises:
        ValueError: If there is no process group.
    """
    return distributed_c10d._get_default_store()


def named_group(name: str, ranks: Sequence[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Does what ``dist.new_group`` does once it has chosen a name; the members alone call it.

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
    """Counts the process groups that this process is in; torch has no other count."""
    return len(_world.pg_map)


def open_fake_group(rank: int, world_size: int) -> None:
    """Makes this process rank ``rank`` of a world that is not there."""
    fakes = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group(FAKE_BACKEND, store=fakes.FakeStore(), rank=rank, world_size=world_size)
