"""How much memory a device has for a rank."""

from __future__ import annotations

import math

import psutil
import torch

from evener.hardware import accelerators
from evener.hardware.cgroups import memory_limit


def memory_nbytes(device: torch.device, ranks: int) -> int:
    """Bytes for each of ``ranks`` that share the device's memory: a GPU has one rank, a host all of its own."""
    own = _own_memory(device)
    if own is not None:
        return own[1]
    host = psutil.virtual_memory().total
    return int(min(host, memory_limit() or host) // ranks)


def free_nbytes(device: torch.device, ranks: int, limit: int | None) -> float:
    """Bytes that a rank may still take, if each of ``ranks`` on the device's host takes as much.

    Of a GPU what its driver has, and what PyTorch's allocator keeps without need.

    Args:
        limit: What a container may use of the host's memory, of which it is seldom told anew.
    """
    own = _own_memory(device)
    if own is not None:
        return own[0] + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    resident = psutil.Process().memory_info().rss
    return free_of_host(psutil.virtual_memory().available, resident, limit, ranks)


def free_of_host(available: int, resident: int, limit: int | None, ranks: int) -> float:
    """Bytes for each of ``ranks``, from what the host has available and what a container may use, of which this
    process has ``resident`` already."""
    of_container = math.inf if limit is None else limit / ranks - resident
    return max(0.0, min(available / ranks, of_container))


def _own_memory(device: torch.device) -> tuple[int, int] | None:
    return accelerators.memory_of(device) if accelerators.is_accelerator(device) else None
