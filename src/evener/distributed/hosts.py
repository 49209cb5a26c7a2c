"""Which ranks of a group share a host: asked of the ranks, not taken from the environment.

``LOCAL_WORLD_SIZE`` says how many processes a launcher started here; whether the ranks of *this group* are
among them it does not say. Two ranks share a host here when they run under the same kernel (boot id), with
the same host name, and see the same processes and the same network. The last two keep containers apart that
share a kernel but cannot open each other's memory, and make network namespaces count as hosts, which is how
several hosts are rehearsed on one machine.
"""

from __future__ import annotations

import functools
import hashlib
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = (Path("/proc/self/ns/pid"), Path("/proc/self/ns/net"))


def host_identity() -> tuple[str, ...]:
    """What two processes have in common exactly when they share a host."""
    try:
        kernel = (_BOOT_ID.read_text().strip(), *(str(path.readlink()) for path in _NAMESPACES))
    except OSError:  # no /proc: the name is all there is
        kernel = ()
    return (socket.gethostname(), *kernel)


@functools.cache
def host_token() -> str:
    """`host_identity` in 16 characters."""
    return hashlib.sha256("\n".join(host_identity()).encode()).hexdigest()[:16]


def all_gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """``value`` of every rank of ``group``, by rank in the group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def destroy(group: dist.ProcessGroup | None) -> None:
    """Gives ``group`` back, or all there are if None, unless ``torch.distributed`` has been shut down before."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def connected(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The new ``group``, when all of its ranks have come: gloo breaks off a rank that still connects to one which gives
    the group back at once."""
    if dist.get_backend(group) == "gloo":
        dist.barrier(group)
    return group


def hosts_of(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """The ranks of ``group`` (counted in the group), by host in order of first rank. A collective call."""
    hosts: dict[tuple[str, ...], list[int]] = {}
    for rank, identity in enumerate(all_gather(host_identity(), group)):
        hosts.setdefault(identity, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())
