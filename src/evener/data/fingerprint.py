"""Whether two datasets of one length hold the same samples, as far as a few of them tell.

A checkpoint names samples by number. If another dataset is behind the numbers, some samples are trained on twice and
others never, and nothing else would say so.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from evener.data.batch import map_leaves

LOOKS = 8
"""Samples that are looked at, the first and the last among them."""

Fingerprint = Mapping[int, int]
"""A checksum of some samples, by index; without those that are not the same whenever they are read."""


def fingerprint(dataset: Any) -> dict[int, int]:
    """Of a few samples, each read twice: one that is augmented at random is left out. Random generators stay as they
    are. Empty for a dataset that has no numbers or no length."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        return {}
    last = len(dataset) - 1
    indices = sorted({round(last * place / (LOOKS - 1)) for place in range(LOOKS)})
    with _undrawn():
        first, second = ({index: _read(dataset, index) for index in indices} for _ in range(2))
    return {index: crc for index, crc in first.items() if crc is not None and crc == second[index]}


def difference(saved: Fingerprint, here: Fingerprint) -> str:
    """In words, the first sample that is another one; empty if there is none."""
    other = [index for index, crc in saved.items() if here.get(index, crc) != crc]
    return f"sample {other[0]} is not the same" if other else ""


def _read(dataset: Any, index: int) -> int | None:
    """None for a sample that cannot be read, of which training will tell."""
    try:
        return _checksum(dataset[index])
    except Exception:
        return None


def _checksum(item: Any) -> int | None:
    """None for what cannot be told apart by its bytes."""
    crc, known = 0, True

    def add(leaf: Any) -> Any:
        nonlocal crc, known
        data = _bytes(leaf)
        known = known and data is not None
        crc = zlib.crc32(data or b"", crc)
        return leaf

    map_leaves(add, item)
    return crc if known else None


def _bytes(leaf: Any) -> bytes | None:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            return None
        return (
            leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            if leaf.numel()
            else b""
        )
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    return repr(leaf).encode() if isinstance(leaf, str | bytes | int | float | bool | None) else None


@contextmanager
def _undrawn() -> Iterator[None]:
    """Without a trace in the random generators that a dataset may draw from."""
    states = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
