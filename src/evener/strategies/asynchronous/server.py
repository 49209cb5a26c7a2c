"""The parameter server: holds the weights of a section, and merges gradients into them.

It lives on rank 0, whose own worker calls it as the others do, through threads that serve them
(:mod:`evener.strategies.asynchronous.links`). With several servers it still decides for all what merges when, and the
others follow (:mod:`evener.strategies.asynchronous.server_log`)::

    trade:   gradients of a range ─▶ ledger ─▶ added ─▶ buffer full: optimizer, schedule ─▶ next version
             next range and weights ◀── ledger ◀────────────────────────────────────────────────┘

Gradients are added in the order in which they come, which the records keep. Whoever adds the same gradients in the same
order gets the same bits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evener.errors import RankTimeoutError
from evener.hardware.profile_ranges import named_range
from evener.strategies.asynchronous.buffers import ServerBuffers
from evener.strategies.asynchronous.ledger import (
    Begun,
    Contribution,
    Lease,
    Ledger,
    Merges,
    Over,
    Revoked,
    Terms,
)
from evener.strategies.asynchronous.server_log import ServerLog
from evener.strategies.asynchronous.weight_shard import WeightShard
from evener.strategies.learner import Learner

_POLL_SECONDS = 0.05
"""How often a waiting worker looks whether a range is late."""


@dataclass(frozen=True)
class Pushed:
    """The gradients of a range."""

    number: int
    """The number of the lease."""
    terms: float
    """The number of the loss's terms."""
    total: float
    """The sum of the terms. Not finite if a gradient is not."""
    row: Tensor
    """For each parameter 1 if it has a gradient, else 0; then what buffers have changed."""
    gradients: list[Tensor]
    """Flat gradients of the sum of terms."""


@dataclass(frozen=True)
class Reply:
    """The answer to a worker.

    The section is over if there is no lease, unless ``revoked``: then the worker asks again.
    """

    revoked: bool = False
    lease: Lease | None = None
    row: Tensor | None = None
    """The buffers that change."""
    weights: list[Tensor] | None = None


@dataclass(frozen=True)
class SectionOutcome:
    """What has merged in a section, whether it is over or was interrupted."""

    merges: Merges = ()
    terms: float = 0.0
    """The number of the loss's terms in the merges."""
    total: float = 0.0
    """Their sum."""
    wasted: int = 0
    """The number of samples whose gradients were computed and did not merge."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Each worker's seconds for a sample."""
    size: int = 0
    """The number of samples of the section."""
    is_whole: bool = False
    """True if all samples have merged."""


