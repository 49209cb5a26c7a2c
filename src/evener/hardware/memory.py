"""How much memory a device has for a rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from evener.hardware.cgroups import memory_limit
from evener.hardware.kernel_files import text_of

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MEMINFO, _STATM = Path("/proc/meminfo"), Path("/proc/self/statm")


def memory_nbytes(device: torch.device, ranks: int) -> int:
    """Bytes for each of ``ranks`` that share the device's memory: a GPU has one rank, a host all of its own."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    host = _PAGE * os.sysconf("SC_PHYS_PAGES")
    return min(host, memory_limit() or host) // ranks


def free_nbytes(device: torch.device, ranks: int) -> float:
    """Bytes that a rank may still take, if each of ``ranks`` on the device's host takes as much; infinite if unknown.

    Of a GPU what its driver has, and what PyTorch's allocator keeps without need.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_of_host(text_of(_MEMINFO), text_of(_STATM), memory_limit(), ranks)


def free_of_host(meminfo: str, statm: str, limit: int | None, ranks: int) -> float:
    """Bytes for each of ``ranks``, from the kernel's files (man proc) and a container's limit; infinite without any."""
    lines = (line.split() for line in meminfo.splitlines())
    available = next((int(words[1]) * 1024 for words in lines if words[:1] == ["MemAvailable:"]), None)
    resident = int(statm.split()[1]) * _PAGE if statm else 0
    of_host = float("inf") if available is None else available / ranks
    of_container = float("inf") if limit is None else limit / ranks - resident
    return max(0.0, min(of_host, of_container))
