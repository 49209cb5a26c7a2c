"""The members of a subgroup are connected before a message goes between some of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.collectives.executor import subgroup as module
from evener.collectives.executor.subgroup import subgroup
from evener.distributed.hosts import destroy


def first_calls(backend: str, members: list[int]) -> tuple[bool, list[tuple[bool, Any]]]:
    """Makes a subgroup; returns whether this rank is a member, and the calls that connect a group: whether it is the
    subgroup, and of which devices."""
    called = list[tuple[Any, Any]]()
    gather, barrier = dist.all_gather_object, dist.barrier

    def gathered(found: Any, value: Any, group: Any) -> None:
        called.append((group, None))
        gather(found, value, group=group)

    def met(group: Any, device_ids: Any) -> None:
        called.append((group, device_ids))
        barrier(group)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_gather_object", gathered)
        patched.setattr(dist, "barrier", met)
        patched.setattr(torch.cuda, "current_device", lambda: 5)
        patched.setattr(module, "backends_of", lambda group: {backend})
        made = subgroup(dist.group.WORLD, members, 20)
    found = [(group is made, devices) for group, devices in called if group is not dist.group.WORLD]
    if made is not None:
        destroy(made)
    return made is not None, found


@pytest.mark.parametrize(("backend", "devices"), [("gloo", None), ("nccl", [5])])
def test_all_members_make_the_first_call_together(
    ranks: Any, backend: str, devices: list[int] | None
) -> None:
    """As torch asks of a group of NCCL: otherwise two that send each other messages would wait for the third one."""
    assert ranks(3).run(first_calls, backend, [0, 1, 2]) == [(True, [(True, devices)])] * 3
    of_some = ranks(3).run(first_calls, backend, [0, 2])
    assert of_some == [(True, [(True, devices)]), (False, []), (True, [(True, devices)])]
