"""How much memory is in use, and was at most since somebody last asked: for every step, so that it must cost little.

A GPU's allocator keeps these numbers itself. On a CPU PyTorch's allocator keeps none, but Linux knows the most that a
process had in memory, and begins anew when ``5`` is written to ``/proc/self/clear_refs`` (man proc): 12 microseconds in
all. That is the whole process, Python and libraries with it. Elsewhere the most since the process began is known.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch

from evener.hardware.memory.malloc import kept_nbytes
from evener.hardware.memory.step_usage import Lap

Stats = Mapping[str, Any]
_READ = ("allocated", "reserved", "inactive_split")


PROCESS_SECONDS = 0.05
"""Between two readings of a process: the kernel sums up its memory for each, 10 to 35 microseconds."""


class Gauge(Protocol):
    """Reads the memory of one device or process."""

    every_seconds: float
    """How often it is worth to be read; 0 for always."""

    def lap(self) -> Lap:
        """Since the last call."""

    def kept(self) -> int:
        """Bytes of what is held that were freed, and are kept for what comes next; not for every step."""

    def empty(self) -> None:
        """Gives back to the device what the allocator keeps, for which the device waits."""


class OfCard:
    """What PyTorch's allocator has of a device. The host does not wait for it.

    Raises:
        RuntimeError: If the allocator of this kind of device tells nothing, as that of MPS before torch 2.14.
    """

    every_seconds = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module = torch.get_device_module(device)
        nested = getattr(module, "memory_stats_as_nested_dict", None)  # of CUDA, ROCm and XPU
        # Flat names for all of it, which torch.accelerator gives, take 80 microseconds.
        self._read = _flat if nested is None else nested
        self.lap()

    def lap(self) -> Lap:
        stats = self._read(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        held, reserved, split = (_of(stats, f"{name}_bytes") for name in _READ)
        return Lap(
            held.get("current", 0),
            held.get("peak", 0),
            reserved.get("current", 0),
            split.get("current", 0),
            stats.get("num_alloc_retries", 0),
            stats.get("num_ooms", 0),
        )

    def empty(self) -> None:
        torch.accelerator.empty_cache()

    def kept(self) -> int:
        return 0  # the allocator counts that as reserved, and not as held


class Resident:
    """What a process has in memory, on Linux."""

    every_seconds = PROCESS_SECONDS

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear = -1
        with suppress(OSError):  # where that is not permitted, the peak is that of the whole life
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)

    def lap(self) -> Lap:
        text = os.pread(self._status, 4096, 0)
        found = Lap(_kib(text, b"VmRSS:"), _kib(text, b"VmHWM:"))
        if self._clear >= 0:
            with suppress(OSError):
                os.write(self._clear, b"5")
        return found

    def kept(self) -> int:
        return kept_nbytes()

    def empty(self) -> None:
        pass  # the C library's is the process's own

    def __del__(self) -> None:
        for descriptor in (self._status, self._clear):
            if descriptor >= 0:
                os.close(descriptor)


class Lifelong:
    """The most that a process ever had, in the words of POSIX."""

    every_seconds = PROCESS_SECONDS

    def lap(self) -> Lap:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return Lap(peak, peak)

    def kept(self) -> int:
        return kept_nbytes()

    def empty(self) -> None:
        pass  # the C library's is the process's own


def gauge_of(device: torch.device) -> Gauge:
    """That of a device; of the process where the device tells nothing."""
    if device.type not in ("cpu", "meta"):
        with suppress(RuntimeError):
            return OfCard(device)
    try:
        return Resident()
    except OSError:
        return Lifelong()


def _flat(device: torch.device) -> Stats:
    """As those that are nested, from the one form that every kind of device has."""
    stats = torch.accelerator.memory_stats(device)
    nested: dict[str, Any] = {name: stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}
    for name in (f"{each}_bytes" for each in _READ):
        nested[name] = {"all": {when: stats.get(f"{name}.all.{when}", 0) for when in ("current", "peak")}}
    return nested


def _of(stats: Stats, name: str) -> Mapping[str, int]:
    """Nothing before the first allocation."""
    found: Mapping[str, int] = stats.get(name, {}).get("all", {})
    return found


def _kib(text: bytes, name: bytes) -> int:
    """Bytes, from a line such as ``VmRSS:    1234 kB``; 0 without one."""
    start = text.find(name)
    return int(text[start + len(name) :].split(None, 1)[0]) * 1024 if start >= 0 else 0
