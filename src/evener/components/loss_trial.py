"""Tries whether a user's loss or metric is a sum over samples, as every division of a batch needs it.

A function that returns a mean trains on one device as if the learning rate were smaller, and on each number of ranks as
if it were another, without an error. So in the first step the loss is also computed from the first samples, and from
two halves of these, without gradients. Samples that cannot be told apart in the outputs are not tried, nor a loss that
draws random numbers, or asks for the other ranks. Metrics are tried in the first evaluation.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import isfunction
from itertools import starmap
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evener.components.microbatches import by_samples
from evener.components.model_trial import attributes_kept, closure_of, state_kept, variables_kept
from evener.core.losses import Accumulator, Loss, Sum
from evener.core.losses import metric as accumulator_of
from evener.core.losses.torch_losses import TorchLoss, is_sum, is_torch_loss
from evener.core.types import Tree
from evener.data.batch import MicroBatch, detached, leaves_of, map_leaves, tensors_in
from evener.distributed import signals as interrupt
from evener.errors import LossError
from evener.hardware.generators import all_kept
from evener.nn.context import Scope, current, resumed
from evener.nn.recompute_guard import apart
from evener.torch_internals.dispatch import DispatchMode, active_fake_mode

_MOST = 4
"""Number of samples that are tried."""
_OF_STATES = range(8, 17)
"""Numbers of samples with which an object with states is tried. The scores of fewer may all be between 0 and 1 by
chance, and torchmetrics would take them for probabilities."""
_CLOSE, _ROUNDINGS = 1e-3, 4
"""Relative difference that counts as none: at least the first, and so many roundings in the type of the outputs."""
_tried = WeakSet[Any]()
"""Metrics that were tried in this process, so that each is told of once."""


class _AsksForOthersError(Exception):
    """The loss looks at the samples of all ranks."""


class SumTrial(NamedTuple):
    """What was found for some samples, for the first part of them and for the second."""

    totals: tuple[float, float, float]
    counts: tuple[float, float, float]
    samples: tuple[int, int]
    """The number of samples in each part."""
    close: float = _CLOSE
    """Relative difference that counts as none."""

    @property
    def has_constant_count(self) -> bool:
        return self.counts[0] == self.counts[1] == self.counts[2] != 0

    @property
    def adds_up(self) -> bool:
        return self._is_near(self.totals[1] + self.totals[2])

    @property
    def is_mean(self) -> bool:
        """True if the total of all samples is the mean of those of the parts, by their samples or by their counts."""
        _, first, second = self.totals
        return any(
            self._is_near((first * one + second * other) / (one + other))
            for one, other in (self.samples, self.counts[1:])
            if one + other
        )

    def _is_near(self, expected: float) -> bool:
        return abs(self.totals[0] - expected) <= self.close * (abs(self.totals[1]) + abs(self.totals[2]))

    def __str__(self) -> str:
        whole, first, second = (f"{total:g}" for total in self.totals)
        one, other = self.samples
        return f"of {one + other} samples is {whole}, and those of {one} and {other} of them are {first} and {second}"


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
        if self.is_done or not micro.weight or len(micro.samples) < 2:
            return
        self.is_done = True
        loss = self._loss
        found = trial_of(lambda *given: Sum(loss.total(*given), loss.count(given[1])), outputs, micro, loss)
        if found is not None:
            check_loss(found)


def check_loss(found: SumTrial) -> None:
    """Raises and warns as :meth:`LossTrial.run` does."""
    if found.has_constant_count:
        raise LossError(
            f"the loss's count is {found.counts[0]:g} for {sum(found.samples)} samples and for each of two parts of "
            "them, so that a batch would count for more the more parts it is divided into: return the number of terms "
            'in the targets, or give evener.loss count="sum" to divide by nothing'
        )
    if found.adds_up:
        return
    if found.is_mean:
        raise LossError(
            f"the loss {found}: their mean, where it must be their sum, or each rank and each micro-batch would count "
            'as much as the whole. Have the loss return the sum of its terms, as reduction="sum" and .sum() do; its '
            "count is what divides it. A loss of torch.nn can be given as it is: loss=nn.CrossEntropyLoss()"
        )
    if dist.is_initialized() and dist.get_world_size() > 1 and not dist.get_rank():
        warnings.warn(
            f"the loss {found}, which do not add up to it: it looks at several samples together, or has a term of no "
            "sample. Each rank computes it of its own samples, which is another training than that of one device. "
            "evener.nn.all_gather(rows, evener.nn.data_group()) in the loss brings the samples of all ranks together, "
            "and Task(penalty=...) takes what belongs to no sample",
            stacklevel=2,
        )


def try_metrics(metrics: Mapping[str, Any], outputs: Tree, micro: MicroBatch) -> None:
    """Tries those metrics of the user that have not been: functions, and objects with states.

    Warns:
        UserWarning: On the first rank, if one depends on how its samples are divided.
    """
    for name, metric in metrics.items():
        has_states = _has_states(metric)
        least = _OF_STATES[0] if has_states else 2
        if not micro.weight or len(micro.samples) < least or not _is_new(metric):
            continue
        said = (_of_states if has_states else _of_function)(metric, outputs, micro)
        if said and not (dist.is_initialized() and dist.get_rank()):
            warnings.warn(f"the {said.format(name=repr(name))}", stacklevel=2)


def _has_states(metric: Any) -> bool:
    return all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def _is_new(metric: Any) -> bool:
    """Returns True the first time for a function that is no loss, or an object with states, if it can be remembered."""
    is_loss = is_sum(metric) or is_torch_loss(metric)
    if is_loss or not (callable(metric) or _has_states(metric)):
        return False
    try:
        is_new = metric not in _tried
        _tried.add(metric)
    except TypeError:
        return False
    return is_new


def _of_function(metric: Any, outputs: Tree, micro: MicroBatch) -> str:
    """Describes, with a place for the name, what of a function does not add up. Returns "" if all does."""
    found = trial_of(metric, outputs, micro, metric)
    if found is None or (found.adds_up and not found.has_constant_count):
        return ""
    return (
        f"total of metric {{name}} {found}, and their counts are {found.counts[0]:g}, {found.counts[1]:g} "
        f"and {found.counts[2]:g}: both must add up, or the metric depends on how its samples are divided into "
        "batches and over ranks. Return evener.Sum(sum of the terms, their number), or use a torchmetrics "
        "object"
    )


def _of_states(source: Any, outputs: Tree, micro: MicroBatch) -> str:
    """Describes, with a place for the name, other values of an object where its samples are divided in either of two
    ways. Returns "" if there are none, or that cannot be told."""
    samples = min(len(micro.samples), _OF_STATES[-1])
    few = samples * 3 // 8
    with warnings.catch_warnings(), all_kept(*_devices(outputs)):
        warnings.simplefilter("ignore")  # what it says of so few samples
        moved = [_moved_value(source, outputs, micro, samples, first) for first in (few, samples - few)]
    if None in moved or moved[0] is None:
        return ""
    whole, divided = moved[0]
    return (
        f"metric {{name}} is {whole:g} for {samples} samples, and {divided:g} where {few} of them are apart from the "
        "others: it depends on how its samples are divided into batches and over ranks. All that update() collects "
        "must be in states of add_state, with sums, counts or rows of samples and their dist_reduce_fx, and no means; "
        "or give a function that returns evener.Sum(sum of the terms, their number)"
    )


def _moved_value(
    source: Any, outputs: Tree, micro: MicroBatch, samples: int, first: int
) -> tuple[float, float] | None:
    """Returns the first number that is another one where two ranks merge their states, or a rank alone has two batches:
    of all samples, and of the ``first`` and the others. Returns None if there is none, or that cannot be told."""
    made: list[Accumulator] = []
    merges = dist.is_initialized() and dist.get_world_size() > 1

    def update(*given: Any) -> Sum:
        made.append(made[1] if len(made) == 2 and not merges else accumulator_of(source))
        made[-1].update(*given)
        return Sum(0.0, 1.0)

    if trial_of(update, outputs, micro, source, samples, first) is None:
        return None
    whole, merged, other, again = made
    try:
        if merges:
            merged.merge([merged.state(), other.state()])
        values, divided, once_more = (_numbers(each.compute()) for each in (whole, merged, again))
    except Exception:  # as in a trial
        interrupt.check()
        return None
    if values != once_more or not all(map(math.isfinite, (*values, *divided))):
        return None
    pairs = zip(values, divided, strict=False)
    return next((pair for pair in pairs if abs(pair[0] - pair[1]) > _CLOSE * max(map(abs, pair))), None)


def _numbers(value: Any) -> list[float]:
    return [float(leaf) for leaf in leaves_of(value)]


def trial_of(
    terms: Callable[[Tree, Tree], Sum],
    outputs: Tree,
    micro: MicroBatch,
    keeps: object,
    most: int = _MOST,
    first: int | None = None,
) -> SumTrial | None:
    """Returns the terms of the first samples of a micro-batch, and of two parts of these. Returns None if samples
    cannot be told apart, or the terms cannot be computed from any samples, or are not the same each time.

    Args:
        keeps: The object whose state is restored.
        most: The number of samples that are tried, if there are so many.
        first: The number of samples in the first part; half of them by default.
    """
    scope, samples = current(), len(micro.samples)
    is_main = threading.current_thread() is threading.main_thread()  # generators belong to all threads
    if scope is None or not is_main or not by_samples((outputs, micro.targets), samples) or _is_untold():
        return None
    outputs, samples = map_leaves(detached, outputs), min(samples, most)

    def terms_of(start: int, stop: int) -> tuple[float, float]:
        def part(tree: Tree) -> Tree:
            return map_leaves(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, tree)

        own = Scope(scope.samples[start:stop], scope.step, scope.seed, 1, ask_for_others, scope.sequence)
        with torch.no_grad(), apart(), resumed(own), WithoutMessages():
            found = terms(part(outputs), part(micro.targets))
            return float(found.total), float(found.count)

    half = first or samples // 2
    with all_kept(*_devices(outputs)), unchanged(keeps):
        try:
            whole, one, other, again = starmap(
                terms_of, [(0, samples), (0, half), (half, samples), (0, samples)]
            )
        except Exception:  # of the user's code, which will say so itself where it cannot compute a batch
            interrupt.check()
            return None
    if whole != again or not all(map(math.isfinite, (*whole, *one, *other))):
        return None
    totals, counts = zip(whole, one, other, strict=True)
    return SumTrial(totals, counts, (half, samples - half), _close(outputs))


def ask_for_others() -> None:
    """Ends a trial that asks for the other ranks."""
    raise _AsksForOthersError


class WithoutMessages(DispatchMode):
    """Lets no message be sent: other ranks may not try the loss at the same time."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            ask_for_others()
        return func(*args, **(kwargs or {}))


