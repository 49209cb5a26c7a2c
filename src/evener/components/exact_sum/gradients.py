"""The gradients of a step, added up over blocks and ranks to the same bits on any division of the work.

::

    block        gradients ─ rounded to the grid ─┐
    block        gradients ─ rounded to the grid ─┴─ float64 sum of this rank ─┐
    last block   gradients ─ rounded to the grid ──────────────────────────────┤ packed
                                            counts ────────────────────────────┤
                                                                 sum over the ranks ─ gradient, converted once
                                                                                    └ count ─ unit of the next step

The last block goes into the message at once, where it is rounded while it is in the cache of a processor, and not into
the rank's sum. If that is needed again, because of its count, the block's gradients are still there.

:mod:`evener.components.exact_sum.grid` has the arithmetic, and why it is exact. A tensor without a gradient in a block
adds nothing, which is the same as zeros.

The units are a part of the training's state. They change when an update begins, and not before, so that a step that is
left out or taken again, by whichever ranks, finds those that it would have found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from evener.components.exact_sum.grid import (
    FIRST_UNIT,
    MOST,
    are_usual,
    check_rounding,
    counted,
    folded,
    is_unusual,
    is_wide,
    limbs_below,
    limbs_of,
    magic,
    next_unit,
    round_each,
    scale_of_count,
    split,
    split_below,
    unit_below,
    widened,
)
from evener.components.exact_sum.workspace import Workspace, where
from evener.hardware.async_read import is_late
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import BUCKETS
from evener.torch_internals.foreach import add_each, copy_each, subtract_each

Tensors = Sequence[Tensor]
Gradients = Mapping[str, Tensor]
"""Dense gradients of a rank, by the names of their parameters."""


class ExactGradients:
    """Adds up the gradients of one rank's blocks in a step, and knows the units of all tensors.

    Args:
        tensors: The whole tensors that gradients are summed for, by name, all on ``device``.

    Raises:
        ConfigurationError: If ``device`` does not round as it must.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        check_rounding(device)
        self._like = dict(tensors)
        self._device = device
        self._rooms: dict[str, Tensor] = {}
        """Memory of sums, kept from step to step: to get it anew takes longer than to add."""
        self._flats: dict[tuple[str, ...], tuple[Tensor, list[Tensor]]] = {}
        self._workspace = Workspace(self._like, device)
        self.watch: Callable[[Gradients], None] | None = None
        """Called with the gradients of a block before they are added; with some of them at a time, where they come in
        buckets."""
        self.is_adding = True
        """False: the gradients of a block go to ``watch`` and nowhere else."""
        self._next: dict[str, int] | None = None
        self._take_units(dict.fromkeys(self._like, FIRST_UNIT))
        self.forget()

    def _take_units(self, units: dict[str, int]) -> None:
        self._units = units
        self._scales = {name: scale_of_count(unit) for name, unit in units.items()}
        self._magic = {name: magic(unit) for name, unit in units.items()}

    def free(self) -> None:
        """Frees memory. Nothing can be added afterwards."""
        self._rooms, self._flats = {}, {}
        self._workspace.free()
        self.forget()

    def forget(self) -> None:
        """Drops what was added since the last update."""
        self._sums: dict[str, Tensor] = {}
        self._excess: dict[str, float] = {}
        """Magic numbers that are still in sums: those of an odd number of blocks."""
        self._limbs: dict[str, Tensor] = {}
        self._below: dict[str, Tensor] = {}
        """Digits below the unit, of blocks that may be far below it."""
        self._last: dict[str, Tensor] = {}
        """Gradients of the last block that are in a message, and not in the sums."""
        self._counts: dict[str, float] = {}
        self._counts_of_all: list[tuple[Sequence[str], Tensor]] = []
        self._next = None
        self.given: set[str] = set()
        """Names of the tensors to which this rank gave a gradient."""

    # A rank's blocks

    @torch.no_grad()
    def add(self, gradients: Gradients) -> None:
        """Adds the gradients of a block."""
        if self._takes(gradients):
            for names, given in self._kinds(gradients):
                self._add(*self._counted(names, given))

    def _takes(self, gradients: Gradients) -> bool:
        """Notes the gradients of a block. Returns True if they are to be added."""
        if self.watch is not None:
            self.watch(gradients)
        if self.is_adding:
            self.given.update(gradients)
        return self.is_adding

    def _kinds(self, gradients: Gradients) -> Iterator[tuple[Sequence[str], Tensors]]:
        """Yields the tensors that are not empty with their names, those of one type together."""
        names, given = list(gradients), list(gradients.values())
        kinds = [gradient.dtype if gradient.numel() else None for gradient in given]
        for dtype in dict.fromkeys(kinds):
            if dtype is not None:
                chosen = [kind == dtype for kind in kinds]
                yield list(compress(names, chosen)), list(compress(given, chosen))

    def _counted(self, names: Sequence[str], gradients: Tensors) -> tuple[Sequence[str], Tensors]:
        """Counts gradients. Returns those that are left to be added to sums without limbs."""
        owns = counted(self._workspace.largest(names, gradients), [self._scales[name] for name in names])
        counts = [self._counts.get(name, 0.0) + own for name, own in zip(names, owns, strict=True)]
        self._counts.update(zip(names, counts, strict=True))
        if not self._limbs and 1 not in owns and max(counts) <= MOST:
            return names, gradients
        wide = set[str]()
        for name, gradient, own, count in zip(names, gradients, owns, counts, strict=True):
            if own == 1:
                self._add_below(name, gradient)
            if is_wide(count) or name in self._limbs:
                self._add_wide(name, gradient, count)
                wide.add(name)
        return where(names, gradients, wide, inside=False)

    def _add(self, names: Sequence[str], gradients: Tensors) -> None:
        begun = self._sums.keys() & names
        if begun and len(begun) < len(names):
            self._add(*where(names, gradients, begun))
            self._add(*where(names, gradients, begun, inside=False))
        elif begun:
            to, sums = self._workspace.scratch(names), [self._sums[name] for name in names]
            self._round(names, gradients, to, sums)
        else:
            self._round(names, gradients, list(map(self._begun, names, gradients)))

    def _begun(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self._rooms:
            with made_as(BUCKETS):
                self._rooms[name] = torch.empty_like(gradient, dtype=torch.float64)
        self._sums[name] = self._rooms[name]
        return self._rooms[name]

    def _round(self, names: Sequence[str], gradients: Tensors, to: Tensors, sums: Tensors = ()) -> None:
        """Rounds gradients in ``to``, and adds that to ``sums`` of one number for each element. What is in ``to`` stays
        in the cache of a processor between these."""
        numbers = [self._number(name) for name in names]
        for some in self._workspace.rounds(names):
            copy_each(to[some], gradients[some])
            add_each(to[some], numbers[some])
            add_each(sums[some], to[some])

    def _round_last(self, names: Sequence[str], gradients: Tensors, to: Tensors, out: Tensors = ()) -> None:
        """Writes sums and gradients of the last block to ``to``, and then to ``out``. Leaves the sums as they are."""
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for place, name in enumerate(names):
            kinds.setdefault((name in self._sums, name in self._excess), []).append(place)
        for (begun, has_excess), places in kinds.items():
            some = [names[place] for place in places]
            given, own, result = ([each[place] for place in places] for each in (gradients, to, out or to))
            numbers = [-self._magic[name] if has_excess else self._magic[name] for name in some]
            sums = [self._sums[name] for name in some] if begun else []
            for at in self._workspace.rounds(some):
                copy_each(own[at], given[at])
                add_each(own[at], numbers[at])
                if begun:
                    add_each(own[at], sums[at])
                if not has_excess:
                    subtract_each(own[at], numbers[at])
                if out:
                    copy_each(result[at], own[at])

    def _number(self, name: str) -> float:
        """Returns the number whose addition rounds the next block, and notes whether the sum then has it in excess."""
        if name in self._excess:
            return -self._excess.pop(name)
        return self._excess.setdefault(name, self._magic[name])

    def _settle(self, names: Collection[str]) -> None:
        """Subtracts from sums what they have in excess, and adds what is not in them of the last block."""
        those = [name for name in names if name in self._excess] if self._excess else []
        subtract_each([self._sums[name] for name in those], [self._excess.pop(name) for name in those])
        for name in self._last.keys() & names if self._last else ():
            rounded = self._last.pop(name).to(torch.float64, copy=True)  # rare, so no memory is kept
            round_each([rounded], [self._units[name]])
            self._sums[name] = self._sums[name].add_(rounded) if name in self._sums else rounded

    def _add_wide(self, name: str, gradient: Tensor, count: float) -> None:
        """Adds a gradient to a sum of limbs."""
        sums = self._with_limbs(name, count)
        self._limbs[name] = sums.add_(split(gradient.double(), self._units[name], len(sums)))

    def _add_below(self, name: str, gradient: Tensor) -> None:
        """Keeps what rounding a gradient to its unit cuts off."""
        digits = split_below(gradient.double(), self._units[name])
        below = self._below.get(name)
        self._below[name] = digits if below is None else below.add_(digits)

    def _with_below(self, name: str) -> Tensor:
        """Returns this rank's sum with the digits below the unit."""
        self._settle([name])
        like, number = self._like[name], limbs_below(self._units[name])
        zeros = like.new_zeros((number, *like.shape), dtype=torch.float64)
        total = self._sums.get(name, like.new_zeros(like.shape, dtype=torch.float64))
        return torch.cat([self._below.get(name, zeros), total[None]])

    def _with_limbs(self, name: str, count: float) -> Tensor:
        """Returns this rank's sum in as many limbs as the count needs."""
        self._settle([name])
        unit, like = self._units[name], self._like[name]
        own = self._limbs.get(name)
        if own is None:
            total = self._sums.pop(name, None)
            own = (like.new_zeros(like.shape, dtype=torch.float64) if total is None else total)[None]
        return widened(own, unit, limbs_of(unit, count, like.dtype))

    def local(self, name: str) -> Tensor | None:
        """Returns this rank's sum in float64, or None if it is zero. A sum of limbs is rounded; its count tells all
        ranks that it is to be summed once more."""
        self._settle([name])
        limbs = self._limbs.get(name)
        return self._sums.get(name) if limbs is None else limbs.sum(0)

    def named(self, names: Iterable[str]) -> list[tuple[str, Tensor]]:
        """Returns this rank's sums that are not zero, by name."""
        names = list(names)
        self._settle(names)
        return [(name, total) for name in names if (total := self.local(name)) is not None]

    def counts(self, names: Sequence[str]) -> Tensor:
        """Returns this rank's counts, to be summed over the ranks."""
        found = [self._counts.get(name, 0.0) for name in names]
        return torch.tensor(found, dtype=torch.float64).to(self._device)

    # The sum over the ranks

    @torch.no_grad()
    def packed(self, names: Sequence[str], last: Gradients | None = None) -> Tensor:
        """Returns this rank's sums of these tensors, then their counts, as one flat float64 tensor: the same memory
        in each step.

        Args:
            last: Gradients of the last block, which are added. They must stay as they are until :meth:`unpack` or
                :meth:`finish` has written the sums.
        """
        flat, views = self._flat(tuple(names))
        own, kinds = dict(zip(names, views, strict=True)), list[tuple[Sequence[str], Tensors]]()
        if last and is_late(self._device):  # where counts cannot be read before gradients are written
            self.add(last)
        elif last and self._takes(last):
            kinds = [self._counted(*kind) for kind in self._kinds(last)]
        for some, gradients in kinds:
            self._round_last(some, gradients, [own.pop(name) for name in some])
        sums = dict(self.named(own))
        for name in own.keys() - sums.keys():
            own[name].zero_()
        copy_each([own[name] for name in sums], list(sums.values()))
        for some, gradients in kinds:
            self._last.update(zip(some, gradients, strict=True))
        flat[flat.numel() - len(views) :] = self.counts(names)
        return flat

    def _flat(self, names: tuple[str, ...]) -> tuple[Tensor, list[Tensor]]:
        """Returns the memory of a message, and the part of each tensor in it."""
        if names not in self._flats:  # buckets have changed
            self._flats = {key: known for key, known in self._flats.items() if not set(key) & set(names)}
            size = sum(self._like[name].numel() for name in names) + len(names)
            with made_as(BUCKETS):
                flat = torch.empty(size, dtype=torch.float64, device=self._device)
            self._flats[names] = flat, self._parts(flat, names)
        return self._flats[names]

    @torch.no_grad()
    def unpack(self, flat: Tensor, gradients: Gradients) -> None:
        """Writes the sum of the ranks' :meth:`packed` tensors into ``gradients``, rounded once to their type. Leaves
        out those of the last block whose sum :meth:`finish` makes once more."""
        names = tuple(gradients)
        own, parts = self._flats.get(names, (None, []))
        parts = parts if own is flat else self._parts(flat, names)
        to, counts = list(gradients.values()), flat[flat.numel() - len(names) :]
        if self._last:
            known = zip(names, counts.tolist(), strict=True)
            again = {name for name, count in known if name in self._last and is_unusual(count)}
            to, parts = (where(names, each, again, inside=False)[1] for each in (to, parts))
            for name in set(names) - again:
                self._last.pop(name, None)
        copy_each(to, parts)
        self.take_counts(names, counts)

    def _parts(self, flat: Tensor, names: Sequence[str]) -> list[Tensor]:
        sizes = [self._like[name].numel() for name in names]
        return list(map(self._view, flat[: sum(sizes)].split_with_sizes(sizes), names))

    def _view(self, part: Tensor, name: str) -> Tensor:
        return part.view(self._like[name].shape)

    def take_counts(self, names: Sequence[str], counts: Tensor) -> None:
        """Takes the counts over all ranks."""
        self._counts_of_all.append((names, counts))

    @torch.no_grad()
    def finish(self, add_up: Callable[[Tensor], object]) -> dict[str, Tensor]:
        """Ends the sums of a step. Returns those that had to be made once more, whole, in float64. All ranks must call
        this together, with the counts of all ranks.

        Args:
            add_up: Replaces a float64 tensor by its sum over the ranks.
        """
        counts = dict[str, float]()
        for names, of_all in self._counts_of_all:
            counts.update(zip(names, of_all.tolist(), strict=True))
        return self._finish(counts, add_up)

    def _finish(self, counts: Mapping[str, float], add_up: Callable[[Tensor], object]) -> dict[str, Tensor]:
        again = dict[str, Tensor]()
        for name, unit in self._units.items() if counts and not are_usual(counts.values()) else ():
            count = counts.get(name, 0.0)
            if is_unusual(count):  # in one order on all ranks
                wide = is_wide(count)
                limbs = (self._with_limbs(name, count) if wide else self._with_below(name)).contiguous()
                add_up(limbs)
                again[name] = folded(limbs, unit if wide else unit_below(unit))
        following = {name: next_unit(unit, counts.get(name, 0.0)) for name, unit in self._units.items()}
        self.forget()
        self._next = following
        return again

    @torch.no_grad()
    def of_one_rank(self, last: Gradients | None = None) -> dict[str, Tensor]:
        """Ends the sums of a step on a rank that has all blocks. Returns them, in float64.

        Args:
            last: Gradients of the last block, which are added. Sums are written into these, rounded once to their type,
                and returned only where they had to be made in another way.
        """
        written = set[str]()
        for kind in self._kinds(last) if last and self._takes(last) else ():
            names, gradients = self._counted(*kind)
            if not are_usual(self._counts.values()):
                odd = {name for name in names if is_unusual(self._counts[name])}
                self._add(*where(names, gradients, odd))
                names, gradients = where(names, gradients, odd, inside=False)
            self._round_last(names, gradients, self._workspace.scratch(names), gradients)
            written.update(names)
        sums = dict(self.named(name for name in self._like if name not in written))
        return sums | self._finish(self._counts, lambda total: None)

    # State

    def commit(self) -> None:
        """Takes over the units that follow from the sums of the step. Called when its update begins."""
        if self._next is not None:
            if self._next != self._units:
                self._take_units(self._next)
            self._next = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the exponents of the units, by name. They are the same on all ranks."""
        return {"units": dict(self._units)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the result of :meth:`state_dict`. A tensor that it lacks begins anew."""
        self._take_units({name: int(state["units"].get(name, FIRST_UNIT)) for name in self._like})
        self.forget()
