"""From sample ids to ``(inputs, targets)``, in the main process or in a worker of PyTorch's DataLoader.

An exception that crosses a process border loses its type or its message on the way. A failure therefore
travels as a value, ``ReadFailure``, with all that a person needs in its message, and becomes a ``DataError`` on
the other side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from evener.core.task.device_errors import asks_for_device, way_out
from evener.core.text import said, trace_of
from evener.data.batch import Skipped, map_leaves
from evener.data.collate import Collate, collate_pairs, collate_with, preview
from evener.data.sample_names import called
from evener.data.sampler import Ids
from evener.errors import DataError, InterruptedRunError

_SPARE = 64
"""Samples that are tried to stand in where none of a micro-batch can be read."""
Gather = Callable[[Tensor], tuple[Any, Any]]


@dataclass(frozen=True)
class Fetched:
    """What a micro-batch holds; pinned as a whole, because the DataLoader would turn tuples into lists."""

    inputs: Any
    targets: Any
    samples: Ids | None = None
    """The samples that were read, where these are not those that were asked for."""
    stands_in: bool = False
    """Whether none of those was read, so that what there is counts for nothing."""
    skipped: tuple[Skipped, ...] = ()

    def pin_memory(self) -> Fetched:
        return replace(self, inputs=map_leaves(_pin, self.inputs), targets=map_leaves(_pin, self.targets))


@dataclass(frozen=True)
class ReadFailure:
    """Why there is no micro-batch."""

    message: str


class Fetch(Dataset[Any]):
    """``fetch[ids]`` for a map-style data set.

    A data set that knows a faster way than item by item offers ``gather_batch(samples)``: of an int64 tensor
    ``(n,)`` it makes the pair that collating these items would give. Without it, and where the user collates,
    items are read by ``__getitems__`` if there is one, else one by one.

    Where reading fails, the samples are read again one by one, to name the one that cannot be read. With ``skips`` it
    is left out, and what is left is the micro-batch.
    """

    def __init__(self, dataset: Any, collate: Collate | None, name: str, skips: bool = False) -> None:
        self._dataset, self._skips = dataset, skips
        self._collate = collate
        self._name = name
        self._gather = gatherer(dataset) if collate is None else None

    def __getitem__(self, samples: Ids) -> Fetched | ReadFailure:
        try:
            return self._read(samples)
        except InterruptedRunError:
            raise
        except Exception as caught:
            error = caught  # told of outside of here, where what is raised next would have it as its context
        return self._faulty(samples, error)

    def _faulty(self, samples: Ids, error: Exception) -> Fetched | ReadFailure:
        """What is left of samples that cannot be read together, or why nothing is."""
        faults = {sample: fault for sample in samples.tolist() if (fault := self._fault(sample))}
        if not faults:
            return failure(error, f"reading samples {preview(samples.tolist())} of the {self._name}")
        first = next(iter(faults))
        told = failure(faults[first], f"reading {called(self._dataset, first)} of the {self._name}")
        if not self._skips:
            return told
        left = np.array([sample for sample in samples.tolist() if sample not in faults], dtype=np.int64)
        skipped = tuple(Skipped(sample, self._why(sample, fault)) for sample, fault in faults.items())
        try:
            read = left if len(left) else self._spare(first)
            return replace(self._read(read), samples=read, stands_in=not len(left), skipped=skipped)
        except InterruptedRunError:
            raise
        except Exception:
            return told

    def _fault(self, sample: int) -> Exception | None:
        """Why a sample cannot be read, if it cannot."""
        try:
            if self._gather is not None:
                self._gather(torch.tensor([sample]))
            else:
                self._items([sample])
        except InterruptedRunError:
            raise
        except Exception as error:
            return error
        return None

    def _why(self, sample: int, fault: Exception) -> str:
        return f"{called(self._dataset, sample)} of the {self._name}: {type(fault).__name__}: {said(fault)}"

    def _spare(self, sample: int) -> Ids:
        """A sample that can be read, to run the model on: other ranks wait for it."""
        others = ((sample + step) % len(self._dataset) for step in range(1, _SPARE + 1))
        return np.array([next(other for other in others if not self._fault(other))], dtype=np.int64)

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


def failure(error: Exception, doing: str) -> ReadFailure:
    """``error`` as a value: of a ``DataError`` the message, of others also the traceback.

    Raises:
        InterruptedRunError: If that is the error: a signal that came while data were read is no fault of theirs.
    """
    if isinstance(error, InterruptedRunError):
        raise error
    if isinstance(error, DataError):
        return ReadFailure(said(error))
    if asks_for_device(error):
        return ReadFailure(f"{doing} failed: {way_out('the data set', error)}")
    return ReadFailure(
        f"{doing} failed: {type(error).__name__}: {said(error)}\n{trace_of(error, error.__traceback__)}"
    )


def gatherer(dataset: Any) -> Gather | None:
    """The data set's faster way to a whole batch, if it has one; indexing for two plain tensors."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return partial(_select if all(map(_is_plain, dataset.tensors)) else _index, *dataset.tensors)
    gather: Gather | None = getattr(dataset, "gather_batch", None)
    return gather


def _index(inputs: Tensor, targets: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    return inputs[samples], targets[samples]


def _select(inputs: Tensor, targets: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """The same of rows that lie one after the other, in a third of the time where they are few."""
    return inputs.index_select(0, samples), targets.index_select(0, samples)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _pin(leaf: Any) -> Any:
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf
