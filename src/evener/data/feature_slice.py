"""Slices a data set along its feature axis: each rank gets every sample, but only some of its columns.

If there are too many features for one device (one-hot codes, n-grams, clicks), each rank reads only the columns that
its shard of the first layer needs. A data set that can read columns by itself, from separate files or a memory map, has
a method ``columns(start, stop)`` that returns the data set of these columns. Items of other data sets are read whole
and then sliced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from evener.data.batch import map_leaves
from evener.data.collate import describe, labels_key, pair_of
from evener.data.division import by_weights
from evener.data.fetch import Gather, gatherer
from evener.data.stream_state import has_state
from evener.errors import ConfigurationError, DataError


def divide_columns(width: int, weights: Sequence[float]) -> list[range]:
    """Returns consecutive columns for each rank, in proportion to ``weights``. No rank's range is empty.

    Raises:
        ConfigurationError: If a rank would get no column.
        ShareError: If a weight is negative or not finite, or all are zero.
    """
    widths = by_weights(width, weights)
    if 0 in widths:
        raise ConfigurationError(
            f"{width} features in the parts {list(weights)} leave rank {widths.index(0)} of {len(weights)} without "
            f"one; use at most {width} ranks, and no part that is too small"
        )
    edges = list(accumulate(widths, initial=0))
    return [range(start, stop) for start, stop in pairwise(edges)]


def columns_of(dataset: Any, columns: range, width: int) -> Any:
    """Returns ``dataset`` with only ``columns`` of every input tensor whose last dimension has ``width`` features.

    Args:
        dataset: A data set of pairs ``(inputs, targets)``. If it has a method ``columns(start, stop)``, the result of
            that method is returned.
        columns: Consecutive columns.
        width: The number of features of the whole axis.
    """
    if hasattr(dataset, "columns"):
        return dataset.columns(columns.start, columns.stop)
    cut = _Cut(columns.start, columns.stop, width)
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        inputs, targets = dataset.tensors
        return TensorDataset(cut.inputs(inputs).contiguous(), targets)
    return _Stream(dataset, cut) if isinstance(dataset, IterableDataset) else _Columns(dataset, cut)


def cut_columns(inputs: Any, columns: range, width: int) -> Any:
    """Returns the inputs of samples with only ``columns`` of every tensor whose last dimension has ``width``
    features."""
    return _Cut(columns.start, columns.stop, width).inputs(inputs)


@dataclass(frozen=True)
class _Cut:
    """Slices the inputs of an item or a batch to the columns ``[start, stop)`` of ``width``."""

    start: int
    stop: int
    width: int

    def inputs(self, tree: Any) -> Any:
        """Slices all tensors in ``tree`` whose last dimension has ``width`` features.

        Raises:
            DataError: If there is no such tensor.
        """
        found: list[Any] = []
        result = map_leaves(partial(self._leaf, found), tree)
        if not found:
            raise DataError(
                f"no tensor among the inputs, {_shapes(tree)}, has the {self.width} features of the divided layer as "
                "its last dimension; write the layer that reads them as evener.nn.FeatureParallelLinear, or give the "
                "data set a method columns(start, stop) that returns the data set of these columns"
            )
        return result

    def item(self, item: Any) -> Any:
        """Slices the inputs of an item that is a pair or a dict with labels, and keeps its form.

        Returns any other item unchanged; the collate function refuses it.
        """
        pair = pair_of(item)
        if pair is None:
            return item
        inputs, targets = self.inputs(pair[0]), pair[1]
        key = labels_key(item)
        return (inputs, targets) if key is None else {**inputs, key: targets}

    def _leaf(self, found: list[Any], leaf: Any) -> Any:
        if getattr(leaf, "ndim", 0) == 0 or leaf.shape[-1] != self.width:
            return leaf
        found.append(leaf)
        return leaf[..., self.start : self.stop]


class _Columns(Dataset[Any]):
    """Slices a map-style data set. Keeps its ``gather_batch`` and ``__getitems__``, which read many items at once."""

    def __init__(self, dataset: Any, cut: _Cut) -> None:
        self._dataset, self._cut = dataset, cut
        gather = gatherer(dataset)
        if gather is not None:
            self.gather_batch = partial(_gather, gather, cut)
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._items

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._cut.item(self._dataset[index])

    def _items(self, indices: list[int]) -> list[Any]:
        return [self._cut.item(item) for item in self._dataset.__getitems__(indices)]


class _Stream(IterableDataset[Any]):
    """Slices an iterable data set."""

    def __init__(self, dataset: Any, cut: _Cut) -> None:
        self._dataset, self._cut = dataset, cut
        if has_state(dataset):
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return map(self._cut.item, self._dataset)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)


def _gather(gather: Gather, cut: _Cut, samples: Tensor) -> tuple[Any, Any]:
    inputs, targets = gather(samples)
    return cut.inputs(inputs), targets


def _shapes(tree: Any) -> str:
    """Returns the shapes of the leaves as text, for an error message."""
    shapes: list[str] = []
    map_leaves(lambda leaf: shapes.append(_shape(leaf)), tree)
    return "of shapes " + ", ".join(shapes) if shapes else "of which there are none"


def _shape(leaf: Any) -> str:
    return str(tuple(leaf.shape)) if hasattr(leaf, "shape") else describe(leaf)
