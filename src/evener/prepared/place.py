"""What the ranks share while a prepared loop runs: where they are in the data, and who has how much of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from torch import nn

from evener.data.batch import Batch, MicroBatch
from evener.errors import ConfigurationError
from evener.hardware.readout import Readout
from evener.hardware.stopwatch import stopwatch, waiting
from evener.nn.scope import Scope
from evener.prepared.random import CommonRandom
from evener.prepared.summing import MeanOfRanks
from evener.runtime.board import quickest
from evener.runtime.session import Session
from evener.strategies.learner import Learner
from evener.strategies.own_samples import share_buffers
from evener.strategies.pace import Pace
from evener.telling import Exchange

WAITS = ("the loss", "the sum of gradients", "the end of a batch", "evener.gather", "a barrier")
"""What the ranks tell each other something for."""
_WIDTH = 4

OUTSIDE = (
    "{what} outside of a prepared loader's batch, so that nobody knows how many samples the other ranks have: iterate "
    "the loader that evener.prepare returned"
)
CROSSED = (
    "two prepared loaders were gone through at once, and rank {rank} had other numbers of samples of their batches, so "
    "that whose a loss was of cannot be told: give both the same batch size and drop_last=True, with balance='equal' "
    "and a sample for each rank, or read both with one loader"
)


@dataclass(eq=False)
class Turn:
    """A batch at hand."""

    batch: Batch
    """This rank's share, and what all ranks know of the whole; without the samples themselves."""
    mark: float
    """Tells the batch from others: the same number on all ranks that have the same samples before them."""
    worked: Readout | None = None
    """Seconds of this rank's own work when the last backward pass with it was over; None before there was one."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    is_counted: bool = False
    """Whether a mean was taken over as many terms as the rank has samples."""
    is_crossed: bool = False
    """Whether the loop went through another loader at once, and this rank has other numbers of samples of its batch:
    whose the outputs of a loss were cannot be told."""
    scope: AbstractContextManager[Scope | None] = field(default_factory=nullcontext)
    """What layers ask meanwhile."""

    @property
    def micro(self) -> MicroBatch:
        """This rank's share."""
        return self.batch.micro_batches[0]

    @property
    def samples(self) -> int:
        """How many count on this rank."""
        return self.micro.size

    def differs(self, other: Turn) -> bool:
        """Whether a loss may have taken the samples of one for those of the other."""
        if self.is_counted or other.is_counted:
            return self.samples != other.samples
        return bool(self.samples) != bool(other.samples)


