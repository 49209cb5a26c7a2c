"""Reads the memory in use and its peak since the last reading, fast enough to do so in every step.

A GPU's allocator keeps these numbers. On a CPU PyTorch's allocator has none, but Linux knows the peak of a process's
resident memory, and resets it when ``5`` is written to ``/proc/self/clear_refs`` (man proc): 12 microseconds in all.
This includes the whole process, with Python and libraries. On other systems only the peak since the start of the
process is known.
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
"""Minimum time between two readings, in seconds. For each, the kernel needs 10 to 35 microseconds, and PyTorch's
statistics of a GPU as much. Peaks are kept between readings, so that none is lost."""


class Gauge(Protocol):
    """Reads the memory of one device or process."""

    every_seconds: float
    """Minimum time between two readings, in seconds; 0 if it may be read in every step."""

    def lap(self) -> Lap:
        """Reads the memory, with the peak since the last call."""

    def kept(self) -> int:
        """Returns the bytes that were freed but still count as held. Too slow to be called in every step."""

    def empty(self) -> None:
        """Releases the allocator's cache to the device. This synchronizes with the device."""


class CudaUsage:
    """Reads the statistics of PyTorch's allocator for an accelerator, without synchronizing with it.

    Raises:
        RuntimeError: If the device's allocator has no statistics, as for MPS before torch 2.14.
    """

    every_seconds = PROCESS_SECONDS

    def __init__(self, device: torch.device, resets: bool = True) -> None:
        self._device, self._resets = device, resets
        module = torch.get_device_module(device)
        nested = getattr(module, "memory_stats_as_nested_dict", None)  # CUDA, ROCm and XPU have it
        # The flat statistics of torch.accelerator take 80 microseconds.
        self._read = _flat if nested is None else nested
        self.lap()

    def lap(self) -> Lap:
        stats = self._read(self._device)
        if self._resets:
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
        return 0  # the allocator counts freed memory as reserved, not as held


class Resident:
    """Reads the resident memory of this process, on Linux."""

    every_seconds = PROCESS_SECONDS

    def __init__(self, resets: bool = True) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear = -1
        if resets:
            # If this is not permitted, the peak is that since the start of the process.
            with suppress(OSError):
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
        pass  # memory that the C library keeps belongs to the process

    def __del__(self) -> None:
        for descriptor in (self._status, self._clear):
            if descriptor >= 0:
                os.close(descriptor)


class ProcessPeakUsage:
    """Reads the peak of this process's resident memory since its start, with ``getrusage``."""

    every_seconds = PROCESS_SECONDS

    def lap(self) -> Lap:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return Lap(peak, peak)

    def kept(self) -> int:
        return kept_nbytes()

    def empty(self) -> None:
        pass  # memory that the C library keeps belongs to the process


def gauge_of(device: torch.device, resets: bool = True) -> Gauge:
    """Creates the gauge of a device; that of the process if the device has no statistics.

    Args:
        resets: Whether a reading resets the peak. Otherwise it is that since the last reset by others, or since the
            start of the process.
    """
    if device.type not in ("cpu", "meta"):
        with suppress(RuntimeError):
            return CudaUsage(device, resets)
    try:
        return Resident(resets)
    except OSError:
        return ProcessPeakUsage()


def _flat(device: torch.device) -> Stats:
    """Converts the flat statistics, which every device type has, to nested ones."""
    stats = torch.accelerator.memory_stats(device)
    nested: dict[str, Any] = {name: stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}
    for name in (f"{each}_bytes" for each in _READ):
        nested[name] = {"all": {when: stats.get(f"{name}.all.{when}", 0) for when in ("current", "peak")}}
    return nested


def _of(stats: Stats, name: str) -> Mapping[str, int]:
    """Returns the statistics called ``name``; empty before the first allocation."""
    found: Mapping[str, int] = stats.get(name, {}).get("all", {})
    return found


def _kib(text: bytes, name: bytes) -> int:
    """Returns the bytes from a line such as ``VmRSS:    1234 kB``; 0 if there is no such line."""
    start = text.find(name)
    return int(text[start + len(name) :].split(None, 1)[0]) * 1024 if start >= 0 else 0
