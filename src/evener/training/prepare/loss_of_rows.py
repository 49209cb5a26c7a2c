"""A loss that every rank computes from the rows of all ranks, because it is no sum over samples.

What its arguments are is told in :mod:`evener.training.prepare.loss_arguments`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from evener.data.batch import leaves_of, map_leaves
from evener.data.division import own_slice
from evener.data.fingerprint import generators_kept
from evener.errors import LossError
from evener.training.consistency.replicas import digest
from evener.training.prepare.drawn_outputs import drawn_like
from evener.training.prepare.gather import gathered, gathered_entries
from evener.training.prepare.global_loss import of_all, over_of_all, with_graphs_of_all
from evener.training.prepare.loop_state import LoopState
from evener.training.prepare.loss_arguments import (
    GO_ON,
    Arguments,
    OfRank,
    Path,
    Told,
    Ways,
    address,
    map_parts,
)
from evener.training.prepare.positions import refuse_divided
from evener.training.prepare.rank_checks import check_marks
from evener.training.prepare.sample_tensor import plain_of
from evener.training.prepare.stacked_rows import are_near, are_stacked, can_tell, stacked


class OfRows:
    """Computes a function on each rank from the rows of all ranks. Collective calls.

    Attributes:
        arguments: What is known of the function's arguments.
    """

    def __init__(self, function: Any, place: LoopState) -> None:
        self.function, self._place = function, place
        self.arguments = Arguments()
        self._is_new = True
        self._are_stacked: bool | None = None

    def told(self, given: Any) -> Told:
        """Returns what the arguments of this call are. A collective call."""
        place, current_batch = self._place, self._place.current_batch("")
        samples = len(current_batch.micro.samples)
        held = _memory_of(place.learner.model)
        rows, seen = self.arguments.seen_by(given, samples, held, current_batch.shares, place.later.is_late)
        fits = bool(rows) and not current_batch.dim and not rows % samples
        own = OfRank(current_batch.agreed, rows, samples, current_batch.micro.weight, fits, seen)
        said = place.session.control.gather_objects(own)
        check_marks([each.mark for each in said])
        return self.arguments.told(said, place.data.of_parts(said))

    def __call__(self, given: Any, told: Told | None = None) -> Any:
        """Returns the function's result for the samples of all ranks; of its rows, those of this rank.

        Args:
            given: Positional and keyword arguments.
            told: What they are, if that was asked already.
        """
        place, current_batch = self._place, self._place.current_batch("")
        refuse_divided(f"{name_of(self.function)} is no sum or mean over positions", current_batch)
        told = told or self.told(given)
        self._check_rows(told, given)
        made = self._computed(told, given)
        if any(ways.entries for ways in told.ways):
            made = with_graphs_of_all(place, made, given)
        number = first_number(made)
        over_of_all(place, True, number, 0, self._is_new)
        self._is_new = False
        self.note_if_not_finite(number)
        shares = told.shares
        if number is None and any(_has_rows(leaf, sum(shares)) for leaf in leaves_of(made)):
            raise LossError(_MIXED_ROWS.format(name=name_of(self.function)))
        own = own_slice(shares, place.data.index) if current_batch.samples else slice(0, 1)
        return map_leaves(lambda leaf: leaf[own] if _has_rows(leaf, sum(shares)) else leaf, made)

    def _computed(self, told: Told, given: Any) -> Any:
        """Returns what the function makes of the samples of all ranks.

        Raises:
            LossError: If what belongs to the samples cannot be told, and makes a difference.
        """
        of_all = self._of_all(told, given)
        failed, worked, error = list[Ways](), list[tuple[Ways, list[float]]](), None
        for ways in told.ways if len(told.ways) > 1 else ():
            with generators_kept(), self.at_work():
                try:
                    worked.append((ways, self._numbers_of(_taken(given, ways, of_all))))
                except Exception as raised:
                    failed, error = [*failed, ways], error or raised
        if error is not None and not worked:
            raise error
        for ways, numbers in worked[1:]:
            if not are_near(numbers, worked[0][1]):
                places = [*(ways.rows ^ worked[0][0].rows), *(ways.entries ^ worked[0][0].entries)]
                raise LossError(
                    _EITHER.format(
                        name=name_of(self.function), places=", ".join(sorted(map(_words_of, places)))
                    )
                )
        ways = worked[0][0] if worked else told.ways[0]
        if worked:
            self.arguments.learn(told, ways, failed)
        order = self._order_of(told, given, ways, of_all)
        if order is not None:
            of_all |= {path: _turned(of_all[path], order) for path in ways.rows}
        args, kwargs = _taken(given, ways, of_all)
        with self._place.random.drawn(), self.at_work():
            made = self.function(*args, **kwargs)
        if order is None:
            return made
        back = order.argsort()
        return map_leaves(lambda leaf: _turned(leaf, back) if _has_rows(leaf, len(back)) else leaf, made)

    def _order_of(self, told: Told, given: Any, ways: Ways, of_all: Mapping[Path, Any]) -> Tensor | None:
        """Returns the order in which one device has the rows of all ranks; None if they are in that order.

        Raises:
            LossError: If it cannot be told, and makes a difference.
        """
        samples = [part.samples * part.weight for part in told.samples]
        each = {part.rows // part.samples for part in told.samples if part.weight}
        if len(each) != 1 or each <= {0, 1} or sum(map(bool, samples)) < 2:
            return None
        is_stacked, number = self._are_stacked, max(each)
        for is_exact in (True, False) if is_stacked is None else ():
            tried = {path: _tried(of_all[path], is_exact) for path in ways.rows}

            def numbers(index: Tensor, tried: Mapping[Path, Any] = tried) -> list[float]:
                taken = {**of_all, **{path: _turned(leaf, index) for path, leaf in tried.items()}}
                with generators_kept():
                    return self._numbers_of(_taken(given, ways, taken))

            plain = torch.autocast(self._place.session.device.type, enabled=False)
            with suppress(Exception), torch.no_grad(), self.at_work(), plain if is_exact else nullcontext():
                is_stacked = are_stacked(numbers, samples, number, 1e-5 if is_exact else 1e-3)
                break
        if is_stacked is None:
            raise LossError(_ORDER.format(name=name_of(self.function), each=number))
        self._are_stacked = is_stacked if can_tell(samples) else self._are_stacked
        return stacked(samples, number).flatten() if is_stacked else None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which the function computes, for errors that it raises."""
        before, self._place.function = self._place.function, name_of(self.function)
        try:
            yield
        finally:
            self._place.function = before

    def _numbers_of(self, given: Any) -> list[float]:
        """Returns the numbers that the function makes of these arguments, as a try."""
        function = copy.deepcopy(self.function) if isinstance(self.function, nn.Module) else self.function
        found = [leaf for leaf in leaves_of(function(*given[0], **given[1])) if isinstance(leaf, Tensor)]
        return [float(leaf.detach().sum()) for leaf in found]

    def _of_all(self, told: Told, given: Any) -> dict[Path, Any]:
        """Returns the rows and entries of all ranks, by their places. A collective call."""
        place, found = self._place, dict[Path, Any]()
        lists = frozenset[Path]().union(*(ways.entries for ways in told.ways))
        rows = frozenset[Path]().union(*(ways.rows for ways in told.ways))
        sure = frozenset.intersection(*(ways.entries for ways in told.ways))
        entries = dict[Path, Any]()

        def visit(path: Path, part: Any) -> Any:
            if path in lists:
                entries[path] = part
            if path in rows:
                found[path] = gathered(part, told.shares, place)
            return part if path in sure else GO_ON

        map_parts(visit, given)
        if entries:
            shares = [each.samples * each.weight for each in told.samples]
            found |= gathered_entries(entries, shares, place)
        return found

    def note_if_not_finite(self, number: Tensor | None) -> None:
        """Remembers that a loss that each rank has computed for the whole batch is not finite, if it has a gradient."""
        step = self._place.steps

        def known(values: list[float]) -> None:
            if not math.isfinite(values[0]):
                self._place.later.bad_losses.setdefault(step, f"the loss is {values[0]} in step {step}")

        if number is not None and number.requires_grad:
            self._place.later.check(known, plain_of(number).detach())

    def _check_rows(self, told: Told, given: Any) -> None:
        """Raises LossError on all ranks if what they have makes no batch. A collective call."""
        name = name_of(self.function)
        if not all(each.fits for each in told.said):
            raise LossError(_NO_ROWS.format(name=name))
        for path, is_of_rows in told.unlike():
            kinds = [each.seen[path].kind if path in each.seen else "nothing" for each in told.said]
            if is_of_rows:
                raise LossError(_OTHER_SHAPES.format(name=name, place=_words_of(path), shapes=kinds))
            raise LossError(_OTHER_VALUES.format(name=name, place=_words_of(path), where=""))
        self._compare_later(told.of_no_sample(given).values())

    def check_numbers(self, told: Told, given: Any) -> None:
        """Raises LossError on all ranks if they have different numbers of no sample. A collective call."""
        leaves = told.of_no_sample(given)
        numbers = {path: differ for path, differ in told.numbers() if path in leaves}
        if other := [path for path, differ in numbers.items() if differ]:
            name, place = name_of(self.function), _words_of(other[0])
            raise LossError(_OTHER_VALUES.format(name=name, place=place, where=""))
        self._compare_later(leaves[path] for path in numbers)

    def _compare_later(self, leaves: Iterable[Any]) -> None:
        """Compares tensors of a device that must be the same on all ranks. A collective call."""
        tensors = [leaf for leaf in leaves if self._place.later.is_late(leaf)]
        if not tensors:
            return
        where = self._place.later.where

        def known(digests: list[float]) -> None:
            if digests != digests[: len(tensors)] * self._place.world_size:
                raise LossError(
                    _OTHER_VALUES.format(name=name_of(self.function), place=_SOMETHING, where=where)
                )

        self._place.later.check(known, of_all(self._place, *map(digest, tensors)))


