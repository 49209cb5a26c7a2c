"""What the ranks share while a prepared loop runs: where they are in the data, and who has how much of it.

Whatever they tell each other carries how many updates they have made, so that none can be ahead of others unseen.
"""

from __future__ import annotations

import gc
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from evener.data.batch import Batch, MicroBatch
from evener.distributed.loop_watch import loop_watch
from evener.distributed.session import Session
from evener.distributed.shm.scoreboard import quickest
from evener.errors import ConfigurationError
from evener.hardware.async_read import Readout
from evener.hardware.timers import stopwatch, waiting
from evener.nn.batch_norm import BatchNorm, normalize_by_batches
from evener.nn.context import Scope
from evener.strategies.buffers import share_buffers
from evener.strategies.learner import Learner
from evener.strategies.timing import Pace
from evener.training.consistency.replicas import digest, together
from evener.training.prepare.batch_tensors import check_at_hand
from evener.training.prepare.gradient_mean import MeanOfRanks
from evener.training.prepare.model_outputs import Outputs
from evener.training.prepare.rank_checks import (
    WAITS,
    check_calls,
    check_marks,
    check_strangers,
    check_updates,
)
from evener.training.prepare.replicas import Replicas
from evener.training.prepare.rng import CommonRandom
from evener.training.step.exchange import Exchange

_WIDTH = 8

