"""Metrics: each rank evaluates its own samples, and the results are merged as sums.

The value is the same for any division of the evaluation set.

:func:`metric` gives three kinds of objects one interface: a function ``(outputs, targets) -> Sum``; a loss; a
torchmetrics object, recognised by its methods so that torchmetrics stays optional.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from evener.core.exact_numbers import exact_total
from evener.core.losses.sums import Loss, Sum
from evener.core.losses.torch_losses import exact as as_loss
from evener.core.losses.torch_losses import is_sum, is_torch_loss
from evener.core.losses.type_checks import check_outputs, check_targets
from evener.errors import ConfigurationError, LossError
from evener.torch_internals import torchmetrics_states as torchmetrics

Metric: TypeAlias = Callable[[Any, Any], Sum]


def accuracy(outputs: Tensor, targets: Tensor, ignore_index: int | None = None) -> Sum:
    """Counts the outputs whose largest score is at the target class, as a :class:`Sum`.

    Args:
        outputs: (N, C, ...) scores; classes on dimension 1, as for cross entropy.
        targets: (N, ...) class indices, or (N, C, ...) probabilities.
        ignore_index: Targets with this value do not count.
    """
    check_outputs(outputs, "accuracy")
    check_targets(targets, "accuracy")
    if outputs.dim() < 2 or outputs.shape[1] < 2:
        raise LossError(
            f"accuracy: outputs of shape {tuple(outputs.shape)} have no score for each of several classes on dimension "
            "1, of which it finds the largest. For one score of two classes give a function as metric: "
            "lambda outputs, targets: evener.Sum(((outputs > 0) == (targets > 0.5)).sum(), targets.numel())"
        )
    if targets.is_floating_point() and targets.shape == outputs.shape:
        targets = targets.argmax(1)
    predicted = outputs.argmax(1)
    if predicted.shape != targets.shape:
        raise LossError(
            f"accuracy: outputs of shape {tuple(outputs.shape)} have their classes on dimension 1, so targets"
            f" must be of shape {tuple(predicted.shape)}; they are of shape {tuple(targets.shape)}"
        )
    right = predicted == targets
    if ignore_index is None:
        return Sum(right.sum(), targets.numel())
    kept = targets != ignore_index
    return Sum((right & kept).sum(), kept.sum())


class Accumulator(ABC):
    """Accumulates a metric over an evaluation: each rank updates it with its own batches, then the ranks merge.

    Every rank calls ``update`` any number of times (also never), sends ``state()`` to all other ranks, and calls
    ``merge`` with the states of all ranks, in order of rank. ``compute`` then returns the same value on all ranks.
    """

    is_over_elements: bool = False
    """As of a :class:`evener.Loss`."""
    can_merge: bool = True
    """False if it has no state that others could merge, so that each rank would have the value of its own samples."""

    @abstractmethod
    def update(self, outputs: Any, targets: Any) -> None:
        """Adds a batch."""

    @abstractmethod
    def state(self) -> Any:
        """Returns what this rank has accumulated, as plain data on the CPU that can be pickled."""

    @abstractmethod
    def merge(self, states: Sequence[Any]) -> None:
        """Replaces the state by the merged ``states`` of all ranks, which include this rank's."""

    @abstractmethod
    def compute(self) -> Any:
        """Returns a number, or a dict or list for a metric with several values; nan if there were no samples."""

    @abstractmethod
    def reset(self) -> None:
        """Resets the metric to its empty state."""


def metric(source: Any, exact: bool = False) -> Accumulator:
    """Creates an empty accumulator for a metric.

    Args:
        source: A function ``(outputs, targets) -> Sum``, a loss in any form that :func:`exact` takes, or a
            torchmetrics ``Metric`` or ``MetricCollection`` (which is copied, not changed).
        exact: Whether the sums must have the same bits on any division of the batches. torchmetrics adds up its states
            by itself: there only sums of whole numbers have.

    Raises:
        ConfigurationError: If ``source`` is none of these.
    """
    kind = _ExactSumMetric if exact else _SumMetric
    if all(callable(getattr(source, name, None)) for name in ("update", "compute", "reset")):
        return _TorchMetric(source)
    if is_sum(source) or is_torch_loss(source):
        loss = as_loss(source)
        return kind(functools.partial(_loss_sum, loss), loss.divisor, loss.is_over_elements)
    if callable(source) and not isinstance(source, type):
        return kind(source)
    raise ConfigurationError(
        f"{source!r} is no metric: give a function (outputs, targets) -> evener.Sum, a loss, or a"
        " torchmetrics object"
    )


def _loss_sum(loss: Loss, outputs: Any, targets: Any) -> Sum:
    return Sum(loss.total(outputs, targets), loss.count(targets))


