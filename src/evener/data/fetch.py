"""Reads ``(inputs, targets)`` for sample ids, in the main process or in a worker process of PyTorch's DataLoader.

An exception that is sent from a worker process to the main process loses its type or its message. So the worker returns
a failure as a value, ``ReadFailure``, whose message holds everything the user needs. The main process raises it as a
``DataError``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from evener.core.task.device_errors import asks_for_device, way_out
from evener.core.text import said, trace_of
from evener.data.batch import Skipped, map_leaves
from evener.data.collate import Collate, collate_pairs, collate_with, preview
from evener.data.copy_stream import pinned
from evener.data.sample_names import called
from evener.data.sampler import Ids
from evener.errors import DataError, InterruptedRunError

_SPARE = 64
"""The number of samples to try as a placeholder if no sample of a micro-batch can be read."""
Gather = Callable[[Tensor], tuple[Any, Any]]


@dataclass(slots=True)  # to make a frozen one takes three times as long, in every step
class Fetched:
    """The data of a micro-batch. It pins its own memory, because the DataLoader would turn tuples into lists."""

    inputs: Any
    targets: Any
    samples: Ids | None = None
    """The ids of the samples that were read, if they differ from the requested ones; else None."""
    stands_in: bool = False
    """True if no requested sample could be read and another sample is the placeholder, of weight 0."""
    skipped: tuple[Skipped, ...] = ()

    def pin_memory(self) -> Fetched:
        return replace(self, inputs=map_leaves(_pin, self.inputs), targets=map_leaves(_pin, self.targets))


class SurplusError(DataError):
    """There are samples that have no number. To leave out another one would not account for them."""


@dataclass(frozen=True)
class ReadFailure:
    """The error message of a micro-batch that could not be read."""

    message: str


class Fetch(Dataset[Any]):
    """Reads the samples of a map-style data set: ``fetch[ids]`` returns a micro-batch.

    A data set that can read many items at once has a method ``gather_batch(samples)``. It takes an int64 tensor
    ``(n,)`` and returns the pair that collating these items would give. If the data set has no such method, or the
    user has a collate function, items are read by ``__getitems__`` if there is one, else one by one.

    If reading fails, the samples are read again one by one, to name the one that cannot be read. With ``skips``, such
    samples are left out and the others are the micro-batch.
    """

    def __init__(self, dataset: Any, collate: Collate | None, name: str, skips: bool = False) -> None:
        self._dataset, self._skips = dataset, skips
        self._collate = collate
        self._name = name
        self._gather = gatherer(dataset) if collate is None else None
        self.may_draw = getattr(self._gather, "func", None) is not _select
        """False if reading runs no code of the user, so that it draws no random numbers."""

    def __getitem__(self, samples: Ids) -> Fetched | ReadFailure:
        try:
            return self._read(samples)
        except InterruptedRunError:
            raise
        except Exception as caught:
            error = caught  # handled after this block: else it would be the __context__ of later exceptions
        return self._faulty(samples, error)

    def _faulty(self, samples: Ids, error: Exception) -> Fetched | ReadFailure:
        """Reads samples again one by one. Returns the readable ones if ``skips`` is set, else the failure."""
        faults = {sample: fault for sample in samples.tolist() if (fault := self._fault(sample))}
        if not faults:
            return failure(error, f"reading samples {preview(samples.tolist())} of the {self._name}")
        surplus = [sample for sample, fault in faults.items() if isinstance(fault, SurplusError)]
        first = next(iter(surplus or faults))
        told = failure(faults[first], f"reading {called(self._dataset, first)} of the {self._name}")
        if not self._skips or surplus:
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
        """Returns the error that reading ``sample`` raises. Returns None if the sample can be read."""
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
        words = said(fault).partition("\nTraceback (")[0]  # of a DataError, which may hold one
        return f"{called(self._dataset, sample)} of the {self._name}: {type(fault).__name__}: {words}"

    def _spare(self, sample: int) -> Ids:
        """Returns the id of a readable sample, for a placeholder: this rank must run the step with the others."""
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
    """Collates ``items`` with the user's function, or with the default one if ``collate`` is None."""
    if collate is None:
        return Fetched(*collate_pairs(items, ids, name))
    return Fetched(*collate_with(collate, items, ids, name))


def failure(error: Exception, doing: str) -> ReadFailure:
    """Converts ``error`` to a value: the message of a ``DataError``; of other errors also the traceback.

    Raises:
        InterruptedRunError: If ``error`` is one: it comes from a signal and not from the data.
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
    """Returns ``gather_batch`` of the data set, or tensor indexing for a ``TensorDataset`` of two tensors, else
    None."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return partial(_select if all(map(_is_plain, dataset.tensors)) else _index, *dataset.tensors)
    gather: Gather | None = getattr(dataset, "gather_batch", None)
    return gather


def _index(inputs: Tensor, targets: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    return inputs[samples], targets[samples]


def _select(inputs: Tensor, targets: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Does the same as ``_index`` for plain CPU tensors; takes a third of the time for few samples."""
    return inputs.index_select(0, samples), targets.index_select(0, samples)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _pin(leaf: Any) -> Any:
    if type(leaf) is Tensor and leaf.layout is torch.strided:
        return pinned(leaf)
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


def first_inputs(dataset: Any, collate: Collate | None, count: int) -> Any:
    """Returns the inputs of a training set's first ``count`` samples as one batch; None if it has no samples.

    Raises:
        DataError: If one of them cannot be read.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        items = list(islice(dataset, count))
        return join(items, list(range(len(items))), collate, "the training set").inputs if items else None
    samples = np.arange(min(count, len(dataset)), dtype=np.int64)
    read = Fetch(dataset, collate, "training set")[samples] if len(samples) else None
    if isinstance(read, ReadFailure):
        raise DataError(read.message)
    return None if read is None else read.inputs
