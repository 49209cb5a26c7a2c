"""Tries whether a user's loss is a sum over samples, as every division of a batch needs it.

A function that returns a mean trains on one device as if the learning rate were smaller, and on each number of ranks as
if it were another, without an error. So in the first step the loss is also computed from the first samples, and from
two halves of these, without gradients. Samples that cannot be told apart in the outputs are not tried, nor a loss that
draws random numbers, or asks for the other ranks.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.microbatches import by_samples, detached
from evener.core.losses import Loss
from evener.core.losses.torch_losses import TorchLoss
from evener.core.types import Tree
from evener.data.batch import MicroBatch, map_leaves
from evener.errors import LossError
from evener.hardware.generators import all_kept
from evener.nn.context import Scope, current, resumed
from evener.nn.recompute_guard import apart
from evener.torch_internals.modules import own_buffers

_MOST = 4
"""Number of samples that are tried."""
_CLOSE = 1e-3


class _AsksForOthersError(Exception):
    """The loss looks at the samples of all ranks."""


class LossTrial:
    """Tries a loss once, on the first micro-batch that has two samples.

    Args:
        loss: Not tried if it is one of PyTorch's.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.is_done = isinstance(loss, TorchLoss)

    def run(self, outputs: Tree, micro: MicroBatch) -> None:
        """Tries the loss, if it has not been.

        Args:
            outputs: The model's outputs for ``micro``.

        Raises:
            LossError: If it is a mean over samples, or its count does not grow with them.

        Warns:
            UserWarning: If it is neither a sum nor a mean, and several ranks compute it.
        """
        scope, samples = current(), len(micro.samples)
        if self.is_done or scope is None or not micro.weight or samples < 2:
            return
        self.is_done = True
        is_main = threading.current_thread() is threading.main_thread()  # generators belong to all threads
        if is_main and by_samples((outputs, micro.targets), samples) and not _is_recording():
            self._compare(map_leaves(detached, outputs), micro.targets, scope, min(samples, _MOST))

    def _compare(self, outputs: Tree, targets: Tree, scope: Scope, samples: int) -> None:
        cuts = [(0, samples), (0, samples // 2), (samples // 2, samples), (0, samples)]
        with suppress(_AsksForOthersError), all_kept(*_devices(outputs)), _unchanged(self._loss):
            totals, counts = zip(*(self._values(outputs, targets, scope, *cut) for cut in cuts), strict=True)
            if (totals[0], counts[0]) == (totals[3], counts[3]):
                check_sums(totals[:3], counts[:3], (samples // 2, samples - samples // 2))

    def _values(
        self, outputs: Tree, targets: Tree, scope: Scope, start: int, stop: int
    ) -> tuple[float, float]:
        """Returns the total and the count of some of the samples."""

        def part(tree: Tree) -> Tree:
            return map_leaves(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, tree)

        own = Scope(scope.samples[start:stop], scope.step, scope.seed, 1, _ask_for_others, scope.sequence)
        with torch.no_grad(), apart(), resumed(own):
            cut = part(targets)
            return float(self._loss.total(part(outputs), cut)), float(self._loss.count(cut))


def check_sums(totals: tuple[float, ...], counts: tuple[float, ...], samples: tuple[int, int]) -> None:
    """Compares the loss of some samples with those of two parts of them.

    Args:
        totals: Of all, of the first part and of the second.
        counts: The same.
        samples: The number of samples in each part.

    Raises:
        LossError: If the total is a mean, or the count is constant.

    Warns:
        UserWarning: If the total is something else, and there are several ranks.
    """
    whole, first, second = totals
    if not all(map(math.isfinite, (*totals, *counts))):
        return
    number = sum(samples)
    if counts[0] == counts[1] == counts[2] != 0:
        raise LossError(
            f"the loss's count is {counts[0]:g} for {number} samples, and as much for {samples[0]} and for "
            f"{samples[1]} of them, so that a batch would count for more the more parts it is divided into: return "
            'the number of terms in the targets, or give evener.loss count="sum" to divide by nothing'
        )
    scale = abs(first) + abs(second)
    if abs(whole - first - second) <= _CLOSE * scale:
        return
    told = (
        f"the loss of {number} samples is {whole:g}, and those of {samples[0]} and {samples[1]} of them are "
    )
    told += f"{first:g} and {second:g}"
    for weights in (samples, counts[1:]):
        if sum(weights) and abs(whole - _mean(totals[1:], weights)) <= _CLOSE * scale:
            raise LossError(
                f"{told}: their mean, where it must be their sum, or each rank and each micro-batch would count as "
                'much as the whole. Have the loss return the sum of its terms, as reduction="sum" and .sum() do; its '
                "count is what divides it. A loss of torch.nn can be given as it is: loss=nn.CrossEntropyLoss()"
            )
    if dist.is_initialized() and dist.get_world_size() > 1 and not dist.get_rank():
        warnings.warn(
            f"{told}, which do not add up to it: the loss looks at several samples together. Each rank looks at its "
            "own, which is another training than that of one device. evener.nn.all_gather(rows, "
            "evener.nn.data_group()) in the loss brings the samples of all ranks together",
            stacklevel=2,
        )


def _mean(values: tuple[float, ...], weights: tuple[float, ...]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _ask_for_others() -> None:
    raise _AsksForOthersError


def _is_recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _devices(tree: Tree) -> set[torch.device]:
    found: set[torch.device] = set()
    map_leaves(lambda leaf: found.add(leaf.device) if isinstance(leaf, Tensor) else None, tree)
    return {device for device in found if device.type != "cpu"}


@contextmanager
def _unchanged(loss: Any) -> Iterator[None]:
    """Restores the attributes of a loss and of what it is made of, and the buffers of modules in it."""
    parts = [loss, *vars(loss).values()]
    parts += [part.__self__ for part in parts if hasattr(part, "__self__")]
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    attributes = [(vars(part), dict(vars(part))) for part in (*parts, *modules) if _has_attributes(part)]
    buffers = [(b, b.clone()) for module in modules for b in own_buffers(module).values() if b is not None]
    try:
        yield
    finally:
        for now, before in attributes:
            now.update(before)
        for buffer, numbers in buffers:
            if not torch.equal(buffer, numbers):
                buffer.copy_(numbers)


def _has_attributes(part: Any) -> bool:
    return isinstance(getattr(part, "__dict__", None), dict) and not isinstance(part, ModuleType)