class Place:
    """One preparation: a session, a learner of all its models, and the step at hand.

    Args:
        models: As they were given.
    """

    def __init__(
        self, session: Session, learner: Learner, models: list[nn.Module], random: CommonRandom
    ) -> None:
        self.session, self.learner, self.random = session, learner, random
        self._control: Exchange = quickest(session)
        self.pace = Pace(stopwatch(session.device), learner.settings.throttle, session.rank)
        self.mean = MeanOfRanks(learner, models, self.exchange)
        self.steps = 0
        self.is_over = False
        self._turns: list[Turn] = []
        self._measured: Turn | None = None
        self._is_ending = False

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def world_size(self) -> int:
        return self.session.world_size

    def turn(self, what: str) -> Turn:
        """The batch at hand.

        Raises:
            ConfigurationError: If there is none.
        """
        if not self._turns:
            raise ConfigurationError(OUTSIDE.format(what=what))
        return self._turns[-1]

    def exchange(self, what: str, *values: float) -> list[list[float]]:
        """The values of all ranks, four at most; what they wait for is ``what``, of :data:`WAITS`. A collective call.

        Raises:
            ConfigurationError: If the ranks wait for different things, which only their numbers would be told of else.
        """
        watchdog = self.session.watchdog
        row = [float(WAITS.index(what)), *values, *[0.0] * (_WIDTH - len(values))]
        with watchdog.explained(), watchdog.phase(what, step=self.steps), waiting():
            rows = self._control.exchange(row).wait()
        check_calls([int(row[0]) for row in rows])
        return [row[1:] for row in rows]

    @contextmanager
    def at(self, turn: Turn) -> Iterator[None]:
        """Around what the loop does with a batch.

        Loops may be nested, as an evaluation within training, or go through two loaders at once.
        """
        turn.scope = self.learner.micro_scope(turn.micro, self.steps)
        turn.versions = self.learner.buffer_versions()
        self._turns.append(turn)
        self._is_ending = False
        if self._measured is None:
            self._measured = turn
            self.pace.step(self.steps).__enter__()
        turn.scope.__enter__()
        try:
            yield
        finally:
            self.leave(turn)

    def leave(self, turn: Turn) -> None:
        """What the loop does with ``turn`` is over, or nobody goes on with it; the second time it changes nothing."""
        if turn not in self._turns:
            return
        later = self._turns[self._turns.index(turn) + 1 :]
        turn.is_crossed = any(turn.differs(other) for other in later)
        self._turns.remove(turn)
        turn.scope.__exit__(None, None, None)
        if self._measured is turn:
            self._measured = None
            self.pace.__exit__(None)

    def finish(self, turn: Turn) -> list[float]:
        """The time of each rank's own work with the batch, NaN where it did not train with it. A collective call.

        Raises:
            ConfigurationError: If gradients were left that are of this rank's samples alone, the ranks have come to
                different batches, or a rank had samples of one of two loaders alone.
        """
        self.mean.check_all_summed("the end of the batch")
        own = turn.worked.value() or math.nan if turn.worked is not None and turn.samples else math.nan
        changed = self.learner.buffer_versions() != turn.versions
        rows = self.exchange("the end of a batch", turn.mark, own, float(changed), float(turn.is_crossed))
        check_marks([row[0] for row in rows])
        crossed = [rank for rank, row in enumerate(rows) if row[3]]
        if crossed:
            raise ConfigurationError(CROSSED.format(rank=crossed[0]))
        if any(row[2] for row in rows):
            share_buffers(self.learner, turn.batch)
        return [row[1] for row in rows]

    def took_step(self) -> None:
        """An optimizer has made its update."""
        self.steps += 1
        self.session.watchdog.progress(f"step {self.steps}")

    def comes_to_an_end(self, at_the_end: Callable[[Callable[[], None]], None]) -> None:
        """A backward pass goes through a loss; ``at_the_end`` has a function called when it is over."""
        if not self._is_ending:
            self._is_ending = True
            at_the_end(self._backward_is_over)

    def _backward_is_over(self) -> None:
        """Gradients are this rank's; all get their mean, unless that is put off."""
        self._is_ending = False
        self.mean.work_is_done(self.pace.work_done)
        for turn in self._turns:
            turn.worked = self.pace.taken()
        watchdog = self.session.watchdog
        with watchdog.explained(), watchdog.phase("the sum of gradients", step=self.steps), waiting():
            self.mean()

    def close(self) -> None:
        """Gives everything back."""
        if not self.is_over:
            self.is_over = True
            for turn in list(self._turns):
                self.leave(turn)
            self.mean.close()
            self.learner.close()


def check_calls(calls: list[int]) -> None:
    """Raises:
    ConfigurationError: If they are not the same on all ranks.
    """
    if len(set(calls)) > 1:
        told = ", ".join(f"rank {rank} in {WAITS[call]}" for rank, call in enumerate(calls))
        raise ConfigurationError(
            f"the ranks are at different places of the loop: {told}. The loss, evener.gather and backward are for all "
            "ranks together: what is done on one rank alone, as under evener.is_main(), must have none of them"
        )


def check_marks(marks: list[float]) -> None:
    """Raises:
    ConfigurationError: If the ranks have different batches before them.
    """
    if len(set(marks)) > 1:
        ranks = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        raise ConfigurationError(
            f"the ranks have different batches before them: {_listed(ranks)} another one than rank 0. They must go "
            "through the same loaders in the same order, none may leave a loop alone, and what shuffles must be seeded "
            "alike: use torch's default generator, or one with the same seed on all ranks"
        )


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
