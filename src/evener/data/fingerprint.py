"""Fingerprints of datasets: digests of a few samples, which show if a run resumes with another dataset.

A checkpoint refers to samples by index. If the run resumes with another dataset of the same length, it trains on some
samples twice and on others never, and nothing else would detect this.
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
"""The number of samples that are read. The first and the last are among them."""

Fingerprint = Mapping[int, str]
"""The digests of some samples, by index. Samples that differ each time they are read are left out."""


def fingerprint(dataset: Any) -> dict[int, str]:
    """Returns the digests of at most ``LOOKS`` samples by index. Restores the state of the random generators.

    Each sample is read twice, and is left out if the two differ, as with random augmentation. Returns an empty dict for
    a dataset without indices or length.
    """
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not (indexed and hasattr(dataset, "__len__") and len(dataset)):
        return {}
    last = len(dataset) - 1
    indices = sorted({round(last * place / (LOOKS - 1)) for place in range(LOOKS)})
    if hasattr(dataset, "places_to_look"):
        indices = dataset.places_to_look(LOOKS)
    with generators_kept():
        first, second = ({index: _read(dataset, index) for index in indices} for _ in range(2))
    return {index: digest for index, digest in first.items() if digest and digest == second[index]}


def difference(saved: Fingerprint, here: Fingerprint) -> str:
    """Returns a message that names the first sample that differs; empty if none does."""
    other = [index for index, digest in saved.items() if here.get(index, digest) != digest]
    return f"sample {other[0]} is not the same" if other else ""


def _read(dataset: Any, index: int) -> str:
    """Returns the digest of a sample; empty if reading it fails (training reports that) or it has no digest."""
    try:
        return digest_if_any(dataset[index])
    except Exception:
        return ""


def digest_if_any(item: Any) -> str:
    """Returns the digest of a sample; empty if it has none: a part cannot be pickled, or is a tensor that has no bytes
    of one order (nested, meta)."""
    try:
        return digest_of(item)
    except Exception:
        return ""


def digest_of(item: Any) -> str:
    """Returns the SHA-256 of a sample: of the types, shapes and bytes of its tensors and arrays, and of other leaves
    pickled. It is the same in other versions of Python, NumPy and PyTorch, unless a leaf pickles otherwise there."""
    digest = hashlib.sha256()
    map_leaves(lambda leaf: digest.update(_bytes(leaf)), item)
    return digest.hexdigest()


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, set | frozenset):  # each process has an order of its own
        return b"".join(sorted(map(_bytes, leaf)))
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return f"{leaf.dtype.str} {leaf.shape}".encode() + leaf.tobytes()  # each NumPy pickles in its own way
    if not isinstance(leaf, Tensor):
        return pickle.dumps(leaf, protocol=4)
    tensor = leaf.detach().cpu().resolve_conj()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    data: bytes = dense.contiguous().flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores the random states of torch (on the CPU), NumPy and Python after the block."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
