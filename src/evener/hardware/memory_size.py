"""Total and free memory of a device, per rank."""

from __future__ import annotations

import math

import psutil
import torch

from evener.hardware import accelerators
from evener.hardware.cgroups import memory_limit
from evener.hardware.memory.malloc import kept_nbytes


def memory_nbytes(device: torch.device, ranks: int) -> int:
    """Returns the memory for each rank in bytes. A GPU has one rank; the host's memory is shared by its ``ranks``."""
    own = _own_memory(device)
    if own is not None:
        return own[1]
    host = psutil.virtual_memory().total
    return int(min(host, memory_limit() or host) // ranks)


def free_nbytes(device: torch.device, ranks: int, limit: int | None) -> float:
    """Returns the bytes that a rank may still allocate, if each of ``ranks`` on the host allocates as much.

    What the driver or the host reports as free, plus what PyTorch's allocator for a GPU has cached, or the C library
    keeps for this process.

    Args:
        limit: Memory limit of the container in bytes; None if there is none. The caller reads it once, as it rarely
            changes.
    """
    own = _own_memory(device)
    if own is not None:
        return own[0] + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    resident, kept = psutil.Process().memory_info().rss, kept_nbytes()
    return kept + free_of_host(psutil.virtual_memory().available, resident, limit, ranks)


def free_of_host(available: int, resident: int, limit: int | None, ranks: int) -> float:
    """Returns the free bytes for each of ``ranks``: a rank's part of the host's available memory, or of the container's
    limit less the ``resident`` bytes of this process, whichever is smaller."""
    of_container = math.inf if limit is None else limit / ranks - resident
    return max(0.0, min(available / ranks, of_container))


def _own_memory(device: torch.device) -> tuple[int, int] | None:
    return accelerators.memory_of(device) if accelerators.is_accelerator(device) else None
