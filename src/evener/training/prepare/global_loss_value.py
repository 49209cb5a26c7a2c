"""A loss of all ranks, which notices when it is divided or multiplied by what one rank alone has.

The sum over a batch of 12, divided by the 6 samples that a rank has of it, is wrong by a factor of two, and all ranks
agree on it where their shares are equal: nobody would notice.
"""

from __future__ import annotations

import warnings
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from evener.errors import LossError

_SUM = (
    "the loss is a sum over the samples of all ranks, and is divided by {number}, which is how many rank {rank} alone "
    "has: divide by evener.batch_size(), the samples of all ranks, or give evener.prepare a loss that is a mean "
    "already. A constant that is {number} by chance goes into the loss: evener.loss(loss, scale=1 / {number})"
)
_MEAN = (
    "the loss is a mean over the samples of all ranks, and is multiplied by {number}, which is how many rank {rank} "
    "alone has: for a sum over an epoch multiply by evener.batch_size(), the samples of all ranks"
)


@dataclass(frozen=True)
class Confused:
    """Numbers of a rank that may be taken for those of all."""

    own: frozenset[int]
    """Of samples, elements and terms that this rank has, which are not those of all."""
    counted: Set[int]
    """What was counted over all ranks with this batch, also later: those may be the same by chance."""
    rank: int

    def has(self, number: int) -> bool:
        """Whether it is this rank's own."""
        return number in self.own and number not in self.counted


class Whole(Tensor):
    """One number of all ranks' samples.

    Attributes:
        plain: The same as a plain tensor.
        confused: What it is not to be divided or multiplied by.
        is_sum: Whether it was divided by nothing.
    """

    plain: Tensor
    confused: Confused
    is_sum: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, whole = getattr(func, "__name__", ""), next(_wholes((args, kwargs)))
        if any(not issubclass(kind, Whole) and kind is not Tensor for kind in types):
            return NotImplemented  # a tensor that has more to say
        if name in ("div", "true_divide", "div_", "divide", "mul", "mul_", "multiply"):
            whole.look_at(name, [part for part in args if part is not whole])
        made = func(*_plain(args), **_plain(kwargs or {}))
        stays = name in _STAYS and isinstance(made, Tensor) and not made.dim()
        return whole_of(made, whole.confused, whole.is_sum) if stays else made

    def look_at(self, name: str, others: list[Any]) -> None:
        """Raises:
        LossError: If a sum of all is divided by a number of this rank's.

        Warns:
            UserWarning: If a mean of all is multiplied by one.
        """
        if self.is_sum == name.startswith("mul") or not self.confused.has(number := _number(others)):
            return
        words = (_SUM if self.is_sum else _MEAN).format(number=number, rank=self.confused.rank)
        if self.is_sum:
            raise LossError(words)
        warnings.warn(words, stacklevel=4)


def whole_of(value: Tensor, confused: Confused, is_sum: bool) -> Tensor:
    """``value`` as one number of all ranks."""
    made = value.as_subclass(Whole)
    made.plain, made.confused, made.is_sum = value, confused, is_sum
    return made


_STAYS = ("add", "sub", "mul", "div", "true_divide", "neg", "detach", "clone", "cpu", "to", "double", "float")


def _number(others: list[Any]) -> int:
    """A whole number that somebody counted; 0 for another thing."""
    other = others[0] if others else 0
    if isinstance(other, Tensor):
        other = other.item() if not other.dim() and not other.requires_grad else 0
        other = int(other) if isinstance(other, float) and other.is_integer() else other
    return other if isinstance(other, int) and not isinstance(other, bool) else 0


def _wholes(tree: Any) -> Any:
    if isinstance(tree, Whole):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from _wholes(part)
    elif isinstance(tree, dict):
        yield from _wholes(list(tree.values()))


def _plain(tree: Any) -> Any:
    if isinstance(tree, Whole):
        return tree.plain
    if isinstance(tree, tuple | list):
        return type(tree)(map(_plain, tree))
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return tree