_NO_ROWS = (
    "{name} is no sum or mean over samples, and what it was called with has no row for each of a rank's samples along "
    "the first dimension, so that it cannot be computed from those of all ranks: pass all that belongs to samples as "
    "tensors with the samples first, or as lists of one entry per sample, or give an evener.loss that says its sum and "
    "its count. Of rows that the loop has chosen, as outputs[mask], pass all rows and the mask, and choose inside"
)
_MIXED_ROWS = (
    "{name} returns a row for each sample that depends on other samples, so that a mean of a rank's rows has not the "
    "gradients of the whole batch: let it return the mean or the sum of them"
)
_OTHER_SHAPES = (
    "{name} is no sum or mean over samples, and is computed from the rows of all ranks, which are not of one shape in "
    "{place}: {shapes}. Let all ranks fill up to one length, pass a list of one tensor per sample (list(outputs)), or "
    "give an evener.loss that says its sum and its count"
)
_SOMETHING = "something"
_OTHER_VALUES = (
    "{name} was called{where} with something that is no row of samples and differs between ranks, {place}, such as a "
    "number counted from a rank's own samples: let the function count it from its arguments, or compute it from rows "
    "of all ranks, which evener.gather gives. What has several rows for a sample is passed in parts of one row for "
    "each, as in loss(rows.chunk(2)), and what has other numbers of rows for each sample as a list of one entry per "
    "sample"
)
_ORDER = (
    "{name} is no sum or mean over samples, and was called with {each} rows for each sample. Rows of all ranks are in "
    "another order if those of a sample are together than if they are stacked, as by torch.cat([first, second]), and "
    "which of the two it is cannot be told, because the loss depends on the order of the samples. Pass them as one row "
    "for each sample, (samples, rows of a sample, ...), or as several arguments, as in loss(*rows.chunk(2))"
)
_EITHER = (
    "{name} was called with what is the same on all ranks and as long as a rank's samples are many, {places}: it may "
    "belong to the samples or be the same for all of them, and the loss is another one then. Let the function find a "
    "constant outside of its arguments (a closure, functools.partial, a buffer of a module). What belongs to the "
    "samples comes as tensors of the prepared loader, or as a list of one entry per sample; what is one list for all "
    "samples, as a dict"
)