class _SumMetric(Accumulator):
    """Accumulates sums in float64 on the device of the outputs, without synchronizing with it."""

    def __init__(
        self, function: Metric, divisor: Callable[[float], float] = float, is_over_elements: bool = False
    ) -> None:
        self._function, self._divisor = function, divisor
        self.is_over_elements = is_over_elements
        self.reset()

    def reset(self) -> None:
        self._sum = Sum(0.0, 0.0)

    def update(self, outputs: Any, targets: Any) -> None:
        self._sum += self._terms(outputs, targets)

    def _terms(self, outputs: Any, targets: Any) -> Sum:
        value = self._function(outputs, targets)
        if not isinstance(value, Sum):
            raise ConfigurationError(
                f"the metric {getattr(self._function, '__name__', self._function)!r} returned"
                f" {type(value).__name__}; return evener.Sum(total, count), the sum of its terms and their"
                " number"
            )
        return Sum(_double(value.total), _double(value.count))

    def state(self) -> Sum:
        return Sum(float(self._sum.total), float(self._sum.count))

    def merge(self, states: Sequence[Sum]) -> None:
        self._sum = functools.reduce(operator.add, states)

    def compute(self) -> float:
        if not float(self._sum.count):
            return math.nan
        return float(self._sum.total) / self._divisor(float(self._sum.count))


class _ExactSumMetric(_SumMetric):
    """Keeps the terms of all batches, and adds those of all ranks up at the end, with one rounding."""

    def reset(self) -> None:
        super().reset()
        self._held: list[Sum] = []

    def update(self, outputs: Any, targets: Any) -> None:
        self._held.append(self._terms(outputs, targets))

    def state(self) -> Any:
        return [(float(each.total), float(each.count)) for each in self._held]

    def merge(self, states: Sequence[Any]) -> None:
        terms = [each for state in states for each in state]
        self._sum = Sum(exact_total(total for total, _ in terms), exact_total(count for _, count in terms))


def _double(value: Any) -> Any:
    return value.detach().double() if isinstance(value, Tensor) else float(value)


class _TorchMetric(Accumulator):
    """A torchmetrics object, including the metrics inside it if it wraps or collects others.

    Its own synchronization between ranks is switched off: it gathers at times of its own choice, hangs if a rank has no
    data, and takes a mean of means. Instead, each state is merged over the ranks that saw data, by the reduction that
    the metric declares for it.
    """

    def __init__(self, source: Any) -> None:
        self._metric = copy.deepcopy(source)
        for collection in filter(torchmetrics.is_collection, self._inside()):
            # torchmetrics lets metrics share one state if their states are equal after the first batch. Which metrics
            # these are depends on that batch, so it would differ among ranks, and a rank may have no batch.
            torchmetrics.keep_apart(collection)
        for part in self._parts():
            torchmetrics.keep_to_rank(part)
        self.can_merge = any(torchmetrics.states(part) for part in self._parts())
        self.reset()

    def _parts(self) -> Iterator[Any]:
        """Iterates over the metrics that hold states, in a fixed order."""
        return filter(torchmetrics.has_states, self._inside())

    def _inside(self) -> Iterator[Any]:
        yield from self._metric.modules() if isinstance(self._metric, torch.nn.Module) else [self._metric]

    def reset(self) -> None:
        self._metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        if isinstance(outputs, Tensor) and any(part.device != outputs.device for part in self._parts()):
            self._metric.to(outputs.device)
        self._metric.update(outputs, targets)

    def state(self) -> list[tuple[int, dict[str, Any]]]:
        return [
            (
                torchmetrics.updates(part),
                {name: _to(value, "cpu") for name, value in torchmetrics.states(part).items()},
            )
            for part in self._parts()
        ]

    def merge(self, states: Sequence[list[tuple[int, dict[str, Any]]]]) -> None:
        for part, of_ranks in zip(self._parts(), zip(*states, strict=True), strict=True):
            seen = [(count, values) for count, values in of_ranks if count]
            merged = {}
            for name, reduction in torchmetrics.reductions(part).items() if seen else ():
                counts, values = zip(*((count, state[name]) for count, state in seen), strict=True)
                merged[name] = _to(_merged(reduction, values, counts), part.device)
            torchmetrics.set_states(part, merged, sum(count for count, _ in seen))

    def compute(self) -> Any:
        if not all(torchmetrics.updates(part) for part in self._parts() if torchmetrics.states(part)):
            return math.nan
        return _plain(self._metric.compute())


def _to(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    return [_to(item, device) for item in value] if isinstance(value, list) else value


def _merged(reduction: Any, values: Sequence[Any], counts: Sequence[int]) -> Any:
    """Merges one state over the ranks that saw data, by the reduction given to torchmetrics' ``add_state``."""
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if len(values) == 1:
        return values[0]
    kind = getattr(reduction, "__name__", None)
    if kind == "dim_zero_cat":
        return torch.cat(list(values))
    stacked = torch.stack(list(values))
    if kind == "dim_zero_mean":
        weights = torch.tensor(counts, dtype=torch.float64).view(-1, *[1] * (stacked.dim() - 1))
        return ((stacked * weights).sum(0) / sum(counts)).to(stacked.dtype)
    return stacked if reduction is None else reduction(stacked)


def _plain(value: Any) -> Any:
    """Converts tensors to numbers or lists of numbers, also inside dicts."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def named_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns one number for each name. A metric with several values gets one name for each of them.

    Raises:
        ConfigurationError: If two get the same name.
    """
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found = named_values({f"{name}.{key}": entry for key, entry in value.items()})
        elif isinstance(value, Sequence):
            found = named_values({f"{name}.{key}": entry for key, entry in enumerate(value)})
        else:
            found = {name: float(value)}
        for twice in flat.keys() & found:
            raise ConfigurationError(
                f"two metrics of the task give a number with the name {twice!r}: give one of them another name"
            )
        flat |= found
    return flat
