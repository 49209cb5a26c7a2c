"""What each block holds, seen in one step in which all are computed again, and the peaks that follow from it.

Such a step takes the least memory that there is to have. A repetition makes just what a kept block would hold, and a
:class:`~evener.hardware.memory.MemoryTracker` counts it::

    counted    forward 0 │ forward 1 │ loss │ again 1, backward 1 │ again 0, backward 0, optimizer
    waiting              0           0 1    0                     none
    nbytes            peak        peak   peak    peak                  peak                            a moment each

The peak with some blocks kept is the largest sum, over the moments, of what was held and what the kept blocks hold that
wait then for their backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, UntypedStorage

from evener.hardware.memory import MemoryTracker
from evener.torch_internals.storages import address


@dataclass(eq=False)
class Call:
    """One call of a block in a counted step."""

    name: str
    nbytes: int = 0
    """Held by what backward needs, beyond its inputs, and its outputs, which are others' inputs."""


class Counted:
    """Looks on in a step that ``tracker`` counts."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._waiting: list[Call] = []
        self._outputs: list[tuple[weakref.ref[UntypedStorage], int]] = []
        self._moments: list[tuple[int, tuple[Call, ...]]] = []
        self.names: set[str] = set()
        """Blocks that were called."""
        tracker.reset_peak()

    def called(self, name: str) -> Call:
        self.passed()
        call = Call(name)
        self.names.add(name)
        self._waiting.append(call)
        return call

    @contextmanager
    def again(self, call: Call) -> Iterator[None]:
        self.passed()
        if call in self._waiting:
            self._waiting.remove(call)
        before = self._tracker.held
        yield
        outputs = sum(nbytes for storage, nbytes in self._outputs if storage() is not None)
        call.nbytes = max(0, self._tracker.held - before - outputs)

    def returned(self, call: Call, found: Any) -> None:
        storages = {address(storage): storage for storage in map(Tensor.untyped_storage, _tensors(found))}
        self._outputs = [(weakref.ref(storage), storage.nbytes()) for storage in storages.values()]

    def passed(self) -> None:
        """What was held at most since the last moment is one."""
        self._moments.append((self._tracker.peak, tuple(self._waiting)))
        self._tracker.reset_peak()

    def peaks(self, names: Sequence[str]) -> list[int]:
        """The peaks in bytes with the first 0, 1, 2, ..., and all of ``names`` computed again, and the others kept.

        Args:
            names: All that were called, and maybe more.
        """
        rows = []
        for nbytes, waiting in self._moments:
            held = dict.fromkeys(names, 0)
            for call in waiting:
                held[call.name] += call.nbytes
            rows.append([*accumulate(reversed(held.values()), initial=nbytes)])
        return [max(column) for column in zip(*rows, strict=True)][::-1]


def fewest(peaks: Sequence[int], room: int) -> int:
    """The smallest number of blocks that, computed again, make a peak of at most ``room`` bytes; all if none does."""
    return next((count for count, peak in enumerate(peaks) if peak <= room), len(peaks) - 1)


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    found = found if isinstance(found, tuple | list) else ()
    return [each for each in found if isinstance(each, Tensor)]
