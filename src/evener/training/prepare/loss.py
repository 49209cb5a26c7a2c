"""A loss that has the value of the whole batch on every rank, and this rank's part of the gradient.

So a loop prints what one device would print, and the gradients of the ranks add up to that device's gradient.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.components.loss_trial import LossTrial
from evener.core.losses import Loss, exact
from evener.core.losses.torch_losses import is_torch_loss
from evener.data.batch import MicroBatch, leaves_of, map_leaves
from evener.errors import LossError
from evener.nn.context import current
from evener.torch_internals.compiling import outside_of_graphs
from evener.training.prepare.batch_tensors import is_of_a_batch
from evener.training.prepare.global_loss import (
    AllRanks,
    Parted,
    agreed,
    is_of_all_ranks,
    joined,
    over_of_all,
)
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.loss_arguments import rows_in
from evener.training.prepare.loss_kind import LossKind, way_of, way_of_all, way_over_positions
from evener.training.prepare.loss_of_rows import OfRows, first_number, name_of
from evener.training.prepare.positions import check_positions, refuse_divided
from evener.training.prepare.sample_tensor import (
    WITH_REDUCTION,
    NotSums,
    Own,
    called,
    own_of,
    plain_of,
    total_of,
)
from evener.training.prepare.zero_loss import silent_if_zero

_TWICE = (
    "evener.global_mean was given a number that is of all ranks already, and would count it once for each: it comes "
    "from what a prepared loss returned, or from a sum or mean of its rows, and needs no evener.global_mean. What a "
    "sum of the rows is divided by must be of all ranks too, as in (each * w).sum() / evener.gather(w).sum()"
)

_PAIRS = (
    "{name} was given as many outputs for each sample as rank 0 has samples, and their own numbers as targets, as in "
    "loss(rows @ rows.T, torch.arange(len(rows))): each rank compares its samples with each other and not with those "
    "of other ranks, which is another training than that of one device. Give evener.prepare the function of the rows, "
    "lambda rows: F.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=rows.device)), and call that: it then "
    "sees the rows of all ranks"
)
_LEAST_PAIRS = 4


class OverAll:
    """Computes ``loss(outputs, targets)``, or a loss of any arguments, over the samples of all ranks. Collective calls.

    Args:
        function: A loss as `evener.core.losses.exact` takes it; another PyTorch loss; or a function of the user, whose
            kind is tried on the first batch, and again when it takes another path.
    """

    def __init__(self, function: Any, place: LoopState) -> None:
        self._place, self._of_rows = place, OfRows(function, place)
        self._exact = _exact_or_none(function)
        self._trial = None if self._exact is None else LossTrial(self._exact)
        self._way = LossKind.SUMS if is_torchs_own(function) else None
        self._is_trusted = self._way is not None
        self._is_known = False
        """Whether a loss of known sums was called before."""
        self._courses: set[int] = set()
        self._calls = 0

    @property
    def function(self) -> Any:
        """The function as it was given last."""
        return self._of_rows.function

    @function.setter
    def function(self, function: Any) -> None:
        self._of_rows.function = function

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a prepared loss is a function and has no {name!r}. A module without parameters is taken for a loss: if "
            "it is a model, leave it out of evener.prepare, or put it into the model that has parameters"
        )

    @outside_of_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss of the whole batch, a tensor without dimensions, or all values that the function returns.

        With ``reduction="none"``, or of a function that returns a row for each sample, returns the losses of this
        rank's samples; sums and means of them are over all ranks.

        Raises:
            LossError: If ranks get different values, or have different batches that cannot be joined.
            ConfigurationError: Outside of a prepared loader's batch.
        """
        self._place.check_in_use("loss")
        current_batch = self._place.current_batch("the loss was called", (args, kwargs))
        check_positions((args, kwargs), current_batch)
        if self._exact is not None and len(args) == 2 and not kwargs and not self._is_by_samples():
            return self._of_known(self._exact, *args)
        if self._exact is not None and not self._is_trusted:
            raise LossError(
                f"{name_of(self.function)} is a loss of outputs and targets, and was called with {len(args)} arguments "
                f"and {', '.join(kwargs) or 'no names'}: put what belongs to the targets into one tuple or dict"
            )
        if self._place.world_size == 1:
            made = self.function(*args, **kwargs)
            self._of_rows.note_if_not_finite(first_number(made))
            return made
        made = self._of_any(args, kwargs)
        current_batch.is_counted |= self._way is not LossKind.SUMS
        return made

    def _of_known(self, loss: Loss, outputs: Any, targets: Any) -> Tensor:
        scope = current()
        if self._trial is not None and scope is not None and not self._trial.is_done:
            micro = MicroBatch(None, plain_of(targets), scope.samples, scope.weight)
            self._trial.run(plain_of(outputs), micro)
        if not self._is_known:
            self._is_known = True
            if self._place.world_size > 1 and self._place.rank == 0 and _are_pairs(outputs, targets):
                warnings.warn(_PAIRS.format(name=name_of(self.function)), stacklevel=4)
        total, count = loss.total(outputs, targets), loss.count(targets)
        sizes = [leaf.numel() for leaf in leaves_of((outputs, targets)) if isinstance(leaf, Tensor)]
        own = sizes if is_torch_loss(self.function) else []
        width = _width(self._place, targets) if loss.is_over_elements else 0
        return joined(self._place, total, count, loss.divisor, own=own, width=width)

    def _is_by_samples(self) -> bool:
        return self._is_trusted and _option(self.function, "reduction") == "none"

    def _of_any(self, args: Any, kwargs: Any) -> Any:
        self._calls, told = self._calls + 1, None
        if self._way is None:
            told = self._of_rows.told((args, kwargs))
            tries = [ways.wrapped((args, kwargs)) for ways in told.ways]
            sequence = self._place.current_batch("").micro.sequence
            own = way_of_all(self.function, tries) if sequence is None else self._way_of(tries[0])
            way = agreed(self._place, own)
            if way is LossKind.UNKNOWN:
                return self._of_rows((args, kwargs), told)
            self._way = way
        elif self._way < LossKind.WHOLE and not self._calls & (self._calls - 1):
            told = self._of_rows.told((args, kwargs))
        if self._way < LossKind.WHOLE and told and self._place.current_batch("").micro.sequence is None:
            self._of_rows.check_numbers(told, (args, kwargs))
        made = self._of_sums(args, kwargs, self._way) if self._way < LossKind.WHOLE else _PARTED
        if made is _PARTED:
            self._way = LossKind.WHOLE
            return self._of_rows((args, kwargs))
        return made

    def _of_sums(self, args: Any, kwargs: Any, way: LossKind) -> Any:
        joint, stays = AllRanks(self._place, way is LossKind.SUMS), True
        made: Any = None
        try:
            with self._of_rows.at_work():
                made = called(self.function, own_of(args, joint), own_of(kwargs, joint))
        except Parted:
            return _PARTED
        except NotSums:
            stays = False
        if self._is_trusted:
            return self._of_torchs_own(made)
        course = zlib.crc32(" ".join(joint.names).encode())
        is_new = course not in self._courses
        if stays and is_new:
            tried = self._of_rows.arguments.remembered((args, kwargs)).wrapped((args, kwargs))
            stays = self._way_of(tried) is way
            self._courses |= {course} if stays else set()
        rows, number = rows_in((args, kwargs)) if way is LossKind.PER_ROW else 0, first_number(made)
        if way is LossKind.PER_ROW:
            stays &= self._are_samples(rows)
        if number is None:
            current_batch = self._place.current_batch("")
            refuse_divided(f"{name_of(self.function)} returns a row for each sample", current_batch)
        try:
            over = over_of_all(self._place, stays, number, rows, is_new)
        except Parted:
            return _PARTED
        if way is not LossKind.SUMS:
            return plain_of(made) * (rows / over)
        return _unmarked(made) if number is not None else own_of(plain_of(made), AllRanks(self._place), True)

    def _way_of(self, tried: Any) -> LossKind:
        """Returns the kind that the function is, with these arguments."""
        micro = self._place.current_batch("").micro
        if micro.sequence is None:
            return way_of(self.function, *tried)
        args, kwargs = tried
        return way_over_positions(self.function, args, kwargs, len(micro.samples), micro.sequence.size)

    def _are_samples(self, rows: int) -> bool:
        """Returns True if rows are samples, or there are equally many rows for each sample."""
        current_batch = self._place.current_batch("")
        return bool(rows) and not current_batch.dim and not rows % len(current_batch.micro.samples)

    def _of_torchs_own(self, made: Any) -> Any:
        if isinstance(made, Own) and not made.dim():
            return _PARTED  # outputs and targets of different shapes, which PyTorch broadcasts
        return own_of(plain_of(made), AllRanks(self._place), True) if isinstance(made, Own) else made

    def __repr__(self) -> str:
        return f"OverAll({self.function!r})"


