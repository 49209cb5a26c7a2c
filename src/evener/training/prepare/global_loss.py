"""Sums of all ranks: a value that is everybody's, with this rank's part of the gradient."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.errors import ConfigurationError, DivergenceError, LossError
from evener.training.prepare.global_loss_value import Confused, whole_of
from evener.training.prepare.loop_state import Place
from evener.training.prepare.loss_kind import Way
from evener.training.prepare.rank_checks import check_marks
from evener.training.prepare.sample_tensor import Joint, Kind
from evener.training.prepare.zero_loss import silence_of, silent
from evener.training.step.step import not_finite

_APART = 1e-3
"""Relative; of values that ranks come to from the same sums."""
_NO_GRAPH = (
    "the loss of rank {ranks} follows from none of its model's outputs, as a mean over nothing may, and that of "
    "other ranks does: in the backward pass they would wait for its part of BatchNorm. Give evener.prepare the "
    "function that computes the loss, or let it sum over all rows, as (each * mask).sum() does"
)
_OTHERWISE = (
    "the ranks came to different values of the loss, {values}: it uses something besides its arguments that is of a "
    "rank's own samples, such as their number. Pass it as an argument, or count it from the arguments"
)
_ELSEWHERE = (
    "the ranks are in different losses, or in different places of one: all ranks must call the same losses in the same "
    "order"
)


class Parted(BaseException):
    """Ranks take different ways through a function, which therefore is no fixed number of sums; raised on all."""


def _code(of: object) -> float:
    return float(zlib.crc32(repr(of).encode()))


def joined(
    place: Place,
    total: Tensor,
    count: float | Tensor,
    divisor: Callable[[float], float] = float,
    *,
    code: object = "known",
    own: Sequence[int] = (),
    is_marked: bool = True,
) -> Tensor:
    """The sum of all ranks' totals over the divisor that their counts make. A collective call.

    Args:
        code: Where ranks are; the same on all.
        own: Numbers of this rank that the loop may take for those of all.
        is_marked: Whether what is returned notices them.

    Raises:
        Parted: If they are at different places of a function, on all ranks.
        DivergenceError: If the total of a rank that goes into training is not finite, on all ranks.
    """
    turn = place.turn("the loss was computed")
    number = float(count)
    counts = bool(turn.micro.weight) and bool(number or divisor(2.0) == 1.0)
    if not counts:
        total, number = silent(total), 0.0
    value = float(total.detach()) if counts else 0.0
    rows = _told(place, code, value, number, _graph_of(total, place))
    graphs = [int(row[3] % 4) for row in rows]
    _check_finite(place, rows, graphs)
    over = divisor(sum(row[2] for row in rows))
    result = sum(row[1] for row in rows) / over if over else math.nan
    if _BEHIND in graphs:
        total = _with_graph(place, total, graphs)
        factor = place.mean.ranks / (over or 1.0) * counts
        made: Tensor = _Joined.apply(total, result, factor, place)  # type: ignore[no-untyped-call]
    else:
        made = total.detach().new_tensor(result)
    if not made.requires_grad and result.is_integer():
        turn.counted.add(int(result))
    if not is_marked:
        return made
    terms = [int(number)] if len({row[2] for row in rows}) == 1 else []
    return _marked(place, made, [*own, turn.samples, *terms], sum(row[2] for row in rows), divisor)


_NONE, _BEHIND, _POSSIBLE = range(3)


def _graph_of(total: Tensor, place: Place) -> int:
    """Whether there is a graph behind a number, or one that could be put there."""
    if not torch.is_grad_enabled():
        return _NONE
    return _BEHIND if total.requires_grad else _POSSIBLE if len(place.outputs) == 1 else _NONE


def _told(place: Place, code: object, value: float, number: float, graph: int = _NONE) -> list[list[float]]:
    mark = place.turn("").mark
    rows = place.exchange("the loss", mark, value, number, 4 * _code(code) + graph)
    check_marks([row[0] for row in rows])
    if len({row[3] // 4 for row in rows}) > 1:
        if code == "known":
            raise ConfigurationError(_ELSEWHERE)
        raise Parted
    return rows


def _check_finite(place: Place, rows: list[list[float]], graphs: list[int]) -> None:
    for rank, row in enumerate(rows):
        if graphs[rank] == _BEHIND and not math.isfinite(row[1]):
            raise DivergenceError(not_finite(f"the loss is {row[1]} in step {place.steps} on rank {rank}"))


def _with_graph(place: Place, total: Tensor, graphs: list[int]) -> Tensor:
    """Raises:
    LossError: On all ranks, if one has nothing to back-propagate to, and others would wait for it.
    """
    if place.waits_in_backward and _NONE in graphs:
        without = [str(rank) for rank, graph in enumerate(graphs) if graph == _NONE]
        raise LossError(_NO_GRAPH.format(ranks=", ".join(without)))
    if total.requires_grad:
        return total
    return silence_of(place.outputs) if place.outputs else total.detach().clone().requires_grad_()


def _marked(
    place: Place, made: Tensor, own: Sequence[int], count: float, divisor: Callable[[float], float]
) -> Tensor:
    """A number of all ranks, which knows the numbers of this one that it is not to be confused with.

    Where ranks have different numbers of samples they come to different values then, which is noticed anyway.
    """
    turn, is_sum = place.turn(""), divisor(2.0) == 1.0
    if turn.samples == turn.batch.size or not made.is_floating_point():
        return made
    if is_sum and len(set(turn.batch.shares)) > 1:
        return made
    confused = frozenset(number for number in own if number > 1) - {turn.batch.size, int(count)}
    return whole_of(made, Confused(confused, turn.counted, place.rank), is_sum)


class _Joined(torch.autograd.Function):
    """A number with another's gradient, ``factor`` times; tells the place what a backward pass brings."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: float, factor: float, place: Place) -> Tensor:
        ctx.factor, ctx.place = factor, place
        return total.new_tensor(value).reshape(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.place.comes_to_loss(gradients[0])
        return gradients[0] * ctx.factor, None, None, None


class AllRanks(Joint):
    """Tells all ranks the sums that a function comes to, one after another.

    Args:
        is_marked: Whether they notice to be divided by numbers of one rank.
    """

    def __init__(self, place: Place, is_marked: bool = True) -> None:
        super().__init__()
        self._place, self._calls, self._is_marked = place, 0, is_marked

    def join(
        self, total: Tensor, count: Any, divisor: Callable[[float], float], sizes: Sequence[int] = ()
    ) -> Tensor:
        self._calls += 1
        return joined(
            self._place,
            total,
            count,
            divisor,
            code=("sum", self._calls),
            own=sizes,
            is_marked=self._is_marked,
        )

    def extreme(self, value: Tensor, count: int, kind: Kind) -> Tensor:
        self._calls += 1
        number = float(count * self._place.turn("").micro.weight)
        rows = _told(self._place, (kind, self._calls), float(value), number)
        found = [row[1] for row in rows if row[2]] or [float(value)]
        return value.detach().new_tensor((max if kind == "max" else min)(found))


def agreed(place: Place, way: Way) -> Way:
    """The way that is right for all ranks. A collective call."""
    wish = way if place.turn("").samples else Way.SUMS  # a placeholder tells nothing
    return Way(int(max(row[1] for row in _told(place, "way", float(wish), 0.0))))


def over_of_all(place: Place, stays: bool, value: Tensor | None, rows: int) -> float:
    """At the end of a function of sums, the rows of all ranks. A collective call.

    Args:
        stays: Whether it is one on this rank.
        value: What it came to.
        rows: By which this rank has divided, in place of those of all; 0 where it has not.

    Raises:
        Parted: If a rank took another way; on all ranks.
        LossError: If ranks came to different values; on all ranks.
    """
    number = math.nan if value is None else float(value.detach()) * (rows or 1)
    told = _told(place, ("end", bool(rows), stays), number, float(rows * place.turn("").micro.weight))
    values = [row[1] for row in told]
    is_other = max(values) - min(values) > _APART * max(map(abs, values))
    if not stays or (is_other and rows):
        raise Parted
    if is_other:
        words = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(values))
        raise LossError(_OTHERWISE.format(values=words))
    return sum(row[2] for row in told)
