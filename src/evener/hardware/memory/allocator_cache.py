"""Memory that the caching allocator reserves beyond what is in use: fragmentation, and when to empty the cache.

::

    reserved     ├─ held ─┤ split ├── releasable ──┤
                  in use    lost    whole segments

A GPU's allocator keeps freed memory, since asking the device for memory synchronizes with it. ``split`` lies between
tensors in use and cannot hold anything larger (``inactive_split_bytes``); only whole segments can be released. PyTorch
releases these itself before it reports that it is out of memory. Emptying the cache therefore helps in two cases only:
the tensors that had filled the memory are gone and the next ones have other sizes; or another process needs the memory.
Emptying it in each step would cost more than it gains.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from evener.hardware.memory.step_usage import Lap

LEAST_NBYTES = 64 << 20
"""Minimum number of bytes to release: fewer are not worth synchronizing with the device."""
LOST_PART, LOST_WITHOUT_FAILURE = 0.1, 0.4
"""Fractions of the reserved memory. Fragmentation above the first is reported after a failed allocation, above the
second also without one."""
SCARCE_PART = 0.05
"""Fraction of the device's memory. If less is free, another process is assumed to need memory."""
EXPANDABLE = "expandable_segments:True"


def releasable(lap: Lap) -> int:
    """Returns the number of bytes that the allocator could release to the device."""
    return max(0, lap.reserved - lap.held - lap.split)


def worth_emptying(lap: Lap, asked: int) -> bool:
    """Returns True if the cache should be emptied after an allocation of ``asked`` bytes failed.

    Call it after the tensors that had filled the memory are freed.
    """
    return releasable(lap) >= max(LEAST_NBYTES, asked)


def wanted_by_others(lap: Lap, free: int, total: int, others: int) -> bool:
    """Returns True if another process on the device may need the memory that is cached here.

    ``free``, ``total`` and ``others`` (memory of other processes) are the device's, in bytes.
    """
    return others > 0 and free < SCARCE_PART * total and worth_emptying(lap, 0)


def lost_in_pieces(before: Lap, now: Lap) -> int:
    """Returns the number of bytes lost to fragmentation if they are many; otherwise 0."""
    failed = now.retries > before.retries or now.failures > before.failures
    least = (LOST_PART if failed else LOST_WITHOUT_FAILURE) * now.reserved
    return now.split if now.split >= max(least, LEAST_NBYTES) else 0


def remedy(kind: str, variables: Mapping[str, str] = os.environ) -> str:
    """Returns advice against fragmentation for a device type."""
    # PyTorch reads the second name on all device types, but ignores it on CUDA for this setting (torch 2.9).
    name = "PYTORCH_CUDA_ALLOC_CONF" if kind == "cuda" else "PYTORCH_ALLOC_CONF"
    if any(EXPANDABLE in variables.get(each, "") for each in (name, "PYTORCH_ALLOC_CONF")):
        return "let the sizes of batches differ less, or use a smaller micro_batch"
    return f"set {name}={EXPANDABLE} before the run"
