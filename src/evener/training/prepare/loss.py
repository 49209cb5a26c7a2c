"""A loss that has the value of the whole batch on every rank, and this rank's part of the gradient.

So a loop prints what one device would print, and the gradients of the ranks add up to that device's gradient.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.core.losses import Loss, exact
from evener.core.losses.torch_losses import is_torch_loss
from evener.data.batch import map_leaves
from evener.data.division import own_slice
from evener.data.fingerprint import digest_of
from evener.errors import DivergenceError, LossError
from evener.training.consistency.replicas import digest
from evener.training.prepare.gather import gathered
from evener.training.prepare.global_loss import AllRanks, Parted, agreed, joined, of_all, over_of_all
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.loss_kind import LossKind, rows_in, way_of
from evener.training.prepare.positions import check_positions, refuse_divided
from evener.training.prepare.rank_checks import check_marks
from evener.training.prepare.sample_tensor import WITH_REDUCTION, NotSums, Own, leaves_of, own_of, plain_of
from evener.training.prepare.zero_loss import silent_if_zero
from evener.training.step.step import not_finite


class OverAll:
    """Computes ``loss(outputs, targets)``, or a loss of any arguments, over the samples of all ranks. Collective calls.

    Args:
        function: A loss as `evener.core.losses.exact` takes it; another PyTorch loss; or a function of the user, whose
            kind is tried on the first batch, and again when it takes another path.
    """

    def __init__(self, function: Any, place: LoopState) -> None:
        self.function, self._place = function, place
        self._exact = _exact_or_none(function)
        self._way = LossKind.SUMS if is_torchs_own(function) else None
        self._is_trusted = self._way is not None
        self._courses: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss of the whole batch, a tensor without dimensions, or all values that the function returns.

        With ``reduction="none"`` returns the losses of this rank's samples; sums and means of them are over all ranks.

        Raises:
            LossError: If ranks get different values, or have different batches that cannot be joined.
            DivergenceError: If the loss of a rank is not finite, in training; on all ranks alike.
            ConfigurationError: Outside of a prepared loader's batch.
        """
        current_batch = self._place.current_batch("the loss was called", (args, kwargs))
        check_positions((args, kwargs), current_batch)
        if self._exact is not None and len(args) == 2 and not kwargs and not self._is_by_samples():
            return self._of_known(self._exact, *args)
        if self._exact is not None and not self._is_trusted:
            raise LossError(
                f"{_name(self.function)} is a loss of outputs and targets, and was called with {len(args)} arguments "
                f"and {', '.join(kwargs) or 'no names'}: put what belongs to the targets into one tuple or dict"
            )
        if self._place.world_size == 1:
            made = self.function(*args, **kwargs)
            self._check_finite(_first_number(made))
            return made
        made = self._of_any(args, kwargs)
        current_batch.is_counted |= self._way is not LossKind.SUMS
        return made

    def _of_known(self, loss: Loss, outputs: Any, targets: Any) -> Tensor:
        total, count = loss.total(outputs, targets), loss.count(targets)
        sizes = [leaf.numel() for leaf in leaves_of((outputs, targets)) if isinstance(leaf, Tensor)]
        own = sizes if is_torch_loss(self.function) else []
        return joined(self._place, total, count, loss.divisor, own=own)

    def _is_by_samples(self) -> bool:
        return self._is_trusted and _option(self.function, "reduction") == "none"

    def _of_any(self, args: Any, kwargs: Any) -> Any:
        if self._way is None:
            way = agreed(self._place, way_of(self.function, args, kwargs))
            if way is LossKind.UNKNOWN:
                return self._of_rows(args, kwargs)
            self._way = way
        made = self._of_sums(args, kwargs, self._way) if self._way < LossKind.WHOLE else _PARTED
        if made is _PARTED:
            self._way = LossKind.WHOLE
            return self._of_rows(args, kwargs)
        return made

    def _of_sums(self, args: Any, kwargs: Any, way: LossKind) -> Any:
        joint, stays = AllRanks(self._place, way is LossKind.SUMS), True
        made: Any = None
        try:
            made = self.function(*own_of(args, joint), **own_of(kwargs, joint))
        except Parted:
            return _PARTED
        except NotSums:
            stays = False
        if self._is_trusted:
            return self._of_torchs_own(made)
        course = zlib.crc32(" ".join(joint.names).encode())
        is_new = course not in self._courses
        if stays and is_new:
            stays = way_of(self.function, args, kwargs) is way
            self._courses |= {course} if stays else set()
        rows, number = rows_in((args, kwargs)) if way is LossKind.PER_ROW else 0, _first_number(made)
        if way is LossKind.PER_ROW:
            stays &= self._are_samples(rows)
        try:
            over = over_of_all(self._place, stays, number, rows, is_new)
        except Parted:
            return _PARTED
        return _unmarked(made) if way is LossKind.SUMS else plain_of(made) * (rows / over)

    def _are_samples(self, rows: int) -> bool:
        """Returns True if rows are samples, or there are equally many rows for each sample."""
        current_batch = self._place.current_batch("")
        return bool(rows) and not current_batch.dim and not rows % len(current_batch.micro.samples)

    def _of_torchs_own(self, made: Any) -> Any:
        if isinstance(made, Own) and not made.dim():
            return _PARTED  # outputs and targets of different shapes, which PyTorch broadcasts
        return own_of(plain_of(made), AllRanks(self._place), True) if isinstance(made, Own) else made

    def _of_rows(self, args: Any, kwargs: Any) -> Any:
        """Computes the function on each rank from the rows of all ranks."""
        place, current_batch = self._place, self._place.current_batch("")
        held = _memory_of(place.learner.model)
        rows = rows_in([leaf for leaf in leaves_of((args, kwargs)) if _address(leaf) not in held])
        refuse_divided(f"{_name(self.function)} is no sum or mean over positions", current_batch)
        shares = self._rows_of_ranks((args, kwargs), rows, held)

        def whole(leaf: Any) -> Any:
            return gathered(leaf, shares, place) if _has_rows(leaf, rows, held) else leaf

        of_all = map_leaves(whole, (args, kwargs))
        with place.random.drawn():
            made = self.function(*of_all[0], **of_all[1])
        number = _first_number(made)
        over_of_all(place, True, number, 0, _BY_ROWS not in self._courses)
        self._courses.add(_BY_ROWS)
        self._check_finite(number)
        own = own_slice(shares, place.data.index) if current_batch.samples else slice(0, 1)
        return map_leaves(lambda leaf: leaf[own] if _has_rows(leaf, sum(shares)) else leaf, made)

    def _check_finite(self, number: Tensor | None) -> None:
        """Checks a loss that each rank has computed for the whole batch.

        Raises:
            DivergenceError: If it has a gradient and is not finite.
        """
        step = self._place.steps

        def known(values: list[float]) -> None:
            if not math.isfinite(values[0]):
                raise DivergenceError(not_finite(f"the loss is {values[0]} in step {step}"))

        if number is not None and number.requires_grad:
            self._place.later.check(known, plain_of(number).detach())

    def _rows_of_ranks(self, given: Any, rows: int, held: Collection[int]) -> list[int]:
        """Returns the number of rows that count of each part of the batch. A collective call.

        Args:
            held: What :func:`_memory_of` returns.

        Raises:
            LossError: On all ranks, if their rows do not make one batch.
        """
        place, current_batch = self._place, self._place.current_batch("")
        kinds = [
            (str(leaf.dtype), tuple(leaf.shape[1:]))
            for leaf in leaves_of(given)
            if _has_rows(leaf, rows, held)
        ]
        others = [plain_of(leaf) for leaf in leaves_of(given) if not _has_rows(leaf, rows, held)]
        on_device = [leaf for leaf in others if place.later.is_late(leaf)]
        of_host = [f"{leaf.dtype} {leaf.shape}" if place.later.is_late(leaf) else leaf for leaf in others]
        fits = bool(rows) and not current_batch.dim and not rows % len(current_batch.micro.samples)
        said = place.session.control.gather_objects(
            (kinds, digest_of(of_host), fits, rows * current_batch.micro.weight, current_batch.agreed)
        )
        check_marks([each[4] for each in said])
        name = _name(self.function)
        if not all(each[2] for each in said):
            raise LossError(_NO_ROWS.format(name=name))
        if any(each[0] != said[0][0] for each in said):
            raise LossError(_OTHER_SHAPES.format(name=name, shapes=[each[0] for each in said]))
        if any(each[1] != said[0][1] for each in said):
            raise LossError(_OTHER_VALUES.format(name=name, where=""))
        if on_device:
            self._compare_later(on_device)
        return [each[3] for each in place.data.of_parts(said)]

    def _compare_later(self, tensors: Sequence[Tensor]) -> None:
        """Compares tensors of a device that must be the same on all ranks. A collective call."""
        where = self._place.later.where

        def known(digests: list[float]) -> None:
            if digests != digests[: len(tensors)] * self._place.world_size:
                raise LossError(_OTHER_VALUES.format(name=_name(self.function), where=where))

        self._place.later.check(known, of_all(self._place, *map(digest, tensors)))

    def __repr__(self) -> str:
        return f"OverAll({self.function!r})"