def _is_untold() -> bool:
    """Returns True if there are no numbers yet: in a graph that is recorded, and in an estimate."""
    is_recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return is_recording or active_fake_mode() is not None


def _close(outputs: Tree) -> float:
    """Returns the relative difference that counts as none in what is computed from these outputs."""
    types = {leaf.dtype for leaf in tensors_in(outputs) if leaf.is_floating_point()}
    return max([_CLOSE, *(_ROUNDINGS * torch.finfo(dtype).eps for dtype in types)])


def _devices(tree: Tree) -> set[torch.device]:
    found = {leaf.device for leaf in tensors_in(tree)}
    return {device for device in found if device.type != "cpu"}


@contextmanager
def unchanged(own: Any) -> Iterator[None]:
    """Restores the state of a loss or metric and of what it is made of: functions and their variables, their objects,
    modules."""
    parts = [own, *getattr(own, "__dict__", {}).values()]
    parts += [part.func for part in parts if isinstance(part, partial)]
    around = [value for part in filter(isfunction, parts) for _, value in closure_of(part)]
    parts += [value for value in around if callable(value) and not isinstance(value, type)]
    parts += [part.__self__ for part in parts if hasattr(part, "__self__")]
    with ExitStack() as stack:
        stack.enter_context(attributes_kept(part for part in parts if _has_attributes(part)))
        for function in filter(isfunction, parts):
            stack.enter_context(variables_kept(function))
        for module in (part for part in parts if isinstance(part, nn.Module)):
            stack.enter_context(state_kept(module))
        yield


def _has_attributes(part: Any) -> bool:
    return isinstance(getattr(part, "__dict__", None), dict) and not isinstance(part, ModuleType)
