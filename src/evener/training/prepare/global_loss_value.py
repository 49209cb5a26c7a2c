"""The value of a loss over all ranks. Detects division or multiplication by a number that only one rank has.

Example: a sum over a batch of 12, divided by this rank's 6 samples, is wrong by a factor of two. All ranks agree on it
if their shares are equal, so nothing else would detect it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from evener.errors import LossError
from evener.training.prepare.factors import factors_at, is_by_literal
from evener.training.prepare.late_checks import LateChecks, Number

_SUM = (
    "the loss is a sum over the samples of all ranks, and is divided by {number}{where}, which is how many rank {rank} "
    "alone has: divide by evener.batch_size(), the samples of all ranks, or give evener.prepare a loss that is a mean "
    "already. A constant that is {number} by chance goes into the loss: evener.loss(loss, scale=1 / {number})"
)
_MEAN = (
    "the loss is a mean over the samples of all ranks, and is multiplied by {number}{where}, which is how many rank "
    "{rank} alone has: for a sum or a mean over an epoch multiply by evener.batch_size(), the samples of all ranks"
)

_TOLD = "__warningregistry__"
"""The global variable in which Python remembers the warnings of a module."""


@dataclass(frozen=True)
class Confused:
    """This rank's numbers that may be mistaken for those of all ranks."""

    own: frozenset[int]
    """Numbers of samples, elements and terms of this rank that are not those of all."""
    counted: Set[int]
    """Numbers counted over all ranks with this batch, also later: these may be equal by chance."""
    rank: int
    later: LateChecks
    terms: tuple[Tensor, ...] = ()
    """The numbers of terms of the ranks that add up, if they are still on a device."""
    dim: int = 0
    """The dimension of the samples in the batch's tensors."""
    whole: frozenset[int] = frozenset()
    """The numbers of samples and terms of all ranks, as far as they are known."""

    def check(self, number: Number, tell: Callable[[int], None]) -> None:
        """Calls ``tell`` with the number if it is this rank's own, when all is known."""

        def known(numbers: list[float]) -> None:
            number, *terms = numbers
            own = self.own | set(map(int, terms[:1] if len(set(terms)) == 1 else ()))
            if number > 1 and number in own - {int(sum(terms))} and number not in self.counted:
                tell(int(number))

        self.later.check(known, number, *self.terms)


class GlobalLossValue(Tensor):
    """One number over the samples of all ranks.

    Attributes:
        plain: The same as a plain tensor.
        confused: Numbers by which it must not be divided or multiplied.
        is_sum: Whether it is a sum, divided by nothing.
    """

    plain: Tensor
    confused: Confused
    is_sum: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, whole = getattr(func, "__name__", ""), next(_wholes((args, kwargs)))
        if any(not issubclass(kind, GlobalLossValue) and kind is not Tensor for kind in types):
            return NotImplemented  # leaves the call to another tensor subclass
        if name in ("div", "true_divide", "div_", "divide", "mul", "mul_", "multiply"):
            others = [part for part in args if part is not whole]
            whole.look_at(name, others, inspect.currentframe())
        elif name in ("item", "__float__"):
            whole.look_at_line(inspect.currentframe())
        is_sum = whole.is_sum and not (name in ("div", "true_divide") and whole.is_mean_over(args[1:2]))
        made = func(*_plain(args), **_plain(kwargs or {}))
        # A sum with a number of divided weights is a DTensor, which backward() refuses.
        stays = name in _STAYS and type(made) is Tensor and not made.dim()
        return whole_of(made, whole.confused, is_sum) if stays else made

    def is_mean_over(self, divisors: Sequence[Any]) -> bool:
        """Returns True if a sum that is divided by these is a mean over all ranks, of which any part may be taken."""
        known = self.confused.whole | self.confused.counted
        return any(
            isinstance(each, GlobalLossValue) or (isinstance(each, int) and each in known)
            for each in divisors
        )

    def look_at(self, name: str, others: list[Any], frame: FrameType | None) -> None:
        """Checks a division or multiplication by ``others`` in the line that calls ``frame``. A number that stands in
        the code counts nothing, though it may be equal by chance.

        Raises:
            LossError: If a sum over all ranks is divided by a number of this rank.

        Warns:
            UserWarning: If a mean over all ranks is multiplied by one.
        """
        if self.is_sum == name.startswith("mul"):
            return
        number = _number(others, self.confused.later)
        line = frame.f_back if frame is not None and number in self.confused.own else None
        if number is None or (line is not None and is_by_literal(line)):
            return
        is_sum, rank, where = self.is_sum, self.confused.rank, self.confused.later.where

        def tell(found: int) -> None:
            message = (_SUM if is_sum else _MEAN).format(number=found, rank=rank, where=where)
            if is_sum:
                raise LossError(message)
            warnings.warn(message, stacklevel=8)

        self.confused.check(number, tell)

    def look_at_line(self, frame: FrameType | None) -> None:
        """Checks what the line that calls ``frame`` does with this value as a Python number.

        Warns:
            UserWarning: If it divides a sum over all ranks, or multiplies a mean, by a number of this rank.
        """
        line = frame.f_back if frame is not None and self.confused.own else None
        if line is None:
            return
        message, rank = _SUM if self.is_sum else _MEAN, self.confused.rank

        def tell(found: int) -> None:
            text = message.format(number=found, rank=rank, where="")
            place = line.f_code.co_filename, line.f_lineno
            warnings.warn_explicit(text, UserWarning, *place, registry=line.f_globals.setdefault(_TOLD, {}))

        for operation, number in factors_at(line, self.confused.dim):
            if self.is_sum == (operation == "div"):
                self.confused.check(number, tell)


def whole_of(value: Tensor, confused: Confused, is_sum: bool) -> Tensor:
    """Returns ``value`` as one number over all ranks."""
    made = value.as_subclass(GlobalLossValue)
    made.plain, made.confused, made.is_sum = value, confused, is_sum
    return made


_STAYS = ("add", "sub", "mul", "div", "true_divide", "neg", "detach", "clone", "cpu", "to", "double", "float")


def _number(others: list[Any], later: LateChecks) -> Number | None:
    """Returns the operand if it may be a count; otherwise None."""
    other = others[0] if others else None
    if isinstance(other, Tensor):
        return None if other.dim() or other.requires_grad else later.kept(_plain(other))
    return other if isinstance(other, int) and not isinstance(other, bool) else None


def _wholes(tree: Any) -> Any:
    if isinstance(tree, GlobalLossValue):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from _wholes(part)
    elif isinstance(tree, dict):
        yield from _wholes(list(tree.values()))


def _plain(tree: Any) -> Any:
    if isinstance(tree, GlobalLossValue):
        return tree.plain
    if isinstance(tree, tuple | list):
        return type(tree)(map(_plain, tree))
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return tree
