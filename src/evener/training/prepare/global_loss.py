"""Sums over all ranks: the same value on every rank, with this rank's part of the gradient."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.errors import ConfigurationError, DivergenceError, LossError
from evener.training.prepare.global_loss_value import Confused, whole_of
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.loss_kind import LossKind
from evener.training.prepare.rank_checks import check_marks
from evener.training.prepare.sample_tensor import Joint, Kind
from evener.training.prepare.zero_loss import silence_of, silent
from evener.training.step.step import not_finite

_APART = 1e-3
"""Relative tolerance for values that ranks compute from the same sums."""
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
    """Raised on all ranks if they take different paths through a function, which then is no fixed number of sums."""


def _code(of: object) -> float:
    return float(zlib.crc32(repr(of).encode()))


def joined(
    place: LoopState,
    total: Tensor,
    count: float | Tensor,
    divisor: Callable[[float], float] = float,
    *,
    code: object = "known",
    own: Sequence[int] = (),
    is_marked: bool = True,
) -> Tensor:
    """Returns the sum of all ranks' totals, divided by the divisor for the sum of their counts. A collective call.

    Args:
        code: The place of the call; the same on all ranks.
        own: Numbers of this rank that the loop may mistake for those of all.
        is_marked: Whether the result detects these numbers.

    Raises:
        Parted: If the ranks are at different places of a function, on all ranks.
        DivergenceError: If the total of a rank is not finite and has a gradient, on all ranks.
    """
    current_batch = place.current_batch("the loss was computed")
    number = float(count)
    counts = bool(current_batch.micro.weight) and bool(number or divisor(2.0) == 1.0)
    if not counts:
        total, number = silent(total), 0.0
    value = float(total.detach()) if counts else 0.0
    rows = _exchanged(place, code, value, number, _graph_of(total, place))
    graphs = [int(row[3] % 4) for row in rows]
    _check_finite(place, rows, graphs)
    rows = place.data.of_contributors(rows)
    over = divisor(sum(row[2] for row in rows))
    result = sum(row[1] for row in rows) / over if over else math.nan
    if _BEHIND in graphs:
        total = _with_graph(place, total, graphs)
        factor = place.mean.ranks / (over or 1.0) * counts
        made: Tensor = _Joined.apply(total, result, factor, place)  # type: ignore[no-untyped-call]
    else:
        made = total.detach().new_tensor(result)
    if not made.requires_grad and result.is_integer():
        current_batch.counted.add(int(result))
    if not is_marked:
        return made
    terms = [int(number)] if len({row[2] for row in rows}) == 1 else []
    return _marked(place, made, [*own, current_batch.samples, *terms], sum(row[2] for row in rows), divisor)


_NONE, _BEHIND, _POSSIBLE = range(3)


def _graph_of(total: Tensor, place: LoopState) -> int:
    """Returns whether there is a graph behind a number, or one could be attached."""
    if not torch.is_grad_enabled():
        return _NONE
    return _BEHIND if total.requires_grad else _POSSIBLE if len(place.outputs) == 1 else _NONE


def _exchanged(
    place: LoopState, code: object, value: float, number: float, graph: int = _NONE
) -> list[list[float]]:
    mark = place.current_batch("").agreed
    rows = place.exchange("the loss", mark, value, number, 4 * _code(code) + graph)
    check_marks([row[0] for row in rows])
    if len({row[3] // 4 for row in rows}) > 1:
        if code == "known":
            raise ConfigurationError(_ELSEWHERE)
        raise Parted
    return rows


def _check_finite(place: LoopState, rows: list[list[float]], graphs: list[int]) -> None:
    for rank, row in enumerate(rows):
        if graphs[rank] == _BEHIND and not math.isfinite(row[1]):
            raise DivergenceError(not_finite(f"the loss is {row[1]} in step {place.steps} on rank {rank}"))


def _with_graph(place: LoopState, total: Tensor, graphs: list[int]) -> Tensor:
    """Returns ``total`` with a graph to go backward through.

    Raises:
        LossError: On all ranks, if one rank has no graph, and others would wait for it in the backward pass.
    """
    if place.waits_in_backward and _NONE in graphs:
        without = [str(rank) for rank, graph in enumerate(graphs) if graph == _NONE]
        raise LossError(_NO_GRAPH.format(ranks=", ".join(without)))
    if total.requires_grad:
        return total
    return silence_of(place.outputs) if place.outputs else total.detach().clone().requires_grad_()


def _marked(
    place: LoopState, made: Tensor, own: Sequence[int], count: float, divisor: Callable[[float], float]
) -> Tensor:
    """Makes a value over all ranks detect this rank's numbers.

    Not needed if shares differ: then a mistake makes the ranks' values differ, which is detected anyway.
    """
    current_batch, is_sum = place.current_batch(""), divisor(2.0) == 1.0
    if current_batch.samples == current_batch.batch.size or not made.is_floating_point():
        return made
    if is_sum and len(set(current_batch.batch.shares)) > 1:
        return made
    confused = frozenset(number for number in own if number > 1) - {current_batch.batch.size, int(count)}
    return whole_of(made, Confused(confused, current_batch.counted, place.rank), is_sum)


class _Joined(torch.autograd.Function):
    """A value with ``factor`` times the gradient of another number. Reports its incoming gradient to the loop."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: float, factor: float, place: LoopState) -> Tensor:
        ctx.factor, ctx.place = factor, place
        return total.new_tensor(value).reshape(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.place.comes_to_loss(gradients[0])
        return gradients[0] * ctx.factor, None, None, None


class AllRanks(Joint):
    """Exchanges the sums of a function between all ranks, one after another.

    Args:
        is_marked: Whether the results detect division by numbers of one rank.
    """

    def __init__(self, place: LoopState, is_marked: bool = True) -> None:
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
        number = float(count * self._place.current_batch("").micro.weight)
        rows = _exchanged(self._place, (kind, self._calls), float(value), number)
        found = [row[1] for row in rows if row[2]] or [float(value)]
        return value.detach().new_tensor((max if kind == "max" else min)(found))


def agreed(place: LoopState, way: LossKind) -> LossKind:
    """Returns the kind of loss that is right for all ranks. A collective call."""
    wish = way if place.current_batch("").samples else LossKind.SUMS  # a placeholder sample shows nothing
    return LossKind(int(max(row[1] for row in _exchanged(place, "way", float(wish), 0.0))))


def over_of_all(place: LoopState, stays: bool, value: Tensor | None, rows: int) -> float:
    """Ends a function of sums. Returns the sum of ``rows`` over all ranks. A collective call.

    Args:
        stays: Whether this rank's call was made of sums.
        value: The result of the function.
        rows: The number of rows by which this rank has divided, in place of that of all; 0 if it has not.

    Raises:
        Parted: If a rank took another path; on all ranks.
        LossError: If the ranks have different values; on all ranks.
    """
    number = math.nan if value is None else float(value.detach()) * (rows or 1)
    rows_at_end = _exchanged(
        place, ("end", bool(rows), stays), number, float(rows * place.current_batch("").micro.weight)
    )
    values = [row[1] for row in rows_at_end]
    is_other = max(values) - min(values) > _APART * max(map(abs, values))
    if not stays or (is_other and rows):
        raise Parted
    if is_other:
        values_text = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(values))
        raise LossError(_OTHERWISE.format(values=values_text))
    return sum(row[2] for row in place.data.of_contributors(rows_at_end))
