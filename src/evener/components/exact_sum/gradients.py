"""The gradients of a step, added up over blocks and ranks to the same bits on any division of the work.

::

    block       gradients ─ rounded to the grid ─┐
    block       gradients ─ rounded to the grid ─┴─ float64 sum of this rank ─┐
                                            count ────────────────────────────┤ packed
                                                                 sum over the ranks ─ gradient, converted once
                                                                                    └ count ─ unit of the next step

:mod:`evener.components.exact_sum.grid` has the arithmetic, and why it is exact. A tensor without a gradient in a block
adds nothing, which is the same as zeros.

The units are a part of the training's state. They change when an update begins, and not before, so that a step that is
left out or taken again, by whichever ranks, finds those that it would have found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evener.components.exact_sum.grid import (
    FIRST_UNIT,
    check_rounding,
    counted,
    folded,
    is_small,
    is_wide,
    limbs_below,
    limbs_of,
    magic,
    next_unit,
    scale_of_count,
    split,
    split_below,
    unit_below,
    widened,
)
from evener.hardware.async_read import is_late
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import BUCKETS
from evener.torch_internals.foreach import add_each, copy_each, subtract_each
from evener.torch_internals.optimizers import largest

_AT_ONCE = 2**16
"""So many elements are rounded together on a CPU: half of what the cache of a core holds."""
_MOST_KNOWN = 64
"""So many lists of names are kept with what is the same for them in each step."""

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
        self._rounding = torch.empty(0, dtype=torch.float64, device=device)
        self._groups: dict[tuple[str, ...], _SumGroup] = {}
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
        self._rooms, self._flats, self._groups, self._rounding = {}, {}, {}, self._rounding[:0].clone()
        self.forget()

    def forget(self) -> None:
        """Drops what was added since the last update."""
        self._sums: dict[str, Tensor] = {}
        self._excess: dict[str, float] = {}
        """Magic numbers that are still in sums: those of an odd number of blocks."""
        self._limbs: dict[str, Tensor] = {}
        self._below: dict[str, Tensor] = {}
        """Digits below the unit, of blocks that may be far below it."""
        self._counts: dict[str, float] = {}
        self._counts_of_all: list[tuple[Sequence[str], Tensor]] = []
        self._next = None
        self.given: set[str] = set()
        """Names of the tensors to which this rank gave a gradient."""

    # A rank's blocks

    @torch.no_grad()
    def add(self, gradients: Gradients) -> None:
        """Adds the gradients of a block."""
        if self.watch is not None:
            self.watch(gradients)
        if not self.is_adding:
            return
        self.given.update(gradients)
        kinds: dict[torch.dtype, list[str]] = {}
        for name, gradient in gradients.items():
            if gradient.numel():
                kinds.setdefault(gradient.dtype, []).append(name)
        for names in kinds.values():
            self._add(names, [gradients[name] for name in names])

    def _add(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        near = dict[str, Tensor]()
        for name, gradient, most in zip(names, gradients, self._largest(names, gradients), strict=True):
            own = counted(most, self._scales[name])
            count = self._counts[name] = self._counts.get(name, 0.0) + own
            if own == 1:
                self._add_below(name, gradient)
            if is_wide(count) or name in self._limbs:
                self._add_wide(name, gradient, count)
            else:
                near[name] = gradient
        first = {name: gradient for name, gradient in near.items() if name not in self._sums}
        later = {name: gradient for name, gradient in near.items() if name in self._sums}
        if first:
            self._add_near(first, [self._begun(name, gradient) for name, gradient in first.items()])
        if later:
            self._add_near(later, self._rounded(later), [self._sums[name] for name in later])

    def _largest(self, names: Sequence[str], gradients: Sequence[Tensor]) -> list[float]:
        """Returns the largest absolute value of each tensor; NaN for one with a NaN. None is empty."""
        if is_late(self._device):
            return torch.stack(largest(gradients)).tolist()
        group = self._group(names)
        if group.ends.dtype != gradients[0].dtype or not group.pairs:
            group.ends = gradients[0].new_empty((2, len(gradients)))
            group.pairs = list(zip(*(each.unbind() for each in group.ends), strict=True))
        for gradient, pair in zip(gradients, group.pairs, strict=True):
            torch.aminmax(gradient, out=pair)  # a tenth of the time of norms on a CPU
        return group.ends.abs().amax(0).tolist()

    def _begun(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self._rooms:
            with made_as(BUCKETS):
                self._rooms[name] = torch.empty_like(gradient, dtype=torch.float64)
        self._sums[name] = self._rooms[name]
        return self._rooms[name]

    def _add_near(self, near: Gradients, to: list[Tensor], sums: Sequence[Tensor] = ()) -> None:
        """Rounds gradients in ``to``, and adds that to ``sums`` of one number for each element. What is in ``to`` stays
        in the cache of a processor between these."""
        gradients, numbers = list(near.values()), [self._number(name) for name in near]
        for some in self._group(near).rounds:
            copy_each(to[some], gradients[some])
            add_each(to[some], numbers[some])
            add_each(sums[some], to[some])

    def _number(self, name: str) -> float:
        """Returns the number whose addition rounds the next block, and notes whether the sum then has it in excess."""
        if name in self._excess:
            return -self._excess.pop(name)
        return self._excess.setdefault(name, self._magic[name])

    def _rounded(self, names: Iterable[str]) -> list[Tensor]:
        """Returns memory in which gradients are rounded, used again in each round."""
        group = self._group(names)
        if not group.rounded:
            if not len(self._rounding):
                with made_as(BUCKETS):
                    self._rounding = torch.empty(self._most(), dtype=torch.float64, device=self._device)
            for some in group.rounds:
                sizes = [self._like[name].numel() for name in group.names[some]]
                parts = self._rounding[: sum(sizes)].split_with_sizes(sizes)
                group.rounded += map(self._view, parts, group.names[some])
        return group.rounded

    def _most(self) -> int:
        """Returns the number of elements in the largest possible round."""
        sizes = [tensor.numel() for tensor in self._like.values()]
        return sum(sizes) if is_late(self._device) else min(sum(sizes), max(_AT_ONCE, *sizes))

    def _group(self, names: Iterable[str]) -> _SumGroup:
        key = tuple(names)
        if key not in self._groups:
            if len(self._groups) == _MOST_KNOWN:
                self._groups.clear()
            sizes = [self._like[name].numel() for name in key]
            most = math.inf if is_late(self._device) else _AT_ONCE
            self._groups[key] = _SumGroup(key, list(_rounds(sizes, most)))
        return self._groups[key]

    def _settle(self, names: Iterable[str]) -> None:
        """Subtracts from sums what they have in excess."""
        those = [name for name in names if name in self._excess]
        subtract_each([self._sums[name] for name in those], [self._excess.pop(name) for name in those])

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

    def packed(self, names: Sequence[str]) -> Tensor:
        """Returns this rank's sums of these tensors, then their counts, as one flat float64 tensor: the same memory
        in each step."""
        flat, views = self._flat(tuple(names))
        sums, own = dict(self.named(names)), dict(zip(names, views, strict=True))
        for name in own.keys() - sums.keys():
            own[name].zero_()
        copy_each([own[name] for name in sums], list(sums.values()))
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
        """Writes the sum of the ranks' :meth:`packed` tensors into ``gradients``, rounded once to their type."""
        names = tuple(gradients)
        known, parts = self._flats.get(names, (None, []))
        copy_each(list(gradients.values()), parts if known is flat else self._parts(flat, names))
        self.take_counts(names, flat[flat.numel() - len(names) :])

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
        counts, again = dict[str, float](), dict[str, Tensor]()
        for names, of_all in self._counts_of_all:
            counts.update(zip(names, of_all.tolist(), strict=True))
        for name, unit in self._units.items():
            count = counts.get(name, 0.0)
            if is_wide(count):
                limbs = self._with_limbs(name, count).contiguous()
                add_up(limbs)
                again[name] = folded(limbs, unit)
            elif is_small(count):
                limbs = self._with_below(name).contiguous()
                add_up(limbs)
                again[name] = folded(limbs, unit_below(unit))
        following = {name: next_unit(unit, counts.get(name, 0.0)) for name, unit in self._units.items()}
        self.forget()
        self._next = following
        return again

    def of_one_rank(self) -> dict[str, Tensor]:
        """Ends the sums of a step on a rank that has all blocks. Returns them, in float64."""
        names = list(self._like)
        sums = dict(self.named(names))
        self.take_counts(names, self.counts(names))
        return sums | self.finish(lambda total: None)

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


@dataclass
class _SumGroup:
    """What is the same in each step for tensors that are added together."""

    names: Sequence[str]
    rounds: Sequence[slice]
    """Those that are rounded together."""
    rounded: list[Tensor] = field(default_factory=list)
    ends: Tensor = field(default_factory=lambda: torch.empty(0))
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _rounds(sizes: Sequence[int], most: float) -> Iterator[slice]:
    """Yields ranges of the tensors with these sizes that together have at most about ``most`` elements."""
    start, size = 0, 0
    for place, more in enumerate(sizes):
        if size and size + more > most:
            yield slice(start, place)
            start, size = place, 0
        size += more
    yield slice(start, len(sizes))
