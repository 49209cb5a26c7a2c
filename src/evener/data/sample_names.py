"""Names of samples for messages: the index, and the file of the sample if the data set knows it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset

from evener.core.text import said
from evener.data.collate import preview

_LISTS = ("samples", "imgs", "images", "paths", "files", "image_paths", "filenames", "file_names")
"""Attributes of data sets that may hold a list with one file, or one tuple that begins with a file, for each sample."""
_DEPTH = 16


def called(dataset: Any, index: int) -> str:
    """Returns the name of a sample: ``sample 17``, or ``sample 17 (pictures/17.png)``."""
    try:
        place = _place(dataset, index)
    except Exception:  # raised by the user's code; the error that is being reported is more important
        place = ""
    return f"sample {index} ({place})" if place else f"sample {index}"


def unreadable(dataset: Any, indices: Sequence[Any], told: str) -> str:
    """Returns in words the reading that raised an error: of one sample, if reading it here raises the same.

    Args:
        told: The type and message of the error. A worker sends its errors as text, without the index.
    """
    with torch.random.fork_rng(devices=[]):
        for index in indices:
            try:
                dataset[index]
            except Exception as again:
                if type(again).__name__ in told and (isinstance(again, StopIteration) or said(again) in told):
                    return f"reading {called(dataset, index)}"
    return f"reading samples {preview([*indices])}" if indices else "reading a batch"


def _place(dataset: Any, index: int) -> str:
    for _ in range(_DEPTH):
        if hasattr(dataset, "describe_sample"):
            return str(dataset.describe_sample(index))
        if isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        elif isinstance(dataset, ConcatDataset):
            part = bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[part - 1] if part else 0
            dataset = dataset.datasets[part]
        else:
            break
    return next((found for name in _LISTS if (found := _listed(dataset, name, index))), "")


def _listed(dataset: Any, name: str, index: int) -> str:
    entries = getattr(dataset, name, None)
    if not isinstance(entries, list | tuple) or len(entries) != len(dataset):
        return ""
    entry = entries[index]
    entry = entry[0] if isinstance(entry, list | tuple) and entry else entry
    return os.fspath(entry) if isinstance(entry, str | os.PathLike) else ""
