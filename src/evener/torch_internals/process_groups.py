"""Private names of process groups: groups with a given name, the default group's store, and the fake backend.

- ``_get_default_store`` returns the store with which the default process group was made. It has no public name. In a
  user's own script it is the only place that all ranks are known to share. A new store would need an address that all
  hosts can reach.
- ``_new_process_group_helper``, ``_world`` and ``GroupName`` make a group with a given name, and count groups.
  ``dist.new_group`` chooses the name itself. If only the members of a group call it, that name depends on how many
  groups each member has been in, so members may wait for each other under different names. If the default group is
  bound to a device (``bound_device_id``), torch splits the new NCCL communicator off its own, for which NCCL waits for
  all ranks of the default group (pytorch/pytorch#129965), so that is put aside meanwhile.
- ``_world.pg_backend_config`` has the backends of all groups that are open, for which torch has no public function.
- Operators of ``torch.ops.c10d`` take a group as a boxed object, which ``ProcessGroup.unbox`` opens, and functional
  collectives take its name, which ``_resolve_process_group`` looks up.
- ``FakeStore`` of ``torch.testing._internal`` belongs to the backend ``fake``, a group without other processes. Its
  collectives return at once and do not change tensors, which is enough for fake tensors. Its module registers the
  backend, and is imported when such a group is opened.

Tested with torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d

_world: Any = distributed_c10d._world
_resolve: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009 # torch does not export it
_GroupName: Any = getattr(distributed_c10d, "GroupName", str)

FAKE_BACKEND = "fake"


def default_store() -> Store:
    """Returns the store of the default process group.

    Raises:
        ValueError: If there is no process group.
    """
    return distributed_c10d._get_default_store()


def named_group(name: str, ranks: Sequence[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Makes a process group with a given name. All members must call this together; other ranks do not call it.

    Args:
        name: A name that no group has had, the same on all members.
        ranks: The members in ascending order. This rank is one of them.
        backend: A backend as for ``dist.Backend``, or one for each type of device, such as ``"cpu:gloo,cuda:gloo"``.
        timeout: The timeout of the group's collectives.
    """
    # If a fake backend is registered, torch finds no default among several backends, and warns about it.
    backends = {each.rpartition(":")[2] for each in backend.split(",")}
    made: dist.ProcessGroup
    with _unbound(distributed_c10d._get_default_group()):
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


@contextmanager
def _unbound(group: dist.ProcessGroup) -> Iterator[None]:
    """Within the context, ``group`` is bound to no device, so that no communicator is split off its own."""
    device, group.bound_device_id = group.bound_device_id, None
    try:
        yield
    finally:
        group.bound_device_id = device


def backends_of(group: dist.ProcessGroup | None) -> set[str]:
    """Returns the names of the backends of ``group``; None for those of all groups that this process is in."""
    all_of_them: dict[dist.ProcessGroup, str] = _world.pg_backend_config
    texts = all_of_them.values() if group is None else [dist.get_backend_config(group)]
    return {each.rpartition(":")[2] for text in texts for each in text.split(",")}


def groups_open() -> int:
    """Returns the number of process groups that this process is in. Torch has no public count."""
    return len(_world.pg_map)


def open_fake_group(rank: int, world_size: int) -> None:
    """Opens a default process group with the fake backend: this process is ``rank``, the other ranks do not exist."""
    fakes = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group(FAKE_BACKEND, store=fakes.FakeStore(), rank=rank, world_size=world_size)


def group_among(arguments: Sequence[Any]) -> dist.ProcessGroup | None:
    """Returns the process group among the arguments of a collective operator. None if there is none."""
    for argument in arguments:
        if isinstance(argument, str):
            try:
                named: dist.ProcessGroup = _resolve(argument)
            except (LookupError, RuntimeError):
                continue  # the name of a reduction
            return named
        if isinstance(argument, torch.ScriptObject):
            try:
                unboxed: dist.ProcessGroup = dist.ProcessGroup.unbox(argument)
            except RuntimeError:
                continue  # another boxed object
            return unboxed
    return None