OUTSIDE = (
    "{what} outside of a prepared loader's batch, so that nobody knows how many samples the other ranks have: iterate "
    "the loader that evener.prepare returned, or divide a batch that the loop makes itself by evener.batch"
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
    counted: set[int] = field(default_factory=set)
    """Whole numbers that were counted over all ranks."""
    dim: int = 0
    """Along which tensors have the samples."""
    is_crossed: bool = False
    """Whether the loop went through another loader at once, and this rank has other numbers of samples of its batch:
    whose the outputs of a loss were cannot be told."""
    is_left: bool = False
    """Whether the loop was left with it."""
    scope: AbstractContextManager[Scope | None] = field(default_factory=nullcontext)
    """What layers ask meanwhile."""

    @property
    def micro(self) -> MicroBatch:
        """This rank's share."""
        return self.batch.micro_batches[0]

    @property
    def shares(self) -> tuple[int, ...]:
        """How many samples each rank has."""
        return self.batch.shares

    @property
    def samples(self) -> int:
        """How many count on this rank."""
        return self.micro.size

    def differs(self, other: Turn) -> bool:
        """Whether a loss may have taken the samples of one for those of the other."""
        if self.is_counted or other.is_counted:
            return self.samples != other.samples
        return bool(self.samples) != bool(other.samples)


def held_by(learner: Learner, number: int) -> list[nn.Module]:
    """Its models as they are now."""
    return [learner.model] if number == 1 else list(learner.model.children())


MakeLearner = Callable[[list[nn.Module], Session], Learner]


class Place:
    """One preparation: a session, a learner of all its models, and the step at hand.

    Args:
        make: Sets models up on this rank.
        models: As they were given.
    """

    def __init__(
        self, session: Session, make: MakeLearner, models: list[nn.Module], random: CommonRandom
    ) -> None:
        self.session, self.random = session, random
        self._make = make
        learner = make(models, session)
        models = held_by(learner, len(models))
        self._learners = [learner]
        self._held = _layers(models)
        self._models = list(models)
        self._control: Exchange = quickest(session)
        self.pace = Pace(stopwatch(session.device), learner.settings.throttle, session.rank)
        self.mean = MeanOfRanks(learner, models, self.exchange)
        random.told = lambda *numbers: self.exchange("seeding anew", *numbers)
        self.steps = 0
        self._replicas = Replicas()
        self.is_over = False
        self.is_in_pass = False
        """Between ``backward()`` and its return."""
        self.strangers = 0
        """Stands for the gradients with which tensors of no model were updated since the ranks told each other
        something; 0 if none was."""
        self.functions: dict[Any, Any] = {}
        """Losses that were named in passing."""
        self.batches: Any = None
        """Those that the loop makes itself, if it does."""
        self._turns: list[Turn] = []
        self._outputs = Outputs(lambda: bool(self._turns))
        self._watch_outputs()
        self._measured: Turn | None = None

    @property
    def learner(self) -> Learner:
        """Of the models as they are now."""
        return self._learners[-1]

    @property
    def models(self) -> list[nn.Module]:
        """As they were given."""
        return self._models

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def world_size(self) -> int:
        return self.session.world_size

    @property
    def outputs(self) -> list[Tensor]:
        """What models gave since the batch began, where ranks wait for each other in going backward through them."""
        return self._outputs.found

    def turn(self, what: str, of: Any = None) -> Turn:
        """The batch at hand.

        Args:
            of: Tensors that must be of it.

        Raises:
            ConfigurationError: If there is none, or if they are not.
        """
        check_at_hand(of, self._turns, what)
        if not self._turns:
            raise ConfigurationError(OUTSIDE.format(what=what))
        return self._turns[-1]

    def exchange(self, what: str, *values: float) -> list[list[float]]:
        """The values of all ranks, eight at most; what they wait for is ``what``, of :data:`WAITS`. A collective call.

        Raises:
            ConfigurationError: If the ranks wait for different things, which only their numbers would be told of else,
                or have updated weights differently.
        """
        watchdog = self.session.watchdog
        strangers, self.strangers = self.strangers, 0
        own = float(WAITS.index(what)), float(self.steps), float(strangers)
        row = [*own, *values, *[0.0] * (_WIDTH - len(values))]
        with watchdog.explained(), watchdog.phase(what, step=self.steps), waiting():
            rows = self._control.exchange(row).wait()
        check_calls([int(row[0]) for row in rows])
        check_updates([row[1] for row in rows], what)
        check_strangers([row[2] for row in rows])
        return [row[3:] for row in rows]

    def _watch_outputs(self) -> None:
        """Ranks wait for each other in going backward through a BatchNorm, and none may go another way."""
        normalize_by_batches(self.learner.model)
        self.waits_in_backward = any(isinstance(part, BatchNorm) for part in self.learner.model.modules())
        self._outputs.watch(self._models if self.world_size > 1 and self.waits_in_backward else [])

    @contextmanager
    def at(self, turn: Turn) -> Iterator[None]:
        """Around what the loop does with a batch.

        Loops may be nested, as an evaluation within training, or go through two loaders at once. The last batch of a
        loop that was left, as by ``break`` or ``next(iter(loader))``, stays at hand until the next one.
        """
        for left in [each for each in self._turns if each.is_left]:
            self.leave(left)
        self.look_for_changes()
        turn.scope = self.learner.micro_scope(turn.micro, self.steps)
        turn.versions = self.learner.buffer_versions()
        self._turns.append(turn)
        if self._measured is None:
            self._measured = turn
            self.pace.step(self.steps).__enter__()
        turn.scope.__enter__()
        loop_watch().batch(turn.mark)
        try:
            yield
        except GeneratorExit:
            turn.is_left = True
            raise
        except BaseException:
            self.leave(turn)
            raise
        self.leave(turn)

    def leave(self, turn: Turn) -> None:
        """What the loop does with ``turn`` is over, or nobody goes on with it; the second time it changes nothing."""
        if turn not in self._turns:
            return
        later = self._turns[self._turns.index(turn) + 1 :]
        turn.is_crossed = any(turn.differs(other) for other in later)
        self._turns.remove(turn)
        turn.scope.__exit__(None, None, None)
        self.outputs.clear()
        if self._measured is turn:
            self._measured = None
            self.pace.__exit__(None)

    def finish(self, turn: Turn) -> list[float]:
        """The time of each rank's own work with the batch, NaN where it did not train with it. A collective call.

        Raises:
            ConfigurationError: If gradients were left that are of this rank's samples alone, the ranks have come to
                different batches, or a rank had samples of one of two loaders alone.
            DivergenceError: If ranks hold different weights or buffers.
        """
        self.mean.check_all_summed("the end of the batch")
        own = turn.worked.value() or math.nan if turn.worked is not None and turn.samples else math.nan
        changed = self.learner.buffer_versions() != turn.versions
        told = (turn.mark, own, float(changed), float(turn.is_crossed), float(self.learner.graphs.untold))
        held = self._replicas.told(self.learner, self.steps)
        rows = self.exchange("the end of a batch", *told, *held)
        check_marks([row[0] for row in rows])
        crossed = [rank for rank, row in enumerate(rows) if row[3]]
        if crossed:
            raise ConfigurationError(CROSSED.format(rank=crossed[0]))
        self._replicas.check([row[5:] for row in rows], self.session, self.steps)
        if any(row[2] for row in rows):
            share_buffers(self.learner, turn.batch)
        if any(row[4] for row in rows):
            self.learner.graphs.agree(self.session.control.gather_objects)
        return [row[1] for row in rows]

    # The models

    def look_for_changes(self) -> None:
        """Goes on with layers that the loop has put in, with the weights of rank 0. A collective call if there are.

        Raises:
            ConfigurationError: If that is so on some ranks only, or in the middle of a batch with different weights.
        """
        now = _layers(self._models)
        if len(now) == len(self._held) and all(map(operator.is_, now, self._held)):
            return
        rows = self.exchange("layers that were put in or taken out", float(self._weights_now()))
        if self._turns and len({row[0] for row in rows}) > 1:
            raise ConfigurationError(
                "a layer was put into the model in the middle of a batch, and has other weights on each rank: put it "
                "in before the batch, where all get those of rank 0, or before evener.prepare"
            )
        self.renew(self._models)

    def _weights_now(self) -> int:
        """Of all parameters together."""
        found = [digest(p) for model in self._models for p in model.parameters()]
        return int(together({str(n): number.item() for n, number in enumerate(found)}))

    def add(self, models: list[nn.Module], make: MakeLearner) -> None:
        """Goes on with ``models`` too, and with those of earlier calls that the loop still holds. A collective call."""
        self.strangers = 0  # what was done before this call has to do with no batch of it
        self.exchange("evener.prepare")
        self._make = make
        self.renew([*self._still_held(), *models])

    def _still_held(self) -> list[nn.Module]:
        """A cell of a notebook that is run again has let the models go that it made before."""
        references = [weakref.ref(model) for model in self._models]
        if not self._turns:
            self._models, self._held = [], []
            self._outputs.watch([])
            self.outputs.clear()
            self.mean.release()
            while self._learners:
                self._learners.pop().close()
            gc.collect()
        found = [reference() for reference in references]
        alive = self.session.control.gather_objects([model is not None for model in found])
        return [
            model
            for model, flags in zip(found, zip(*alive, strict=True), strict=True)
            if model is not None and all(flags)
        ]

    def renew(self, models: list[nn.Module]) -> None:
        """Goes on with these models. A collective call; what was prepared for a batch at hand stays until the end."""
        with self.random.kept():
            self._learners.append(self._make(models, self.session))
        self._models = held_by(self.learner, len(models))
        self._held = _layers(self._models)
        self.mean.renew(self.learner, self._models)
        self._watch_outputs()

    # Passes and updates

    def took_step(self) -> None:
        """An optimizer has made its update."""
        self.steps += 1
        self.session.watchdog.progress(f"step {self.steps}")

    def comes_to_loss(self, gradient: Tensor | None = None) -> None:
        """A backward pass goes through a prepared loss with ``gradient``, a number, or through rows of all ranks.

        Raises:
            ConfigurationError: If nobody knows what it began with.
        """
        if self.mean.ranks == 1 or self.is_over:
            return
        if not self.is_in_pass:
            raise ConfigurationError(
                "a prepared loss was gone backward through by another function than torch.autograd.backward and grad "
                "as they are after evener.prepare: call loss.backward()"
            )
        if gradient is not None:
            self.mean.incoming += float(gradient)

    def passed(self) -> None:
        """A backward pass is over: gradients are this rank's, and all get their sum, unless that is put off."""
        self.mean.work_is_done(self.pace.work_done)
        for turn in self._turns:
            turn.worked = self.pace.taken()
        with self.summing():
            self.mean()

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Ranks wait for each other's gradients."""
        watchdog = self.session.watchdog
        with watchdog.explained(), watchdog.phase("the sum of gradients", step=self.steps), waiting():
            yield

    @property
    def rows(self) -> set[int]:
        """How many this rank has of the batches at hand."""
        return {len(turn.micro.samples) for turn in self._turns}

    def close(self) -> None:
        """Gives everything back."""
        if not self.is_over:
            self.is_over = True
            self._outputs.watch([])
            for turn in list(self._turns):
                self.leave(turn)
            self.mean.close()
            for learner in reversed(self._learners):
                learner.close()


def _layers(models: Sequence[nn.Module]) -> list[nn.Module | nn.Parameter]:
    """Those of the models, with their parameters."""
    found: list[nn.Module | nn.Parameter] = []
    for model in models:
        found += model.modules()
        found += model.parameters()
    return found
