"""How much memory a device has for a rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch

LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says what the container of this process may use, if that is limited."""


def memory_nbytes(device: torch.device, ranks: int) -> int:
    """Bytes for each of ``ranks`` that share the device's memory: a GPU has one rank, a host all of its own."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(host, _limit() or host) // ranks


def _limit() -> int | None:
    try:
        text = LIMIT.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
