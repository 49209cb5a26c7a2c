"""Buffers in asynchronous training: they come with the weights, and go back with the gradients.

A worker gets the server's buffers with each version of the weights, so it keeps nothing between two ranges that it
computes, and its death loses nothing. What its passes have changed goes back with the gradients, and merges as they do:
running moments of BatchNorm by the law of total variance (:mod:`evener.strategies.running_moments`), other
floating-point buffers by samples, and those of other types by taking the last value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evener.core.complex_numbers import as_real
from evener.strategies.running_moments import NormalizedElements, held_buffers, running_moments
from evener.torch_internals.autograd import version

WIDE = torch.float64
"""Rows are made on the CPU, in this type."""


class WorkerBuffers:
    """The buffers of a model that a worker trains."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._normalized = model, NormalizedElements(model)
        held = held_buffers(model)
        self._moments = running_moments(model, held)
        of_norms = {place for each in self._moments for place in each.places}
        self._others = [place for place in range(len(held)) if place not in of_norms]
        self._like = torch.empty(0, dtype=WIDE)
        self._opened: list[Tensor] = []
        self._written: set[int] = set()
        """Which of the others the passes of this worker have changed in the section."""
        self._before: list[tuple[Tensor, int]] = []
        self._batches: list[float] = []

    def open(self) -> None:
        """Begins a section with the buffers that the model has now."""
        now = self._now()
        self._opened = [now[place].detach().clone() for place in self._others]
        self._written.clear()

    @torch.no_grad()
    def begin(self, row: Tensor) -> None:
        """Takes over the server's buffers (`ServerBuffers.row`), before the passes of a range. What no merge of the
        section has changed is as the section began, whatever passes of this worker have written to it since."""
        now = self._now()
        read_values(row, self._places(row), now)
        flags = row[: len(self._others)].tolist()
        for at, (place, is_given) in enumerate(zip(self._others, flags, strict=True)):
            if at in self._written and not is_given:
                now[place].copy_(self._opened[at])
        self._normalized.counts = {}
        self._before = [(now[place], version(now[place])) for place in self._others]
        self._batches = [0.0 if each.count is None else float(now[each.count]) for each in self._moments]

    def row(self, samples: int) -> Tensor:
        """Returns what the passes of a range of ``samples`` samples have changed."""
        now = self._now()
        changed = [
            now[place] is not before or version(now[place]) != writes
            for place, (before, writes) in zip(self._others, self._before, strict=True)
        ]
        self._written.update(at for at, is_changed in enumerate(changed) if is_changed)
        parts = [self._like.new_tensor(changed)]
        for each, batches in zip(self._moments, self._batches, strict=True):
            counted = self._normalized.counts.get(each.module, (0, 0))
            more = 0.0 if each.count is None else float(now[each.count]) - batches
            parts.append(each.summand(now, more, samples, counted, self._like))
        parts += [_flat(now[place]) for place, flag in zip(self._others, changed, strict=True) if flag]
        return torch.cat(parts)

    def _places(self, row: Tensor) -> list[int]:
        flags = row[: len(self._others)].tolist()
        norms = [place for each in self._moments for place in each.places]
        return norms + [place for place, flag in zip(self._others, flags, strict=True) if flag]

    def _now(self) -> list[Tensor]:
        return [buffer for _, _, buffer in held_buffers(self._model)]


class ServerBuffers:
    """The server's buffers."""

    def __init__(self, model: nn.Module) -> None:
        held = held_buffers(model)
        self._model, self._moments = model, running_moments(model, held)
        self._now = [buffer.detach().clone() for _, _, buffer in held]
        self._of_norms = [place for each in self._moments for place in each.places]
        self._others = [place for place in range(len(held)) if place not in set(self._of_norms)]
        self._changed = [False] * len(self._others)
        self._samples = 0
        self._sums: list[Tensor] = []
        self._values: dict[int, tuple[Tensor, int]] = {}

    def row(self) -> Tensor:
        """Returns the buffers that change, for a worker."""
        places = self._of_norms + [
            place for place, flag in zip(self._others, self._changed, strict=True) if flag
        ]
        return torch.cat([torch.tensor(self._changed, dtype=WIDE), *(_flat(self._now[at]) for at in places)])

    def add(self, row: Tensor, samples: int) -> None:
        """Adds what a worker's range of ``samples`` samples has changed (`WorkerBuffers.row`)."""
        flags = row[: len(self._others)].tolist()
        sizes = [2 + 2 * self._now[each.mean].numel() for each in self._moments]
        changed = [place for place, flag in zip(self._others, flags, strict=True) if flag]
        sizes += [as_real(self._now[place]).numel() for place in changed]
        parts = torch.split(row[len(self._others) :], sizes)
        norms = parts[: len(self._moments)]
        self._sums = [a + b for a, b in zip(self._sums, norms, strict=True)] if self._samples else list(norms)
        self._samples += samples
        for place, value in zip(changed, parts[len(self._moments) :], strict=True):
            whole = self._now[place].is_floating_point() or self._now[place].is_complex()
            before, weight = self._values.get(place, (torch.zeros_like(value), 0))
            self._values[place] = (before + samples * value, weight + samples) if whole else (value, 1)

    @torch.no_grad()
    def merge(self) -> None:
        """Makes the next version of the buffers from what was added."""
        for each, summed in zip(self._moments, self._sums, strict=False):
            before = 0.0 if each.count is None else float(self._now[each.count])
            each.write(self._now, before, summed, self._samples)
        for place, (value, weight) in self._values.items():
            target = as_real(self._now[place])
            target.copy_((value / weight).view_as(target))
            self._changed[self._others.index(place)] = True
        self._samples, self._sums, self._values = 0, [], {}

    @torch.no_grad()
    def give(self) -> None:
        """Gives the model the server's buffers."""
        for (_, _, buffer), value in zip(held_buffers(self._model), self._now, strict=True):
            buffer.copy_(value)


def _flat(tensor: Tensor) -> Tensor:
    return as_real(tensor.detach()).flatten().to("cpu", WIDE)


@torch.no_grad()
def read_values(row: Tensor, places: Sequence[int], target: Sequence[Tensor]) -> None:
    """Writes the values at the end of ``row`` to the buffers at ``places``."""
    sizes = [as_real(target[place]).numel() for place in places]
    for place, value in zip(places, torch.split(row[row.numel() - sum(sizes) :], sizes), strict=True):
        target_ = as_real(target[place])
        target_.copy_(value.view_as(target_))
