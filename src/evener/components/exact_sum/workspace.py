"""Memory in which gradients are looked at and rounded, used again for every block.

What is the same in each step for tensors that are added together is found once, by their names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from evener.hardware.async_read import is_late
from evener.hardware.memory import made_as
from evener.hardware.memory.counters import BUCKETS
from evener.torch_internals.optimizers import largest

_AT_ONCE = 2**16
"""So many elements are rounded together on a CPU: half of what the cache of a core holds."""
_MOST_KNOWN = 64
"""So many lists of names are kept with what is the same for them in each step."""


class Workspace:
    """Memory for the gradients of a block.

    Args:
        like: The tensors that gradients are summed for, by name, all on ``device``.
    """

    def __init__(self, like: Mapping[str, Tensor], device: torch.device) -> None:
        self._like, self._device = like, device
        self.free()

    def free(self) -> None:
        """Frees memory. It is allocated again when it is needed."""
        self._memory = torch.empty(0, dtype=torch.float64, device=self._device)
        self._groups: dict[tuple[str, ...], _SumGroup] = {}

    def largest(self, names: Iterable[str], gradients: Sequence[Tensor]) -> list[float]:
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

    def rounds(self, names: Iterable[str]) -> Sequence[slice]:
        """Returns which of these tensors are rounded together: on a CPU, those that stay in the cache of a core."""
        return self._group(names).rounds

    def scratch(self, names: Iterable[str]) -> Sequence[Tensor]:
        """Returns a float64 tensor for each gradient, the same memory in each round."""
        group = self._group(names)
        if not group.scratch:
            if not len(self._memory):
                with made_as(BUCKETS):
                    self._memory = torch.empty(self._most(), dtype=torch.float64, device=self._device)
            for some in group.rounds:
                likes = [self._like[name] for name in group.names[some]]
                sizes = [like.numel() for like in likes]
                parts = self._memory[: sum(sizes)].split_with_sizes(sizes)
                group.scratch += [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]
        return group.scratch

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


def where(
    names: Sequence[str], tensors: Sequence[Tensor], those: Collection[str], inside: bool = True
) -> tuple[list[str], list[Tensor]]:
    """Returns the names that are among ``those``, or not, and their tensors."""
    chosen = [(name in those) == inside for name in names]
    return list(compress(names, chosen)), list(compress(tensors, chosen))


@dataclass
class _SumGroup:
    """What is the same in each step for tensors that are added together."""

    names: Sequence[str]
    rounds: Sequence[slice]
    scratch: list[Tensor] = field(default_factory=list)
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
