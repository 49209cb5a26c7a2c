"""Sums over all ranks: the same value on every rank, with this rank's part of the gradient.

What ranks must know of each other at once goes from host to host: their batch, the place of the call, whether there is
a graph. On a device that runs behind the host the numbers themselves go from device to device, and the host does not
wait for them.
"""

from __future__ import annotations

import functools
import math
import operator
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evener.collectives.all_gather_rows import gathered
from evener.data.batch import leaves_of, map_leaves
from evener.errors import ConfigurationError, LossError
from evener.hardware.timers import waiting
from evener.training.prepare.current_batch import CurrentBatch
from evener.training.prepare.global_loss_value import Confused, GlobalLossValue, whole_of
from evener.training.prepare.late_checks import Number, nonzero_or, number_like, sum_of_numbers
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.loss_kind import LossKind
from evener.training.prepare.rank_checks import check_marks
from evener.training.prepare.sample_tensor import Joint, Kind, plain_of
from evener.training.prepare.zero_loss import silence_of, silent
from evener.training.step.divisions import check_widths

_APART = 1e-3
"""Relative tolerance for values that ranks compute from the same sums."""
_NO_GRAPH = (
    "the loss of rank {ranks} follows from none of its model's outputs, as a mean over nothing may, and that of "
    "other ranks does: in the backward pass they would wait for its part of BatchNorm. Give evener.prepare the "
    "function that computes the loss, or let it sum over all rows, as (each * mask).sum() does"
)
_OTHERWISE = (
    "the ranks came to different values of the loss{where}, {values}: it uses something besides its arguments that is "
    "of a rank's own samples, such as their number. Pass it as an argument, or count it from the arguments"
)
_ELSEWHERE = (
    "the ranks are in different losses, or in different places of one: all ranks must call the same losses in the same "
    "order"
)

_MOST_NODES = 64
"""Number of nodes of a graph that are looked at for a value over all ranks."""


class Parted(BaseException):
    """Raised on all ranks if they take different paths through a function, which then is no fixed number of sums."""


def _code(of: object) -> float:
    return float(zlib.crc32(repr(of).encode()))


def by_count(count: Any) -> Any:
    """The divisor of a mean: the number of its terms."""
    return count


def joined(
    place: LoopState,
    total: Tensor,
    count: float | Tensor,
    divisor: Callable[[float], float] = by_count,
    *,
    batch: CurrentBatch | None = None,
    code: object = "known",
    own: Sequence[int] = (),
    width: int = 0,
    is_marked: bool = True,
) -> Tensor:
    """Returns the sum of all ranks' totals, divided by the divisor for the sum of their counts. A collective call.

    Args:
        batch: The batch whose samples these are, if it need not be the current one.
        code: The place of the call; the same on all ranks.
        own: Numbers of this rank that the loop may mistake for those of all.
        width: Number of elements of a sample if the mean is over all of them; 0 for any other mean.
        is_marked: Whether the result detects these numbers.

    Raises:
        Parted: If the ranks are at different places of a function, on all ranks.
    """
    batch = batch or place.current_batch("the loss was computed")
    is_sum, is_late = divisor(2.0) == 1.0, place.later.is_late(total)
    on_device = is_late and place.later.is_late(count) and _takes_tensors(divisor)
    number: Number = plain_of(count) if on_device else float(count)
    counts = bool(batch.micro.weight) and (isinstance(number, Tensor) or bool(number or is_sum))
    if not counts:
        total, number = silent(total), 0.0
    width = 0 if is_sum or not counts or batch.micro.sequence is not None else width
    said = partial(_exchanged, place, batch, code, graph=_graph_of(total, place), width=width)
    totals: Sequence[Number]
    numbers: Sequence[Number]
    if is_late:
        totals, numbers, graphs = _on_devices(place, said, total, number, is_sum)
    else:
        rows = said(float(total.detach()) if counts else 0.0, float(number))
        totals, numbers, graphs = ([row[at] for row in rows] for at in range(1, 4))
    _note_if_not_finite(place, totals, graphs)
    numbers = place.data.of_contributors(numbers)
    over = divisor(sum_of_numbers(numbers))
    result = sum_of_numbers(place.data.of_contributors(totals)) / nonzero_or(over, math.nan)
    if _BEHIND in graphs:
        total = _with_graph(place, total, graphs)
        factor = place.mean.ranks / nonzero_or(over, 1.0) * counts
        made: Tensor = _Joined.apply(total, result, factor, place)  # type: ignore[no-untyped-call]
    else:
        made = number_like(total.detach(), result)
    if not made.requires_grad:
        place.later.check(partial(_count, batch.counted), result)
    return _marked(place, batch, made, [*own, batch.samples], numbers, is_sum) if is_marked else made


def _takes_tensors(divisor: Callable[[Any], Any]) -> bool:
    """Returns True for a divisor that only passes its argument on, or is a number. Another may be of the user's, and
    is told numbers of the host."""
    count = object()
    with suppress(Exception):
        return divisor(count) in (count, 1.0)
    return False


def _on_devices(
    place: LoopState, said: Callable[..., list[list[float]]], total: Tensor, number: Number, is_sum: bool
) -> tuple[Sequence[Number], Sequence[Number], list[float]]:
    """Returns the totals, numbers of terms and graphs of all ranks. Totals stay on the device, and so do numbers if
    that of a rank is there."""
    is_there = isinstance(number, Tensor)
    sent = 0.0 if is_there else float(number)
    rows = said(float(is_there), sent, is_late=True)
    if isinstance(number, Tensor) and not is_sum:
        total = total.detach().masked_fill(number.to(total.device) == 0, 0)  # a mean over nothing is NaN
    totals, counts = of_all(place, total, number).unbind(1)
    numbers: Sequence[Number] = counts.unbind() if any(row[1] for row in rows) else [row[2] for row in rows]
    return totals.unbind(), numbers, [row[3] for row in rows]


def of_all(place: LoopState, *numbers: Number) -> Tensor:
    """Returns (ranks, numbers) of all ranks, from device to device. A collective call, for which no host waits."""
    device = place.session.device
    own = torch.stack(
        [
            each.detach().reshape(()).to(device, torch.float64, non_blocking=True)
            if isinstance(each, Tensor)
            else torch.full((), each, dtype=torch.float64, device=device)
            for each in numbers
        ]
    )
    if place.session.world is None:
        return own[None]
    with waiting():
        return torch.stack(gathered(own, place.world_size, place.session.world))


def _count(counted: set[int], numbers: list[float]) -> None:
    counted.update(int(number) for number in numbers if number.is_integer())


_NONE, _BEHIND, _POSSIBLE = range(3)


def _graph_of(total: Tensor, place: LoopState) -> int:
    """Returns whether there is a graph behind a number, or one could be attached."""
    if not torch.is_grad_enabled():
        return _NONE
    return _BEHIND if total.requires_grad else _POSSIBLE if len(place.outputs) == 1 else _NONE


