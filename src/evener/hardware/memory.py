"""How much memory a device has for a rank."""

from __future__ import annotations

import os

import torch

from evener.hardware.cgroups import memory_limit


def memory_nbytes(device: torch.device, ranks: int) -> int:
    """Bytes for each of ``ranks`` that share the device's memory: a GPU has one rank, a host all of its own."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(host, memory_limit() or host) // ranks