def _tried(leaf: Tensor, is_exact: bool) -> Tensor:
    """Returns random numbers in the place of a model's outputs, which may be all the same at first."""
    if not leaf.is_floating_point():
        return leaf
    given = leaf.detach().double() if is_exact else leaf.detach()
    return drawn_like(given, torch.Generator().manual_seed(0)) if leaf.requires_grad else given


def _turned(leaf: Tensor, index: Tensor) -> Tensor:
    return leaf[index.to(leaf.device)]


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows


def _memory_of(model: nn.Module) -> set[int]:
    """Returns the addresses of the model's parameters and buffers."""
    return {address(each) for each in (*model.parameters(), *model.buffers())} - {0}


def _taken(given: Any, ways: Ways, of_all: Mapping[Path, Any]) -> Any:
    """Returns the arguments with the rows and entries of all ranks in the places that ``ways`` says."""

    def visit(path: Path, _: Any) -> Any:
        return of_all[path] if path in ways.entries or path in ways.rows else GO_ON

    return map_parts(visit, given)


def _words_of(path: Path) -> str:
    """Returns the name of a place in the arguments of a function."""
    inner = "".join(f"[{key!r}]" for key in path[2:])
    return (f"argument {path[1] + 1}" if path[0] == 0 else f"argument {path[1]!r}") + (
        inner and f" at {inner}"
    )


def first_number(made: Any) -> Tensor | None:
    found = (leaf for leaf in leaves_of(made) if isinstance(leaf, Tensor) and not leaf.dim())
    return next(found, None)


def name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
