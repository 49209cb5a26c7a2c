"""What an allocator keeps beyond what is in use: when that is lost, and when giving it back helps.

::

    reserved     ├─ held ─┤ split ├── releasable ──┤
                  in use    lost    whole segments

A GPU's allocator keeps what was freed, for asking the device for memory makes all wait for it. ``split`` lies between
tensors in use and can be given to nothing that is larger (``inactive_split_bytes``); only whole segments can go back.
PyTorch gives those back itself before it tells that it is out of memory, so that emptying its cache helps in two cases:
what had filled the memory has gone since, and what comes next is of other sizes; or another process wants the memory.
In each step it would cost more than it wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from evener.hardware.memory.step_usage import Lap

LEAST_NBYTES = 64 << 20
"""Less than that is not worth waiting for the device."""
LOST_PART, LOST_WITHOUT_FAILURE = 0.1, 0.4
"""Of what is reserved: so much lost is told where an allocation failed, and so much where none has."""
SCARCE_PART = 0.05
"""Of a device: less than that is free where another process needs memory."""
EXPANDABLE = "expandable_segments:True"


def releasable(lap: Lap) -> int:
    """Bytes that the allocator could give back."""
    return max(0, lap.reserved - lap.held - lap.split)


def worth_emptying(lap: Lap, asked: int) -> bool:
    """After an allocation of ``asked`` bytes failed, and what had filled the memory has gone."""
    return releasable(lap) >= max(LEAST_NBYTES, asked)


def wanted_by_others(lap: Lap, free: int, total: int, others: int) -> bool:
    """Whether another process of the device, which has ``others`` bytes of ``total``, may need what is cached here."""
    return others > 0 and free < SCARCE_PART * total and worth_emptying(lap, 0)


def lost_in_pieces(before: Lap, now: Lap) -> int:
    """Bytes that lie between what is in use, if they are so many that they matter; else 0."""
    failed = now.retries > before.retries or now.failures > before.failures
    least = (LOST_PART if failed else LOST_WITHOUT_FAILURE) * now.reserved
    return now.split if now.split >= max(least, LEAST_NBYTES) else 0


def remedy(kind: str, variables: Mapping[str, str] = os.environ) -> str:
    """What to do about memory that is lost in pieces on a kind of device."""
    # PyTorch reads the second name on all kinds, and has ignored it on CUDA for this setting (torch 2.9).
    name = "PYTORCH_CUDA_ALLOC_CONF" if kind == "cuda" else "PYTORCH_ALLOC_CONF"
    if any(EXPANDABLE in variables.get(each, "") for each in (name, "PYTORCH_ALLOC_CONF")):
        return "let the sizes of batches differ less, or use a smaller micro_batch"
    return f"set {name}={EXPANDABLE} before the run"
