"""Checks that the ranks of a prepared loop hold the same weights and buffers.

Works like :mod:`evener.training.consistency.replicas` in a run. One checksum of all tensors goes with the row that ends
a batch: after the first update, and later so rarely that it takes no more of the time than there. One goes with each
save, which writes the weights of one rank. Only if it differs, the ranks exchange a checksum of each tensor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from evener.distributed.session import Session
from evener.errors import DivergenceError
from evener.strategies.learner import Learner
from evener.training.consistency.replicas import digests_of, parts_of, steps_between, together

Checksums = tuple[float, float, float]


class LoopReplicas:
    """The replica check of the models as they are now.

    Args:
        steps: The number of updates before them.
    """

    def __init__(self, steps: int = 0) -> None:
        self._batches, self._next, self._last = 0, 1, 0
        self._first_steps = self._last_steps = steps
        """Numbers of updates before the models, and before the last comparison."""
        self._last_time = time.perf_counter()
        self._own: dict[str, float] = {}

    def own_row(self, learner: Learner, steps: int) -> Checksums:
        """Returns this rank's numbers for the end of a batch: checksum, seconds it took, and seconds of a batch.

        Returns zeros if it is not time for a check. ``steps`` is the number of updates so far.
        """
        self._batches += 1
        is_due = self._batches >= self._next or steps > self._first_steps == self._last_steps
        if not is_due or not _are_alike(learner.session):
            return 0.0, 0.0, 0.0
        began = time.perf_counter()
        own = self.checksum(learner)
        now = time.perf_counter()
        usual = (began - self._last_time) / (self._batches - self._last)
        self._last_time = now
        return own, now - began, usual

    def checksum(self, learner: Learner) -> float:
        """Returns this rank's checksum for :meth:`compare`. Returns 0 if there is nothing to compare."""
        if not _are_alike(learner.session):
            return 0.0
        # An evaluation may read its batches in that mode, in which DTensors cannot be read.
        with torch.inference_mode(False):
            self._own = _held(learner)
        return together(self._own)

    def compare(self, checksums: Sequence[float], session: Session, steps: int) -> None:
        """Compares the checksums of all ranks after ``steps`` updates.

        Raises:
            DivergenceError: On all ranks alike, if they differ.
        """
        if len(set(checksums)) > 1:
            everyone = session.control.gather_objects(self._own)
            raise DivergenceError(_difference(everyone, steps, self._last_steps))
        self._last_steps = steps

    def check(self, rows: Sequence[Sequence[float]], session: Session, steps: int) -> None:
        """Compares the numbers of all ranks.

        Raises:
            DivergenceError: On all ranks alike, if their checksums differ.
        """
        if not any(row[0] for row in rows):
            return
        self.compare([row[0] for row in rows], session, steps)
        self._last = self._batches
        self._next = self._batches + steps_between(max(row[1] for row in rows), min(row[2] for row in rows))


def _are_alike(session: Session) -> bool:
    return session.world_size > 1 and not session.mixed


def _held(learner: Learner) -> dict[str, float]:
    """Returns a checksum of each tensor by name, without buffers that one rank broadcasts at the end of the batch."""
    loose = {buffer.data_ptr() for buffer in learner.loose_buffers.tensors()}
    parts = [part for part in parts_of(learner, False) if not part.axes]
    found = digests_of(
        [part for part in parts if part.numbers.data_ptr() not in loose], learner.session.device
    )
    return found.get((), {})


def _difference(everyone: Sequence[dict[str, float]], steps: int, last: int) -> str:
    names = dict.fromkeys(name for held in everyone for name in held)
    found = [name for name in names if len({held.get(name) for held in everyone}) > 1]
    first, own = found[0], everyone[0].get(found[0])
    others = ", ".join(str(rank) for rank, held in enumerate(everyone) if held.get(first) != own)
    more = f", one of {len(found)} that differ," if len(found) > 1 else ""
    return (
        f"after {steps} updates {first}{more} is not on rank {others} what it is on rank 0, and must be the same on "
        f"all; ranks were last seen equal after {last}. What can do it: a weight that is written on one rank alone, an "
        "update by hand with a gradient of a rank's own samples, as of a loss that evener.prepare did not get; random "
        "numbers that are not the same on all ranks; memory or a device at fault"
    )
