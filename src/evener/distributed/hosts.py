"""Finds which ranks of a process group share a host, by asking the ranks. Also helpers for process groups.

``LOCAL_WORLD_SIZE`` says how many processes a launcher started here, but not whether the ranks of *this group* are
among them. Two ranks share a host if they have the same kernel (boot id), host name, process namespace and network
namespace. The namespaces tell apart containers that share a kernel but cannot open each other's memory. They also make
network namespaces count as hosts, which tests use to emulate several hosts on one machine.
"""

from __future__ import annotations

import functools
import hashlib
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evener.torch_internals.process_groups import backends_of

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""PyTorch's function by its new name, if it has it: torch 2.13 warns about the old one."""
_DESTROYED_ALONE = {"gloo", "fake"}
"""Backends of which a rank destroys its groups without waiting for other ranks."""
_handled = id(None)
"""Identity of the exception that was being handled when the run began."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = (Path("/proc/self/ns/pid"), Path("/proc/self/ns/net"))


def host_identity() -> tuple[str, ...]:
    """Returns a value that is equal for two processes exactly if they share a host."""
    try:
        kernel = (_BOOT_ID.read_text().strip(), *(str(path.readlink()) for path in _NAMESPACES))
    except OSError:  # without /proc only the host name is known
        kernel = ()
    return (socket.gethostname(), *kernel)


@functools.cache
def host_token() -> str:
    """Returns a hash of `host_identity` with 16 characters."""
    return hashlib.sha256("\n".join(host_identity()).encode()).hexdigest()[:16]


def all_gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the ``value`` of every rank, ordered by rank in ``group``. All ranks must call this together."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def destroy(group: dist.ProcessGroup | None) -> None:
    """Destroys ``group`` (None: all groups). Does nothing if ``torch.distributed`` has been shut down already.

    While an exception is on its way, a group stays whose destruction waits for its other ranks, as with NCCL: they may
    be in a collective in which they wait for this rank, and the exception would never be told.
    """
    error = sys.exception()
    is_on_its_way = error is not None and id(error) != _handled
    if dist.is_initialized() and (not is_on_its_way or backends_of(group) <= _DESTROYED_ALONE):
        dist.destroy_process_group(group)


@contextmanager
def beside_a_handled_error() -> Iterator[None]:
    """Context of a run that may begin where an error is being handled, such as one that ended the run before: that
    error is not on its way through this one."""
    global _handled
    before, _handled = _handled, id(sys.exception())
    try:
        yield
    finally:
        _handled = before


def connected(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Waits for all ranks of the new gloo ``group``, and returns it. All ranks must call this together.

    Without this, a rank that destroys the group at once breaks the connection of ranks that are still connecting.
    """
    if dist.get_backend(group) == "gloo":
        dist.barrier(group)
    return group


def hosts_of(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each host (counted in ``group``), hosts ordered by their first rank.

    All ranks must call this together.
    """
    hosts: dict[tuple[str, ...], list[int]] = {}
    for rank, identity in enumerate(all_gather(host_identity(), group)):
        hosts.setdefault(identity, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())
