"""From sample ids to ``(inputs, targets)``, in the main process or in a worker of PyTorch's DataLoader.

An exception that crosses a process border loses its type or its message on the way. A failure therefore
travels as a value, ``Failure``, with all that a person needs in its message, and becomes a ``DataError`` on
the other side.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from evener.data.batch import map_leaves
from evener.data.collate import Collate, collate_pairs, collate_with, preview
from evener.data.order import Ids
from evener.errors import DataError, InterruptedRunError
from evener.placement import asks_for_device, way_out

Gather = Callable[[Tensor], tuple[Any, Any]]


@dataclass(frozen=True)
class Fetched:
    """What a micro-batch holds; pinned as a whole, because the DataLoader would turn tuples into lists."""

    inputs: Any
    targets: Any

    def pin_memory(self) -> Fetched:
        return Fetched(map_leaves(_pin, self.inputs), map_leaves(_pin, self.targets))


@dataclass(frozen=True)
class Failure:
    """Why there is no micro-batch."""

    message: str


class Fetch(Dataset[Any]):
    """``fetch[ids]`` for a map-style data set.

    A data set that knows a faster way than item by item offers ``gather_batch(samples)``: of an int64 tensor
    ``(n,)`` it makes the pair that collating these items would give. Without it, and where the user collates,
    items are read by ``__getitems__`` if there is one, else one by one.
    """

    def __init__(self, dataset: Any, collate: Collate | None, name: str) -> None:
        self._dataset = dataset
        self._collate = collate
        self._name = name
        self._gather = gatherer(dataset) if collate is None else None

    def __getitem__(self, samples: Ids) -> Fetched | Failure:
        try:
            return self._read(samples)
        except Exception as error:
            return failure(error, f"reading samples {preview(samples.tolist())} of the {self._name}")

    def _read(self, samples: Ids) -> Fetched:
        if self._gather is not None:
            return Fetched(*self._gather(torch.from_numpy(samples)))
        ids = samples.tolist()
        return join(self._items(ids), ids, self._collate, self._name)

    def _items(self, ids: list[int]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(ids))
        return [self._dataset[sample] for sample in ids]


def join(items: list[Any], ids: list[int], collate: Collate | None, name: str) -> Fetched:
    """``items`` collated by the user's function, or by the default one if there is none."""
    if collate is None:
        return Fetched(*collate_pairs(items, ids, name))
    return Fetched(*collate_with(collate, items, ids, name))


def failure(error: Exception, doing: str) -> Failure:
    """``error`` as a value: of a ``DataError`` the message, of others also the traceback.

    Raises:
        InterruptedRunError: If that is the error: a signal that came while data were read is no fault of theirs.
    """
    if isinstance(error, InterruptedRunError):
        raise error
    if isinstance(error, DataError):
        return Failure(str(error))
    if asks_for_device(error):
        return Failure(f"{doing} failed: {way_out('the data set', error)}")
    trace = "".join(traceback.format_exception(error))
    return Failure(f"{doing} failed: {type(error).__name__}: {error}\n{trace}")


def gatherer(dataset: Any) -> Gather | None:
    """The data set's faster way to a whole batch, if it has one; indexing for two plain tensors."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return partial(_index, *dataset.tensors)
    gather: Gather | None = getattr(dataset, "gather_batch", None)
    return gather


def _index(inputs: Tensor, targets: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    return inputs[samples], targets[samples]


def _pin(leaf: Any) -> Any:
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf
