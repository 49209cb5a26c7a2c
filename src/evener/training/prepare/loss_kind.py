"""Finds out what kind of loss a function is, by trying it on unequal parts of a batch, as ranks would have them.

Nothing tells what a function computes, so it is tried. Two parts of a batch stand for two ranks. Their values and
gradients are compared with those of the whole batch. Outputs are drawn at random, because those of a fresh model are
nearly alike and would hide how the function weights them. A try changes neither random generators nor what the
function keeps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from enum import IntEnum
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from evener.components.loss_trial import unchanged
from evener.data.batch import leaves_of, map_leaves
from evener.data.fingerprint import generators_kept
from evener.training.prepare.drawn_outputs import drawn_like
from evener.training.prepare.loss_arguments import Entries, SameForAll, rows_in, unwrapped
from evener.training.prepare.sample_tensor import Joint, Kind, NotSums, own_of, plain_of

T = TypeVar("T")
_Found: TypeAlias = tuple[list[float], list[Tensor], list[Tensor], list[Tensor]]
"""Values, their gradients, buffers, and rows of results if there are no values."""

_MOST_SUMS = 40
"""Maximum of sums in a function. One with more is computed over the rows of all ranks."""
_LEAST_ROWS = 12
_CUTS = (4, 3, 2)
"""Numbers of parts to try; the first part is compared with the rest.

One number alone may mislead: by chance, the larger half of all values may consist of the larger halves of two parts.
Parts with an odd number of rows have no halves.
"""


class LossKind(IntEnum):
    """How a function of all ranks' samples is computed, from the cheapest on."""

    SUMS = 0
    """Each rank computes its part. Sums are taken over all ranks. Rows of results are those of the rank's samples."""
    PER_ROW = 1
    """Each rank computes its part, but divides by its own number of rows instead of that of all ranks."""
    WHOLE = 2
    """Each rank computes it from the rows of all."""
    UNKNOWN = 3
    """Computed like WHOLE. Tried again with other values."""


def way_of(function: Callable[..., Any], args: Any, kwargs: Any) -> LossKind:
    """Returns the cheapest kind that gives the right result. Arguments may be wrapped, as by `Ways.wrapped`."""
    tried = _found(function, (args, kwargs), _cheapest)
    return next((max(ways) for ways in tried if ways), LossKind.UNKNOWN)


def way_of_all(function: Callable[..., Any], given: Sequence[Any]) -> LossKind:
    """Returns the cheapest kind that gives the right result of each of ``given``, arguments that are wrapped in several
    ways, the likeliest first. Others count if the function works with them."""
    first = way_of(function, *given[0])
    if first > LossKind.PER_ROW:
        return first
    others = (way_of(function, *each) for each in given[1:])
    return max([first, *(way for way in others if way is not LossKind.UNKNOWN)])


def way_over_positions(
    function: Callable[..., Any], args: Any, kwargs: Any, samples: int, size: int
) -> LossKind:
    """Returns the kind of a function of pieces of sequences: SUMS, or WHOLE if pieces cannot be added up.

    A mean over sentences of their means, for example, is made of sums over samples, but not of sums over positions. So
    positions are tried in the place of the rows.

    Args:
        samples: The number of sequences.
        size: The number of positions of this rank's piece of each.
    """
    way = way_of(function, args, kwargs)
    given = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    if way is not LossKind.SUMS or not any(_places_of(leaf, samples, size) for leaf in given):
        return way if way in (LossKind.SUMS, LossKind.UNKNOWN) else LossKind.WHOLE
    found: list[int] = []

    def turned(leaf: Any) -> Any:
        found.append(_places_of(leaf, samples, size))
        return leaf.movedim(found[-1], 0) if found[-1] else leaf

    turned_args = map_leaves(turned, (args, kwargs))

    def of_positions(*args: Any, **kwargs: Any) -> Any:
        dims = iter(found)

        def back(leaf: Any) -> Any:
            dim = next(dims)
            return leaf.movedim(0, dim) if dim else leaf

        args, kwargs = map_leaves(back, (args, kwargs))
        return function(*args, **kwargs)

    tried = way_of(of_positions, *turned_args)
    return LossKind.SUMS if tried is LossKind.SUMS else LossKind.WHOLE


def _places_of(leaf: Any, samples: int, size: int) -> int:
    """Returns the dimension of positions in a tensor with the samples first; 0 if it has none."""
    if not isinstance(leaf, Tensor) or leaf.dim() < 2 or leaf.shape[0] != samples:
        return 0
    return next((dim for dim in (1, leaf.dim() - 1) if leaf.shape[dim] == size), 0)


def _found(function: Callable[..., Any], given: Any, ask: Callable[[_Try], T]) -> Iterator[list[T]]:
    """Yields answers, from the most telling values on. An answer is empty if the function failed on the values."""
    cards = [leaf.device for leaf in leaves_of(unwrapped(given)) if isinstance(leaf, Tensor) and leaf.is_cuda]
    for drawn, precise in ((True, True), (True, False), (False, True), (False, False)):
        # A copy of a module is tried. Without devices, fork_rng() would not restore the GPU's generator.
        kept = nullcontext() if isinstance(function, nn.Module) else unchanged(function)
        drawing = torch.random.fork_rng(sorted({card.index or 0 for card in cards}))
        with generators_kept(), drawing, kept:
            answers: list[T] = []
            with suppress(Exception, NotSums):
                answers = [ask(_Try(function, given, drawn, precise, cut, False)) for cut in _CUTS]
            if answers and drawn and rows_in(given) < _LEAST_ROWS:
                with suppress(Exception, NotSums):
                    answers += [ask(_Try(function, given, drawn, precise, cut, True)) for cut in _CUTS]
        yield answers


def _cheapest(tried: _Try) -> LossKind:
    with suppress(Exception, NotSums):
        return tried.way()
    return LossKind.WHOLE


class _Try:
    """A function and the values to try it on.

    Args:
        given: Positional and keyword arguments.
        drawn: Whether outputs are drawn at random, instead of those given.
        precise: Whether to compute in double precision.
        parts: Number of equal parts of the rows; one of them is compared with the others.
        varied: Whether other rows of floating point are drawn, too. A few rows again and again would hide what depends
            on their mean.
    """

    def __init__(
        self, function: Callable[..., Any], given: Any, drawn: bool, precise: bool, parts: int, varied: bool
    ) -> None:
        self._function, self._precise, self._varied = function, precise, varied
        self._rows = rows_in(given)
        if any(type(leaf) is Entries and len(leaf) != self._rows for leaf in leaves_of(given)):
            raise ValueError("there are several rows for each entry, and cuts would part them")
        self._size = max(self._rows + self._rows % 2, _LEAST_ROWS)
        self._cut = (self._size // parts - 1) | 1
        index = torch.arange(self._size) % max(1, self._rows)
        index[self._rows :] = torch.randint(max(1, self._rows), (max(0, self._size - self._rows),))
        index = index[torch.randperm(self._size)]
        outputs = _outputs_of(unwrapped(given))
        self._of_rows = set[int]()
        """The ids of the leaves of the whole that are cut: another one may have as many rows by chance."""
        self._whole = map_leaves(lambda leaf: self._made(leaf, index, drawn, outputs), given)
        self._value, self._gradients, self._state, self._results = self._computed(self._whole, None)
        of_rows = [bool(each.isfinite().all()) for each in self._results]
        if not (self._value or of_rows) or not all([*map(math.isfinite, self._value), *of_rows]):
            raise ArithmeticError("nothing can be compared with what is not finite")

    def _made(self, leaf: Any, index: Tensor, drawn: bool, outputs: set[int]) -> Any:
        """Returns the rows of ``leaf``, or the entries, at ``index``, with values to try."""
        if isinstance(leaf, SameForAll):
            return leaf.map(self._plainly)
        if not self._has_rows(leaf):
            return self._plainly(leaf)
        if isinstance(leaf, Entries):
            made = leaf.at(index.tolist()).map(lambda each: self._valued(each, id(each) in outputs, drawn))
        else:
            rows = self._plainly(leaf)[index.to(leaf.device)]
            made = self._valued(rows, id(leaf) in outputs, drawn)
        self._of_rows.add(id(made))
        return made

    def _plainly(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = plain_of(leaf).detach()
        return leaf.double() if self._precise and leaf.is_floating_point() else leaf

    def _valued(self, leaf: Any, is_output: bool, drawn: bool) -> Any:
        leaf = self._plainly(leaf)
        if not is_output:
            is_drawn = self._varied and isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()
            return drawn_like(leaf) if is_drawn else leaf
        return (drawn_like(leaf) if drawn and leaf.dim() else leaf.clone()).requires_grad_()

    def _has_rows(self, leaf: Any) -> bool:
        of_rows = (isinstance(leaf, Tensor) and leaf.dim() > 0) or type(leaf) is Entries
        return of_rows and len(leaf) == self._rows

    def _parts(self) -> list[Any]:
        cuts = slice(0, self._cut), slice(self._cut, self._size)
        return [map_leaves(partial(self._part, cut), self._whole) for cut in cuts]

    def _part(self, rows: slice, leaf: Any) -> Any:
        if id(leaf) not in self._of_rows:
            return leaf
        if isinstance(leaf, Entries):
            return leaf.at(range(*rows.indices(len(leaf)))).map(_own_leaf)
        return leaf.detach()[rows].requires_grad_(leaf.requires_grad)

    def _computed(self, given: Any, joint: Joint | None, first: int = 0) -> _Found:
        """Returns the function's values, their gradients, its buffers afterwards, and rows of results.

        Args:
            first: The place of the first row of ``given`` in the whole.
        """
        function = self._function
        if isinstance(function, nn.Module):
            function = copy.deepcopy(function)
            function = function.double() if self._precise else function
        given = unwrapped(given)
        args, kwargs = given if joint is None else own_of(given, joint)
        with torch.enable_grad():
            made = [leaf for leaf in leaves_of(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        numbers = [plain_of(leaf) for leaf in made if not leaf.dim()]
        results = [] if numbers else [plain_of(leaf) for leaf in made]
        wanted = [leaf for leaf in leaves_of(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
        of_rows = [_weighted(each, first) for each in results]
        sources = [number for number in [*numbers, *of_rows] if number.requires_grad]
        found = torch.autograd.grad(sources, wanted, allow_unused=True) if sources and wanted else ()
        gradients = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(wanted, found, strict=bool(found))
        ]
        state = [buffer.detach() for buffer in function.buffers()] if isinstance(function, nn.Module) else []
        values = [float(number.detach()) for number in numbers]
        return values, gradients, state, [each.detach() for each in results]

    def way(self) -> LossKind:
        """Compares two ranks that exchange their sums with one device."""
        found, shares = self._of_parts(), [self._cut / self._size, 1 - self._cut / self._size]
        if found is None:
            return LossKind.WHOLE
        if self._agrees(found, [1.0, 1.0]):
            return LossKind.SUMS
        return LossKind.PER_ROW if len(self._value) == 1 and self._agrees(found, shares) else LossKind.WHOLE

    def _of_parts(self) -> list[_Found] | None:
        """Computes both parts with common sums. Returns None if there are no sums, or the parts' sums do not match."""
        parts, known = self._parts(), list[_Said]()
        for _ in range(_MOST_SUMS):
            joints = [_PartSums(known) for _ in parts]
            found = [
                self._computed(part, each, first)
                for part, each, first in zip(parts, joints, (0, self._cut), strict=True)
            ]
            if joints[0].names != joints[1].names or len({len(each.said) for each in joints}) > 1:
                return None
            if len(joints[0].said) == len(known):
                return found if known or self._results else None
            known.append(joints[0].said[len(known)].with_that_of(joints[1].said[len(known)]))
        return None

    def _agrees(self, found: list[_Found], weights: list[float]) -> bool:
        """Returns True if each part has the value of the whole, and both together have its gradients and its rows."""
        scaled = list(zip(found, weights, strict=True))
        values = [torch.tensor(each[0], dtype=torch.float64) * weight for each, weight in scaled]
        parts = zip(*([gradient * weight for gradient in each[1]] for each, weight in scaled), strict=True)
        whole = torch.tensor(self._value, dtype=torch.float64)
        of_rows = zip(*(each[3] for each in found), strict=True)
        if any(len(each) != self._size for each in self._results):
            return False  # as many of something else: every rank has them all, computed from the rows of all
        pairs = [
            *zip(map(torch.cat, of_rows), self._results, strict=True),
            *((value, whole) for value in values),
            *zip(map(torch.cat, parts), self._gradients, strict=True),
            *(pair for each in found for pair in zip(each[2], self._state, strict=True)),
        ]
        return all(_alike(own, expected, self._bound) for own, expected in pairs)

    @property
    def _bound(self) -> float:
        """Relative tolerance: far above rounding, and far below the weight of a sample."""
        kinds = [
            leaf.dtype
            for leaf in leaves_of(unwrapped(self._whole))
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        return 3 * math.sqrt(max((float(torch.finfo(kind).eps) for kind in kinds), default=1e-16))


def _weighted(rows: Tensor, first: int) -> Tensor:
    """Returns a sum in which each row has a weight of its own, by its place from ``first`` on."""
    places = torch.arange(first, first + len(rows), device=rows.device, dtype=torch.float64)
    return (rows * (1.5 + places.cos()).to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))).sum()


def _own_leaf(leaf: Any) -> Any:
    """Returns a tensor as a leaf of its own of the graph."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _outputs_of(given: Any) -> set[int]:
    """Returns the ids of tensors that require gradients. Within ``no_grad``, those of the first argument."""
    leaves = [leaf for leaf in leaves_of(given) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    args, kwargs = given
    first = leaves_of([*args, *kwargs.values()][:1])
    return {id(leaf) for leaf in leaves if leaf.requires_grad} or {
        id(leaf) for leaf in leaves if any(leaf is each for each in first)
    }


def _alike(one: Tensor, other: Tensor, bound: float) -> bool:
    if one.shape != other.shape:
        return False
    if not one.numel():
        return True
    apart = (one.double() - other.double()).abs().max()
    return bool(apart <= bound * other.double().abs().max() + 1e-30)


class _Said:
    """A sum over one part, or over both together."""

    def __init__(self, value: float, count: float, finish: Callable[[list[_Said]], float], over: Any) -> None:
        self.value, self.count = value, count
        self._finish, self._over = finish, over
        self.parts = [self]

    def with_that_of(self, other: _Said) -> _Said:
        both = _Said(0.0, self.count + other.count, self._finish, self._over)
        both.parts = [self, other]
        return both

    @property
    def number(self) -> float:
        return self._finish(self.parts)

    @property
    def over(self) -> float:
        return float(self._over(self.count)) or 1.0


class _PartSums(Joint):
    """Exchanges the sums of one part: returns those of both parts if known, and records its own."""

    def __init__(self, known: Sequence[_Said]) -> None:
        super().__init__()
        self._known, self.said = known, list[_Said]()

    def join(
        self, total: Tensor, count: Any, divisor: Callable[[float], float], sizes: Sequence[int] = ()
    ) -> Tensor:
        def finish(parts: list[_Said]) -> float:
            over = divisor(sum(part.count for part in parts))
            return sum(part.value for part in parts) / over if over else math.nan

        own = _Said(float(total.detach()), float(count), finish, divisor)
        known = self._next(own)
        if not total.requires_grad:
            return total.detach().new_tensor(known.number)
        return valued(total, known.number, 1.0 / known.over)

    def extreme(self, value: Tensor, count: int, kind: Kind) -> Tensor:
        def finish(parts: list[_Said]) -> float:
            found = [part.value for part in parts if part.count]
            return (max if kind == "max" else min)(found or [part.value for part in parts])

        return value.detach().new_tensor(self._next(_Said(float(value), count, finish, float)).number)

    def _next(self, own: _Said) -> _Said:
        self.said.append(own)
        index = len(self.said) - 1
        return self._known[index] if index < len(self._known) else own


class _Valued(torch.autograd.Function):
    """A given value, with ``factor`` times the gradient of another number."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: float, factor: float) -> Tensor:
        ctx.factor = factor
        return total.new_tensor(value).reshape(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None, None


def valued(total: Tensor, value: float, factor: float) -> Tensor:
    """Returns ``value``, whose gradient is ``factor`` times that of ``total``."""
    made: Tensor = _Valued.apply(total, value, factor)  # type: ignore[no-untyped-call]
    return made