_PARTED: Any = object()
"""Returned if the result must be computed from the rows of all ranks instead."""

_NO_ROWS = (
    "{name} is no sum or mean over samples, and what it was called with has no row for each of a rank's samples along "
    "the first dimension, so that it cannot be computed from those of all ranks: pass all that belongs to samples as "
    "tensors with the samples first, or give an evener.loss that says its sum and its count"
)
_OTHER_SHAPES = (
    "{name} is no sum or mean over samples, and is computed from the rows of all ranks, which are not of one shape: "
    "{shapes}. Let all ranks fill up to one length, or give an evener.loss that says its sum and its count"
)
_OTHER_VALUES = (
    "{name} was called{where} with something that is no row of samples and differs between ranks, such as a number "
    "counted from a rank's own samples: let the function count it from its arguments"
)
_BY_ROWS = -1
"""Stands for the path of a function that is computed from the rows of all ranks."""


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


def _has_rows(leaf: Any, rows: int, held: Collection[int] = ()) -> bool:
    """Returns True if a tensor has so many rows, and is none of the model's own, which may have as many."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows and _address(leaf) not in held


def _memory_of(model: nn.Module) -> set[int]:
    """Returns the addresses of the model's parameters and buffers."""
    return {_address(each) for each in (*model.parameters(), *model.buffers())} - {0}


def _address(leaf: Any) -> int:
    """Returns where the memory of a tensor begins; 0 if that is unknown."""
    plain = plain_of(leaf) if isinstance(leaf, Tensor) else None
    return 0 if plain is None or plain.layout is not torch.strided else plain.untyped_storage().data_ptr()


def _first_number(made: Any) -> Tensor | None:
    found = (leaf for leaf in leaves_of(made) if isinstance(leaf, Tensor) and not leaf.dim())
    return next(found, None)


def _unmarked(made: Any) -> Any:
    """Unwraps rows of samples. Values of all ranks stay as they are."""
    return map_leaves(lambda leaf: leaf.plain if isinstance(leaf, Own) else leaf, made)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def global_mean(place: LoopState, value: Tensor, count: float | Tensor) -> Tensor:
    """Returns the mean over the terms of all ranks, from this rank's mean over ``count`` terms."""
    if value.dim():
        return joined(place, value.sum(), count)
    if isinstance(count, Tensor) and place.later.is_late(count):
        return joined(place, silent_if_zero(value) * count.to(value.dtype), count)
    number = float(count)
    return joined(place, value * number, number)