def _exchanged(
    place: LoopState,
    batch: CurrentBatch,
    code: object,
    value: float,
    number: float,
    graph: int = _NONE,
    is_late: bool = False,
    width: int = 0,
) -> list[list[float]]:
    """Returns for each rank the mark of its batch, a value, a number and a graph. A collective call."""
    rows = place.exchange("the loss", batch.agreed, value, number, 4 * _code((code, is_late)) + graph, width)
    check_marks([row[0] for row in rows])
    if len({row[3] // 4 for row in rows}) > 1:
        if code == "known":
            raise ConfigurationError(_ELSEWHERE)
        raise Parted
    check_widths([row[4] for row in rows])
    return [[*row[:3], row[3] % 4] for row in rows]


def _note_if_not_finite(place: LoopState, totals: Sequence[Number], graphs: Sequence[float]) -> None:
    step = place.steps

    def known(values: list[float]) -> None:
        for rank, value in enumerate(values):
            if graphs[rank] == _BEHIND and not math.isfinite(value):
                place.later.bad_losses.setdefault(step, f"the loss is {value} in step {step} on rank {rank}")

    if _BEHIND in graphs:
        place.later.check(known, *totals)


def _with_graph(place: LoopState, total: Tensor, graphs: Sequence[float]) -> Tensor:
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


def with_graphs_of_all(place: LoopState, made: Any, given: Any) -> Any:
    """Returns ``made``, whose numbers have a graph to ``given``, of zeros, where those of another rank have one. So a
    rank none of whose samples count goes backward with the others. A collective call."""
    leaves = [leaf for leaf in leaves_of(made) if isinstance(leaf, Tensor)][:_MOST_NUMBERS]
    own = sum(2**n for n, leaf in enumerate(leaves) if leaf.requires_grad)
    rows = place.exchange("the loss", place.current_batch("").agreed, 0.0, 0.0, 0.0, float(own))
    check_marks([row[0] for row in rows])
    anywhere = functools.reduce(operator.or_, (int(row[4]) for row in rows))
    without = {id(leaf) for n, leaf in enumerate(leaves) if (anywhere & ~own) >> n & 1 and not leaf.dim()}
    behind = [leaf for leaf in leaves_of(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not (without and behind):
        return made
    zero = silent(torch.stack([leaf.sum().double().cpu() for leaf in behind]).sum())
    return map_leaves(lambda leaf: leaf + zero.to(leaf) if id(leaf) in without else leaf, made)


_MOST_NUMBERS = 50
"""Limit for a bit mask that fits a float64."""


def _marked(
    place: LoopState,
    batch: CurrentBatch,
    made: Tensor,
    own: Sequence[int],
    terms: Sequence[Number],
    is_sum: bool,
) -> Tensor:
    """Makes a value over all ranks detect this rank's numbers: ``own``, and those of ``terms`` if all are the same.

    Numbers of a sum are not needed if shares differ: then a mistake makes the ranks' values differ, which is detected.
    """
    if batch.samples == batch.batch.size or not made.is_floating_point():
        return made
    if is_sum and len(set(batch.batch.shares)) > 1:
        own, terms = [], terms[:0]
    others = frozenset({batch.batch.size})
    on_device = [each for each in terms if isinstance(each, Tensor)]
    if not on_device:
        own = [*own, *(int(each) for each in terms[:1] if len(set(terms)) == 1)]
        others |= {int(sum(terms))}
    confused = frozenset(number for number in own if number > 1) - others
    return whole_of(
        made,
        Confused(confused, batch.counted, place.rank, place.later, tuple(on_device), batch.dim, others),
        is_sum,
    )


def is_of_all_ranks(value: Tensor, place: LoopState) -> bool:
    """Returns True if a value follows from one over all ranks: from a sum, or by a graph of a few nodes."""
    if place.world_size == 1:
        return False
    if not value.requires_grad:
        return isinstance(value, GlobalLossValue) and value.is_sum
    seen, left = set[Any](), [value.grad_fn]
    while left and len(seen) < _MOST_NODES:
        node = left.pop(0)
        if type(node).__name__ == "_JoinedBackward" and getattr(node, "place", None) is place:
            return True
        new = [] if node is None else [after for after, _ in node.next_functions if after not in seen]
        seen.update(new)
        left += new
    return False


class _Joined(torch.autograd.Function):
    """A value with ``factor`` times the gradient of another number. Reports its incoming gradient to the loop."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: Number, factor: Number, place: LoopState) -> Tensor:
        ctx.factor = factor.to(total.dtype) if isinstance(factor, Tensor) else factor
        ctx.place = place
        return number_like(total, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.place.comes_to_loss(gradients[0])
        return gradients[0] * ctx.factor, None, None, None


class AllRanks(Joint):
    """Exchanges the sums of a function between all ranks, one after another: those of the batch that is current now.

    Rows that the loop keeps stay those of their batch, when the loop is at another one or over.

    Args:
        is_marked: Whether the results detect division by numbers of one rank.
    """

    def __init__(self, place: LoopState, is_marked: bool = True) -> None:
        super().__init__()
        self._place, self._calls, self._is_marked = place, 0, is_marked
        self._batch = place.current_batch("the loss was computed")

    def join(
        self, total: Tensor, count: Any, divisor: Callable[[float], float], sizes: Sequence[int] = ()
    ) -> Tensor:
        self._calls += 1
        is_of_all = len(sizes) > 1 and isinstance(count, int) and count == sizes[0]  # no sum of weights
        return joined(
            self._place,
            total,
            count,
            divisor,
            batch=self._batch,
            code=("sum", self._calls),
            own=sizes,
            width=self._batch.width(*sizes) if is_of_all else 0,
            is_marked=self._is_marked,
        )

    def extreme(self, value: Tensor, count: int, kind: Kind) -> Tensor:
        self._calls += 1
        place, is_late = self._place, self._place.later.is_late(value)
        given, number = 0.0 if is_late else float(value), float(count * self._batch.micro.weight)
        rows = _exchanged(place, self._batch, (kind, self._calls), given, number, is_late=is_late)
        values: Any = of_all(place, value).unbind() if is_late else [row[1] for row in rows]
        found = [each for each, row in zip(values, rows, strict=True) if row[2]] or [values[place.rank]]
        reduced = torch.amax if kind == "max" else torch.amin  # unlike Python's, these keep NaN
        return number_like(
            value, reduced(torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in found]))
        )


def agreed(place: LoopState, way: LossKind) -> LossKind:
    """Returns the kind of loss that is right for all ranks. A collective call."""
    batch = place.current_batch("")
    wish = way if batch.samples else LossKind.SUMS  # a placeholder sample shows nothing
    return LossKind(int(max(row[1] for row in _exchanged(place, batch, "way", float(wish), 0.0))))


def over_of_all(place: LoopState, stays: bool, value: Tensor | None, rows: int, is_new: bool) -> float:
    """Ends a function of sums. Returns the sum of ``rows`` over all ranks. A collective call.

    Args:
        stays: Whether this rank's call was made of sums.
        value: The result of the function.
        rows: The number of rows by which this rank has divided, in place of that of all; 0 if it has not.
        is_new: Whether the function took this path for the first time. Then the values are compared at once, and always
            if this rank has divided by its rows, because a difference shows that the function must be computed
            otherwise.

    Raises:
        Parted: If a rank took another path; on all ranks.
        LossError: If the ranks have different values; on all ranks.
    """
    number: Number = math.nan if value is None else place.later.kept(value) * (rows or 1)
    is_late, batch = isinstance(number, Tensor), place.current_batch("")
    counted = float(rows * batch.micro.weight)
    code = "end", bool(rows), stays
    rows_at_end = _exchanged(
        place, batch, code, float(is_new if is_late else number), counted, is_late=is_late
    )
    if not stays:
        raise Parted
    values: list[Number] = [row[1] for row in rows_at_end]
    waits, where = not is_late or rows > 0 or any(values), place.later.where
    if is_late:
        values = list(of_all(place, number).unbind())

    def known(values: list[float]) -> None:
        if max(values) - min(values) > _APART * max(map(abs, values)):
            if rows:
                raise Parted
            values_text = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(values))
            raise LossError(_OTHERWISE.format(values=values_text, where=where))

    if waits:
        known([float(each) for each in values])
    else:
        place.later.check(known, *values)
    return sum(row[2] for row in place.data.of_contributors(rows_at_end))
