"""How much memory is in use, and was at most since somebody last asked: for every step, so that it must cost little.

A GPU's allocator keeps these numbers itself. On a CPU PyTorch's allocator keeps none, but Linux knows the most that a
process had in memory, and begins anew when ``5`` is written to ``/proc/self/clear_refs`` (man proc): 12 microseconds in
all. That is the whole process, Python and libraries with it. Elsewhere the most since the process began is known.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch

from evener.memory.accounting import Accounting


class MemoryUse(NamedTuple):
    """Bytes."""

    held: int
    """In use now."""
    peak: int
    """The most since the last time."""
    reserved: int = 0
    """What the allocator of a GPU keeps; what of that is not in use is cached, or lost between what is. 0 elsewhere."""


NOTHING = MemoryUse(0, 0)


class Gauge(Protocol):
    """Reads the memory of one device or process."""

    def lap(self) -> MemoryUse:
        """Since the last call."""


class OfCard:
    """What PyTorch's allocator has of a GPU. The host does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lap(self) -> MemoryUse:
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        held, reserved = (stats.get(f"{name}_bytes.all.current", 0) for name in ("allocated", "reserved"))
        return MemoryUse(held, stats.get("allocated_bytes.all.peak", 0), reserved)


class Counted:
    """What an accounting counts."""

    def __init__(self, account: Accounting) -> None:
        self._account = account

    def lap(self) -> MemoryUse:
        found = MemoryUse(self._account.held, self._account.peak)
        self._account.reset_peak()
        return found


class Resident:
    """What a process has in memory, on Linux."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear = -1
        with suppress(OSError):  # where that is not permitted, the peak is that of the whole life
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)

    def lap(self) -> MemoryUse:
        text = os.pread(self._status, 4096, 0)
        found = MemoryUse(_kib(text, b"VmRSS:"), _kib(text, b"VmHWM:"))
        if self._clear >= 0:
            with suppress(OSError):
                os.write(self._clear, b"5")
        return found

    def __del__(self) -> None:
        for descriptor in (self._status, self._clear):
            if descriptor >= 0:
                os.close(descriptor)


class Lifelong:
    """The most that a process ever had, in the words of POSIX."""

    def lap(self) -> MemoryUse:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return MemoryUse(peak, peak)


def gauge_of(device: torch.device, account: Accounting | None = None) -> Gauge:
    """That of a device; of what ``account`` counts, if something is counted."""
    if account is not None:
        return Counted(account)
    if device.type == "cuda":
        return OfCard(device)
    try:
        return Resident()
    except OSError:
        return Lifelong()


def _kib(text: bytes, name: bytes) -> int:
    """Bytes, from a line such as ``VmRSS:    1234 kB``; 0 without one."""
    start = text.find(name)
    return int(text[start + len(name) :].split(None, 1)[0]) * 1024 if start >= 0 else 0