_OF_TWO_KINDS = (
    "a mean is over words, or other terms of a sample, on one rank and over samples on another, as where an if leaves "
    "out a loss without terms: say how many, evener.global_mean(value, count), which may be 0"
)
_PARTED: Any = object()
"""Returned if the result must be computed from the rows of all ranks instead."""


def is_torchs_own(function: Any) -> bool:
    """Returns True for PyTorch's own losses, which need no try."""
    if isinstance(function, functools.partial):
        return not function.args and is_torchs_own(function.func)
    if isinstance(function, nn.Module):
        return type(function).__module__ == nn.CrossEntropyLoss.__module__
    return any(function is getattr(F, name) for name in WITH_REDUCTION)


def _option(function: Any, name: str) -> Any:
    if isinstance(function, functools.partial):
        return function.keywords.get(name)
    return getattr(function, name, None)


def _exact_or_none(function: Any) -> Loss | None:
    try:
        return exact(function)
    except LossError:
        if is_torch_loss(function) or not callable(function):
            raise
        return None


def _unmarked(made: Any) -> Any:
    """Unwraps rows of samples. Values of all ranks stay as they are."""
    return map_leaves(lambda leaf: leaf.plain if isinstance(leaf, Own) else leaf, made)


def _are_pairs(outputs: Any, targets: Any) -> bool:
    """Returns True for a score of each pair of this rank's samples, with each sample's own number as its target. Few
    samples may have such classes by chance."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or is_of_a_batch(targets):
        return False
    number = len(targets) if targets.dim() == 1 and not targets.is_floating_point() else 0
    alike = number >= _LEAST_PAIRS and outputs.shape == (number, number)
    return alike and torch.equal(
        plain_of(targets), torch.arange(number, device=targets.device).to(targets.dtype)
    )


def _width(place: LoopState, terms: Tensor) -> int:
    return place.current_batch("").width(terms.numel(), *terms.shape[:1])


def global_mean(place: LoopState, value: Tensor, count: float | Tensor | None, kind: str = "known") -> Tensor:
    """Returns the mean over the terms of all ranks, from this rank's mean over ``count`` terms.

    Args:
        count: None if ``value`` is the terms themselves, all of which count.
        kind: What the terms are; the same on all ranks.

    Raises:
        LossError: If the value comes from a number of all ranks, which would count once for each. On all ranks, if the
            kinds differ.
    """
    if is_of_all_ranks(value, place):
        raise LossError(_TWICE)
    value = plain_of(value)
    if count is None:
        return joined(place, total_of(value), value.numel(), width=_width(place, value))
    if value.dim():
        return joined(place, total_of(value), count)
    value = value.to(torch.promote_types(value.dtype, torch.float32))  # the sum may overflow float16
    if isinstance(count, Tensor) and place.later.is_late(count):
        total = silent_if_zero(value) * count.to(value.dtype)
    else:
        count = float(count)
        total = value * count
    try:
        return joined(place, total, count, code=kind)
    except Parted:
        raise LossError(_OF_TWO_KINDS) from None