class ParameterServer:
    """Holds weights, buffers and the ledger of a section. Its methods may be called from several threads.

    Args:
        shard: The weights that this rank holds.
        parameters: The number of trained parameters.
        scale: The number by which workers have divided their sums of terms.
        others: Tells the servers that hold other weights what to do. None if there are none.
    """

    def __init__(
        self,
        learner: Learner,
        shard: WeightShard,
        parameters: int,
        terms: Terms,
        scale: float,
        others: ServerLog | None,
    ) -> None:
        self._learner, self._terms, self._scale = learner, terms, scale
        self._shard, self._others = shard, others
        self._has_gradient = torch.zeros(parameters, dtype=torch.float64)
        self._weighted = self._of_merge = self._total = 0.0  # terms of the next merge, and their sum
        self._all_terms = self._all_total = 0.0
        self._before, self._step = SectionOutcome(), 0
        self._changed = threading.Condition()
        self._ledger = Ledger(0, terms, [])
        self._versions: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._buffers = ServerBuffers(learner.model)
        self._loss = learner.task.exact_loss()
        self._scheduled = 0
        self._stopped = False
        self.error: Exception | None = None
        """An error in an update, which the rank of the server raises at the end of the section."""

    # A section

    def open(self, ledger: Ledger, step: int, before: SectionOutcome) -> None:
        """Begins a section with the weights that the model has now, or goes on with one that was interrupted.

        Args:
            ledger: The ledger of the section.
            step: The number of the engine's step.
            before: What has merged of the section before.
        """
        self._shard.open()
        self._buffers = ServerBuffers(self._learner.model)
        self._ledger = ledger
        self._before, self._step, self._scheduled = before, step, 0
        self._all_terms, self._all_total = before.terms, before.total
        self._clear()
        self._versions.clear()
        self._keep_version()
        self._stopped, self.error = False, None

    def close(self) -> SectionOutcome:
        """Ends the section: the model gets the server's weights and buffers. May be called more than once."""
        with self._changed:  # after an update that a thread is in
            self._shard.close()
            self._buffers.give()
        ledger = self._ledger
        return SectionOutcome(
            merges=ledger.merges,
            terms=self._all_terms,
            total=self._all_total,
            wasted=self._before.wasted + ledger.wasted,
            seconds=ledger.speeds,
            size=ledger.size,
            is_whole=ledger.is_over,
        )

    # Calls of workers

    def trade(self, worker: int, pushed: Pushed | None, begin: int | None) -> Reply:
        """Takes gradients, and returns what to compute next. Waits until there is something.

        Args:
            begin: The lease that the worker has read. None to lease a range now.

        Raises:
            RankTimeoutError: If another worker holds the last samples for longer than the time limit.
        """
        limit = time.monotonic() + self._learner.session.timeout_seconds
        with self._changed:
            if pushed is not None:
                self._take(worker, pushed)
            while True:
                answer = self._ledger.begin(worker, begin, time.monotonic())
                if self._stopped or isinstance(answer, Over):
                    return Reply()
                if isinstance(answer, Revoked):
                    return Reply(revoked=True)
                if isinstance(answer, Begun):
                    row, weights = self._versions.get(answer.version) or self._version()
                    if self._others is not None:
                        self._others.give(worker)
                    return Reply(lease=answer.lease, row=row, weights=weights)
                if time.monotonic() > limit:
                    raise RankTimeoutError(f"rank {worker} waits for samples that {self._ledger.holders()}")
                self._changed.wait(_POLL_SECONDS)

    def draw(self, worker: int) -> Lease | None:
        """Leases a range that the worker reads ahead. None if there is none."""
        with self._changed:
            return None if self._stopped else self._ledger.draw(worker)

    def lose(self, worker: int) -> None:
        """Takes back what a worker that is gone has leased."""
        with self._changed:
            self._ledger.lose(worker)
            self._changed.notify_all()

    def shorten(self) -> bool:
        """Ends the section as soon as what was begun has merged (`Ledger.shorten`). Returns False if nothing was."""
        with self._changed:
            is_shorter = self._ledger.shorten()
            self._merge_what_is_due()
            return is_shorter

    def stop(self) -> None:
        """Ends the section before all samples have merged."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # Merging

    @torch.no_grad()
    def _take(self, worker: int, pushed: Pushed) -> None:
        """Adds gradients to those of the next merge, if they count."""
        added = self._ledger.push(pushed.number, time.monotonic())
        weight = 0.0 if added is None else (1 + self._ledger.version - added.version) ** -self._terms.damping
        if self._others is not None:
            self._others.add(worker, weight)
        if added is None:
            return
        self._shard.add(pushed.gradients, weight)
        number = len(self._has_gradient)
        self._has_gradient += pushed.row[:number]
        self._buffers.add(pushed.row[number:], added.size)
        self._weighted += weight * pushed.terms
        self._of_merge += pushed.terms
        self._total += pushed.total
        if not math.isfinite(pushed.total):
            self._stopped = True  # its rank names the parameter at the end of the section
        self._merge_what_is_due()

    def _merge_what_is_due(self) -> None:
        try:
            while self._ledger.is_due() and not self._stopped:
                self._merge()
        except Exception as error:  # an error of the task's own optimizer, on whichever thread it came
            self._stopped, self.error = True, error
        self._changed.notify_all()

    def _merge(self) -> None:
        """Makes the next version of the weights."""
        self._ledger.merge()
        factor = self._scale / (self._loss.divisor(self._weighted) or 1.0)
        due = self._batches(self._ledger.merged) - self._batches(sum(map(_size, self._before.merges)))
        schedule, self._scheduled = max(0, due - self._scheduled), max(due, self._scheduled)
        flags = self._has_gradient.tolist()
        with named_range("merge of the parameter server"):
            if self._others is not None:
                self._others.merge(factor, schedule, flags)
            self._shard.merge(self._step, factor, flags[: self._shard.number], schedule)
        self._buffers.merge()
        self._all_terms += self._of_merge
        self._all_total += self._total
        self._clear()
        self._keep_version()

    def _batches(self, merged: int) -> int:
        """Returns the number of batches that the schedule counts for so many samples of the section."""
        size = self._terms.batch_size
        return -(-merged // size) if merged == self._ledger.size else merged // size

    def _version(self) -> tuple[Tensor, list[Tensor]]:
        """Returns copies of the buffers and the weights as they are now."""
        return self._buffers.row(), self._shard.version()

    def _keep_version(self) -> None:
        """Keeps the version of now if ranges begin with it later, and drops those with which none begins any more."""
        version = self._ledger.version
        if self._ledger.needs(version):
            self._versions[version] = self._version()
        for old in [old for old in self._versions if not self._ledger.needs(old)]:
            del self._versions[old]

    def _clear(self) -> None:
        self._has_gradient.zero_()
        self._weighted = self._of_merge = self._total = 0.0


def _size(held: Sequence[Contribution]) -> int:
    return sum(each.size for each in held)
