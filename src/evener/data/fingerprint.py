"""Whether two datasets of one length hold the same samples, as far as a few of them tell.

A checkpoint names samples by number. If another dataset is behind the numbers, some samples are trained on twice and
others never, and nothing else would say so.
"""

from __future__ import annotations

import hashlib
import pickle
import random
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

Fingerprint = Mapping[int, str]
"""A digest of some samples, by index; without those that are not the same whenever they are read."""


def fingerprint(dataset: Any) -> dict[int, str]:
    """Of a few samples, each read twice: one that is augmented at random is left out. Random generators stay as they
    are. Empty for a dataset that has no numbers or no length."""
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not (indexed and hasattr(dataset, "__len__") and len(dataset)):
        return {}
    last = len(dataset) - 1
    indices = sorted({round(last * place / (LOOKS - 1)) for place in range(LOOKS)})
    with generators_kept():
        first, second = ({index: _read(dataset, index) for index in indices} for _ in range(2))
    return {index: digest for index, digest in first.items() if digest and digest == second[index]}


def difference(saved: Fingerprint, here: Fingerprint) -> str:
    """In words, the first sample that is another one; empty if there is none."""
    other = [index for index, digest in saved.items() if here.get(index, digest) != digest]
    return f"sample {other[0]} is not the same" if other else ""


def _read(dataset: Any, index: int) -> str:
    """Empty for a sample that cannot be read or has no digest: training will tell of the one."""
    try:
        return digest_of(dataset[index])
    except Exception:
        return ""


def digest_of(item: Any) -> str:
    """Of a sample: types, shapes and bytes of its tensors, and whatever else there is as it would be pickled."""
    digest = hashlib.sha256()
    map_leaves(lambda leaf: digest.update(_bytes(leaf)), item)
    return digest.hexdigest()


def _bytes(leaf: Any) -> bytes:
    if not isinstance(leaf, Tensor):
        return pickle.dumps(leaf)
    tensor = leaf.detach().cpu()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    data: bytes = dense.contiguous().flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leaves the generators of torch, NumPy and Python, from which a dataset may draw, as they were."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
