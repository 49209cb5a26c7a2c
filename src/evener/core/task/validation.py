"""Checks the fields of a task when it is created. Each message names the wrong value, and what to pass instead.

Without these checks a wrong value would cause an obscure error on every rank later, far from the line that is wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import PurePath
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from evener.core.did_you_mean import did_you_mean
from evener.core.plugins import kind_of
from evener.core.text import said
from evener.errors import TaskError

C = TypeVar("C")


def explaining_fields(cls: type[C]) -> type[C]:
    """Class decorator for dataclasses: raises TaskError for unknown or missing fields, and suggests a similar name."""
    construct: Callable[..., None] = cls.__init__
    names = [name for name in inspect.signature(construct).parameters if name != "self"]

    @functools.wraps(construct)
    def explained(self: C, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise TaskError(_no_field(cls.__name__, name, names))
        try:
            inspect.signature(construct).bind(self, *args, **kwargs)
        except TypeError as error:
            raise TaskError(f"{cls.__name__}: {error}; its fields are {', '.join(names)}") from error
        construct(self, *args, **kwargs)

    cls.__init__ = explained  # type: ignore[method-assign,assignment]
    return cls


def _no_field(owner: str, name: str, names: list[str]) -> str:
    hint = did_you_mean(name, names) or f"its fields are {', '.join(names)}"
    return f"{owner} has no field {name}; {hint}"


def positive(name: str, value: Any) -> int:
    """Converts the value to a Python int.

    Raises:
        TaskError: If it is not an integer of at least 1.
    """
    if not hasattr(value, "__index__") or isinstance(value, bool | Tensor) or int(value) < 1:
        raise TaskError(f"Task.{name} is {value!r}; give an integer of at least 1")
    return int(value)


def check_function(name: str, value: object, signature: str, optional: bool) -> None:
    """Raises:
    TaskError: If the value is not callable. None is allowed if the field is ``optional``.
    """
    if not callable(value) and not (optional and value is None):
        raise TaskError(f"Task.{name} is {kind_of(value)}, not a function; give a function {signature}")


def check_metrics(metrics: object, beside_loss: bool) -> None:
    """Raises:
    TaskError: If ``metrics`` is not a mapping from names to metrics, or has one with the name of the loss beside it.
    """
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"Task.metrics is {kind_of(metrics)}, not a mapping from names to metrics; give for instance "
            'metrics={"accuracy": evener.accuracy}'
        )
    if beside_loss and "loss" in metrics:
        raise TaskError(
            "Task.metrics has 'loss', which is the name of Task.loss in an evaluation: give the metric another name"
        )
    for name, metric in metrics.items():
        if isinstance(metric, type):
            raise TaskError(
                f"Task.metrics[{name!r}] is {kind_of(metric)}; give an object of it, as in {metric.__name__}(...)"
            )


def check_cost(cost: object, train: object, partition: str) -> None:
    """Raises:
    TaskError: If ``cost`` is no function, sequence or name, or if samples of ``train`` have no index on all ranks.
    """
    if cost is None:
        return
    listed = (
        hasattr(cost, "__getitem__") and hasattr(cost, "__len__") and not isinstance(cost, Mapping | bytes)
    )
    if not (callable(cost) or listed):
        raise TaskError(
            f"Task.cost is {kind_of(cost)}; give a function from an index to a cost, a sequence of one number for each "
            "sample of train, or the name of a column of train"
        )
    if partition == "sample" or isinstance(train, IterableDataset):
        kind = "an iterable data set" if partition == "batch" else "data that are partitioned by sample"
        raise TaskError(
            f"Task.cost gives the costs of samples by their index, which {kind} has not on all ranks: leave it out"
        )


def check_dataset(dataset: object, name: str) -> None:
    """Raises:
    TaskError: If it is neither an ``IterableDataset`` nor an object with ``__getitem__`` and ``__len__``.
    """
    wrong = _cure(dataset)
    if wrong is not None:
        raise TaskError(f"{name} is {kind_of(dataset)}, not a dataset; {wrong}")


def _cure(dataset: object) -> str | None:
    """Returns advice on what to pass instead. Returns None if ``dataset`` is a valid dataset."""
    if isinstance(dataset, DataLoader):
        return (
            "give what it loads, loader.dataset: Evener divides the batches itself. Its batch size and collate "
            "function are Task(batch_size=..., collate=...), its workers a setting of the run"
        )
    if isinstance(dataset, IterableDataset) or is_bare_stream(dataset):
        return None
    if isinstance(dataset, Mapping):
        return f"give one of its parts, such as dataset[{next(iter(dataset), 'train')!r}]"
    if isinstance(dataset, type):
        return f"give an object of it, as in {dataset.__name__}(...)"
    if isinstance(dataset, str | bytes | PurePath) or dataset is None:
        return "give a torch.utils.data.Dataset that reads it"
    return _cure_of_arrays(dataset)


def is_bare_stream(dataset: object) -> bool:
    """Returns True for an object that can be iterated and has a state, but is no ``IterableDataset``."""
    methods = ("__iter__", "state_dict", "load_state_dict")
    others = ("__next__", "__getitem__")
    return (
        not isinstance(dataset, IterableDataset | DataLoader | type)
        and all(hasattr(dataset, name) for name in methods)
        and not any(hasattr(dataset, name) for name in others)
    )


class BareStream(IterableDataset[Any]):
    """Makes an ``IterableDataset`` of an object that can be iterated and has a state."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Tells the object the epoch, if it asks for it."""
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)


def as_dataset(dataset: Any) -> Any:
    """Returns the data set itself, or makes one of an object that can be iterated and has a state."""
    return BareStream(dataset) if is_bare_stream(dataset) else dataset


def with_own_place(dataset: Any, other: Any) -> Any:
    """Returns the data set, or a copy of it if it is ``other`` and a stream that keeps its place or epoch.

    An evaluation begins when the next epoch's first batches are read already: it would go on behind them, and change
    the epoch of the training.

    Raises:
        TaskError: If it cannot be copied.
    """
    keeps = hasattr(dataset, "state_dict") or hasattr(dataset, "set_epoch")
    if (
        dataset is not other
        or not keeps
        or not (isinstance(dataset, IterableDataset) or is_bare_stream(dataset))
    ):
        return dataset
    try:
        return deepcopy(dataset)
    except Exception as error:  # any kind of error: of a lock, a connection, an open file
        raise TaskError(
            f"Task.evaluate is the stream of Task.train, which keeps its place and cannot be copied ({said(error)}): "
            "give another object of it"
        ) from error


def _cure_of_arrays(dataset: object) -> str | None:
    if _is_array(dataset) or (
        isinstance(dataset, tuple | list) and len(dataset) == 2 and all(map(_is_array, dataset))
    ):
        return (
            "give pairs of inputs and targets: torch.utils.data.TensorDataset(inputs, targets), with "
            "torch.from_numpy(array) for an array of NumPy's"
        )
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return None
    if hasattr(dataset, "__iter__") or hasattr(dataset, "__next__"):
        return (
            "give a list of its items, or derive from torch.utils.data.IterableDataset, whose __iter__ begins anew in "
            "every epoch"
        )
    if callable(dataset):
        return "call it, and give what it returns"
    return "give a torch.utils.data.Dataset, with __getitem__ and __len__"


def _is_array(value: object) -> bool:
    """Returns True for a tensor or a NumPy array, whose rows would be the items."""
    return isinstance(value, Tensor) or (hasattr(value, "__array__") and hasattr(value, "dtype"))
