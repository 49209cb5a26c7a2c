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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evener.components.exact_sum.grid import (
    FIRST_UNIT,
    MOST,
    check_rounding,
    counted,
    folded,
    is_small,
    is_wide,
    limbs_below,
    limbs_of,
    next_unit,
    round_each,
    scale_of_count,
    split,
    split_below,
    unit_below,
    widened,
)
from evener.hardware.async_read import is_late
from evener.torch_internals.foreach import add_each, copy_each
from evener.torch_internals.optimizers import largest

_AT_ONCE = 2**18
"""So many elements are rounded together."""

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
        self._places = {name: place for place, name in enumerate(self._like)}
        self._units = [FIRST_UNIT] * len(self._like)
        self._device = device
        self._rooms: dict[str, Tensor] = {}
        """Memory of sums, kept from step to step: to get it anew takes longer than to add."""
        self._flats: dict[tuple[str, ...], Tensor] = {}
        self._rounding = torch.empty(0, dtype=torch.float64, device=device)
        self._next: list[int] | None = None
        self._scales = self._scales_now()
        self.forget()

    def _scales_now(self) -> Tensor:
        scales = [scale_of_count(unit) for unit in self._units]
        return torch.tensor(scales, dtype=torch.float64).to(self._device)

    def free(self) -> None:
        """Frees memory. Nothing can be added afterwards."""
        self._rooms, self._flats, self._rounding = {}, {}, self._rounding[:0].clone()
        self.forget()

    def forget(self) -> None:
        """Drops what was added since the last update."""
        self._sums: dict[str, Tensor] = {}
        self._limbs: dict[str, Tensor] = {}
        self._below: dict[str, Tensor] = {}
        """Digits below the unit, of blocks that may be far below it."""
        self._counts = torch.zeros_like(self._scales)
        self._counts_of_all = torch.zeros_like(self._scales)
        self._next = None
        self.given: set[str] = set()
        """Names of the tensors to which this rank gave a gradient."""

    # A rank's blocks

    @torch.no_grad()
    def add(self, gradients: Gradients) -> None:
        """Adds the gradients of a block."""
        self.given.update(gradients)
        kinds: dict[torch.dtype, list[str]] = {}
        for name, gradient in gradients.items():
            if gradient.numel():
                kinds.setdefault(gradient.dtype, []).append(name)
        for names in kinds.values():
            self._add(names, [gradients[name] for name in names])

    def _add(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        places = self._at(names)
        own = counted(_largest(gradients), self._scales[places])
        counts = self._counts[places] + own
        self._counts[places] = counts
        near = list(zip(names, gradients, strict=True))
        if bool(((counts > MOST) | (own == 1)).any()):
            for pair, count in zip(near, own.tolist(), strict=True):
                if count == 1:
                    self._add_below(*pair)
            given = zip(near, counts.tolist(), strict=True)
            near = [pair for pair, count in given if not self._add_wide(*pair, count)]
        for some in _in_rounds(near):
            self._add_near(some)

    def _add_near(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        """Adds gradients to sums of one number for each element. The first of a step are rounded in place, others in
        memory that is used again and again, most of it in a processor's cache."""
        first = [(name, gradient) for name, gradient in pairs if name not in self._sums]
        later = [(name, gradient) for name, gradient in pairs if name in self._sums]
        for name, gradient in first:
            if name not in self._rooms:
                self._rooms[name] = torch.empty_like(gradient, dtype=torch.float64)
            self._sums[name] = self._rooms[name]
        self._round(first, [self._sums[name] for name, _ in first])
        sizes = [gradient.numel() for _, gradient in later]
        if sum(sizes) > len(self._rounding):
            self._rounding = torch.empty(max(sum(sizes), _AT_ONCE), dtype=torch.float64, device=self._device)
        parts = self._rounding[: sum(sizes)].split_with_sizes(sizes)
        rounded = [part.view(gradient.shape) for part, (_, gradient) in zip(parts, later, strict=True)]
        self._round(later, rounded)
        add_each([self._sums[name] for name, _ in later], rounded)

    def _round(self, pairs: Sequence[tuple[str, Tensor]], to: list[Tensor]) -> None:
        copy_each(to, [gradient for _, gradient in pairs])
        round_each(to, [self._units[self._places[name]] for name, _ in pairs])

    def _add_wide(self, name: str, gradient: Tensor, count: float) -> bool:
        """Adds a gradient to a sum of limbs, if this rank's sum needs them. Returns True if so."""
        if not is_wide(count) and name not in self._limbs:
            return False
        unit, sums = self._units[self._places[name]], self._with_limbs(name, count)
        self._limbs[name] = sums.add_(split(gradient.double(), unit, len(sums)))
        return True

    def _add_below(self, name: str, gradient: Tensor) -> None:
        """Keeps what rounding a gradient to its unit cuts off."""
        digits = split_below(gradient.double(), self._units[self._places[name]])
        below = self._below.get(name)
        self._below[name] = digits if below is None else below.add_(digits)

    def _with_below(self, name: str) -> Tensor:
        """Returns this rank's sum with the digits below the unit."""
        like, number = self._like[name], limbs_below(self._units[self._places[name]])
        zeros = like.new_zeros((number, *like.shape), dtype=torch.float64)
        total = self._sums.get(name, like.new_zeros(like.shape, dtype=torch.float64))
        return torch.cat([self._below.get(name, zeros), total[None]])

    def _with_limbs(self, name: str, count: float) -> Tensor:
        """Returns this rank's sum in as many limbs as the count needs."""
        unit, like = self._units[self._places[name]], self._like[name]
        own = self._limbs.get(name)
        if own is None:
            total = self._sums.pop(name, None)
            own = (like.new_zeros(like.shape, dtype=torch.float64) if total is None else total)[None]
        return widened(own, unit, limbs_of(unit, count, like.dtype))

    def local(self, name: str) -> Tensor | None:
        """Returns this rank's sum in float64, or None if it is zero. A sum of limbs is rounded; its count tells all
        ranks that it is to be summed once more."""
        limbs = self._limbs.get(name)
        return self._sums.get(name) if limbs is None else limbs.sum(0)

    def named(self, names: Iterable[str]) -> list[tuple[str, Tensor]]:
        """Returns this rank's sums that are not zero, by name."""
        return [(name, total) for name in names if (total := self.local(name)) is not None]

    def counts(self, names: Sequence[str]) -> Tensor:
        """Returns this rank's counts, to be summed over the ranks."""
        return self._counts[self._at(names)]

    def _at(self, names: Iterable[str]) -> Tensor:
        places = [self._places[name] for name in names]
        return torch.tensor(places, dtype=torch.int64).to(self._device)

    # The sum over the ranks

    def packed(self, names: Sequence[str]) -> Tensor:
        """Returns this rank's sums of these tensors, then their counts, as one flat float64 tensor: the same memory
        in each step."""
        flat, sums = self._flat(tuple(names)), dict(self.named(names))
        parts = list(self._parts(flat, names))
        for part, name in parts:
            if name not in sums:
                part.zero_()
        copy_each([self._view(part, name) for part, name in parts if name in sums], list(sums.values()))
        flat[flat.numel() - len(parts) :] = self.counts(names)
        return flat

    def _flat(self, names: tuple[str, ...]) -> Tensor:
        if names not in self._flats:  # buckets have changed
            self._flats = {key: flat for key, flat in self._flats.items() if not set(key) & set(names)}
            size = sum(self._like[name].numel() for name in names) + len(names)
            self._flats[names] = torch.empty(size, dtype=torch.float64, device=self._device)
        return self._flats[names]

    @torch.no_grad()
    def unpack(self, flat: Tensor, gradients: Gradients) -> None:
        """Writes the sum of the ranks' :meth:`packed` tensors into ``gradients``, rounded once to their type."""
        parts = list(self._parts(flat, list(gradients)))
        copy_each(list(gradients.values()), [self._view(part, name) for part, name in parts])
        self.take_counts(list(gradients), flat[flat.numel() - len(parts) :])

    def _parts(self, flat: Tensor, names: Sequence[str]) -> Iterable[tuple[Tensor, str]]:
        sizes = [self._like[name].numel() for name in names]
        return zip(flat[: sum(sizes)].split_with_sizes(sizes), names, strict=True)

    def _view(self, part: Tensor, name: str) -> Tensor:
        return part.view(self._like[name].shape)

    def take_counts(self, names: Sequence[str], counts: Tensor) -> None:
        """Takes the counts over all ranks."""
        self._counts_of_all[self._at(names)] = counts

    @torch.no_grad()
    def finish(self, add_up: Callable[[Tensor], object]) -> dict[str, Tensor]:
        """Ends the sums of a step. Returns those that had to be made once more, whole, in float64. All ranks must call
        this together, with the counts of all ranks.

        Args:
            add_up: Replaces a float64 tensor by its sum over the ranks.
        """
        counts, again = self._counts_of_all.tolist(), dict[str, Tensor]()
        for (name, place), count in zip(self._places.items(), counts, strict=True):
            if is_wide(count):
                limbs = self._with_limbs(name, count).contiguous()
                add_up(limbs)
                again[name] = folded(limbs, self._units[place])
            elif is_small(count):
                limbs = self._with_below(name).contiguous()
                add_up(limbs)
                again[name] = folded(limbs, unit_below(self._units[place]))
        following = [next_unit(unit, count) for unit, count in zip(self._units, counts, strict=True)]
        self.forget()
        self._next = following
        return again

    def of_one_rank(self) -> dict[str, Tensor]:
        """Ends the sums of a step on a rank that has all blocks. Returns them, in float64."""
        sums, self._counts_of_all = dict(self.named(self._like)), self._counts
        return sums | self.finish(lambda total: None)

    # State

    def commit(self) -> None:
        """Takes over the units that follow from the sums of the step. Called when its update begins."""
        if self._next is not None:
            self._units, self._next = self._next, None
            self._scales = self._scales_now()

    def state_dict(self) -> dict[str, Any]:
        """Returns the exponents of the units, by name. They are the same on all ranks."""
        return {"units": dict(zip(self._places, self._units, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the result of :meth:`state_dict`. A tensor that it lacks begins anew."""
        self._units = [int(state["units"].get(name, FIRST_UNIT)) for name in self._places]
        self._scales = self._scales_now()
        self.forget()


def _in_rounds(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields the gradients in lists of at most about `_AT_ONCE` elements, on a CPU."""
    some, size = list[tuple[str, Tensor]](), 0
    for name, gradient in pairs:
        if some and size + gradient.numel() > _AT_ONCE and not is_late(gradient.device):
            yield some
            some, size = [], 0
        some.append((name, gradient))
        size += gradient.numel()
    if some:
        yield some


def _largest(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the largest absolute value of each tensor, in float64; NaN for one with a NaN. None is empty."""
    if is_late(gradients[0].device):
        return torch.stack(largest(gradients)).double()
    ends = [torch.aminmax(gradient) for gradient in gradients]  # a tenth of the time of norms on a CPU
    return (
        torch.stack([torch.stack([each.min for each in ends]), torch.stack([each.max for each in ends])])
        .double()
        .abs()
        .amax(0)
    )
