"""Measures what each block holds, in one step with all blocks checkpointed, and predicts peaks from that.

Such a step has the lowest possible peak. A recomputation allocates exactly what a block without checkpointing would
hold, and a :class:`~evener.hardware.memory.MemoryTracker` counts it::

    counted    forward 0 │ forward 1 │ loss │ again 1, backward 1 │ again 0, backward 0, optimizer
    waiting              0           0 1    0                     none
    nbytes            peak        peak   peak    peak                  peak                            a moment each

If some blocks keep their activations, the predicted peak is a maximum over the moments. Each moment adds the measured
peak and the bytes of those blocks that keep activations and wait for their backward.
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
    """One call of a block in a measured step."""

    name: str
    nbytes: int = 0
    """Bytes that backward needs, without the inputs and outputs of the block; outputs are inputs of other blocks."""


class Counted:
    """Observes the blocks in one step (a ``Watch``) while ``tracker`` counts memory."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._waiting: list[Call] = []
        self._outputs: list[tuple[weakref.ref[UntypedStorage], int]] = []
        self._moments: list[tuple[int, tuple[Call, ...]]] = []
        self.names: set[str] = set()
        """The names of the blocks that were called."""
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
        """Ends a moment: records its peak and the calls that wait for their backward."""
        self._moments.append((self._tracker.peak, tuple(self._waiting)))
        self._tracker.reset_peak()

    def peaks(self, names: Sequence[str]) -> list[int]:
        """Returns predicted peaks in bytes: entry ``n`` is the peak with the first ``n`` of ``names`` checkpointed.

        Args:
            names: Names of blocks in order. All blocks that were called must be among them.
        """
        rows = []
        for nbytes, waiting in self._moments:
            held = dict.fromkeys(names, 0)
            for call in waiting:
                held[call.name] += call.nbytes
            rows.append([*accumulate(reversed(held.values()), initial=nbytes)])
        return [max(column) for column in zip(*rows, strict=True)][::-1]


def fewest(peaks: Sequence[int], room: int) -> int:
    """Returns the smallest number of checkpointed blocks with a peak of at most ``room`` bytes; all if none fits."""
    return next((count for count, peak in enumerate(peaks) if peak <= room), len(peaks) - 1)


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    found = found if isinstance(found, tuple | list) else ()
    return [each for each in found if isinstance(each, Tensor)]
