"""Random numbers that depend on what they are drawn for, and not on what was drawn before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from evener.hardware import accelerators

_spare: list[np.random.MT19937] = []
"""Generators for blocks of :func:`all_kept`, which may be nested, and in several threads."""


def seed_of(*numbers: int) -> int:
    """Returns a seed of 63 bits, by BLAKE2b of the numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def all_kept(*devices: torch.device) -> Iterator[None]:
    """Restores the states of the generators of torch (of the CPU and of ``devices``), NumPy and Python after the block,
    so that nothing depends on what was drawn in it. In the block NumPy draws from another generator, which must be
    seeded there."""
    # Another generator takes a hundredth of the time of reading and writing NumPy's state.
    of_numpy, python_state = np.random.get_bit_generator(), random.getstate()  # type: ignore[attr-defined]
    spare = _spare.pop() if _spare else np.random.MT19937(0)
    np.random.set_bit_generator(spare)  # type: ignore[attr-defined]
    try:
        with accelerators.generators_kept(*devices):
            yield
    finally:
        np.random.set_bit_generator(of_numpy)  # type: ignore[attr-defined]
        _spare.append(spare)
        random.setstate(python_state)


def seed_all(seed: int, *devices: torch.device) -> None:
    """Seeds the generators that :func:`all_kept` restores."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        accelerators.seed(device, seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int, *devices: torch.device) -> Iterator[None]:
    """Context in which all generators start from ``seed``; restores their states at the end."""
    with all_kept(*devices):
        seed_all(seed, *devices)
        yield
