"""The state that the ranks share while a prepared loop runs: the current batch, and each rank's share of it.

Every exchange between the ranks carries their number of updates, so that a rank that is ahead is detected.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from evener.balance.base import Balancer
from evener.core.config.run_config import RunConfig
from evener.distributed.loop_watch import loop_watch
from evener.distributed.mesh import DataAxis
from evener.distributed.session import Session
from evener.distributed.shm.scoreboard import quickest
from evener.errors import ConfigurationError
from evener.hardware.timers import stopwatch, waiting
from evener.nn.batch_norm import BatchNorm, normalize_by_batches
from evener.strategies.buffers import share_buffers
from evener.strategies.learner import Learner
from evener.strategies.timing import WorkTimer
from evener.torch_internals.modules import own_modules, own_parameters
from evener.training.consistency.replicas import digest, together
from evener.training.factory import balancer_called
from evener.training.prepare.batch_tensors import check_at_hand
from evener.training.prepare.current_batch import CurrentBatch
from evener.training.prepare.first_calls import FirstCalls
from evener.training.prepare.gradient_mean import MeanOfRanks
from evener.training.prepare.late_checks import LateChecks
from evener.training.prepare.learner_of_loop import LearnerOfLoop
from evener.training.prepare.loop_division import LoopDivision
from evener.training.prepare.model_outputs import Outputs
from evener.training.prepare.printed import PrintedTexts
from evener.training.prepare.rank_checks import WAITS, check_crossed, check_exchange, check_marks
from evener.training.prepare.replicas import LoopReplicas
from evener.training.prepare.rng import CommonRandom
from evener.training.prepare.terms_of_means import TermsOfMeans
from evener.training.step.exchange import Exchange

_WIDTH = 8
OUTSIDE = (
    "{what} outside of a prepared loader's batch, so that nobody knows how many samples the other ranks have: iterate "
    "the loader that evener.prepare returned, or divide a batch that the loop makes itself by evener.batch"
)


def held_by(learner: Learner, number: int) -> list[nn.Module]:
    """Returns the learner's models as they are now."""
    return [learner.model] if number == 1 else list(learner.model.children())


class LoopState:
    """One preparation: a session, a learner of all its models, and the current batches.

    Args:
        make: Sets models up on this rank.
        models: The models as the user gave them.
    """

    def __init__(
        self, session: Session, make: LearnerOfLoop, models: list[nn.Module], random: CommonRandom
    ) -> None:
        self.session, self.random, self.make = session, random, make
        self.division = LoopDivision(self._meeting, lambda: self.is_in_pass, lambda: self.learner)
        learner = self.division.set_up(make, models, session)
        models = held_by(learner, len(models))
        self._learners = [learner]
        self._held, self._models = self._layers(models), list(models)
        self._control: Exchange = quickest(session)
        self.work_timer = WorkTimer(stopwatch(session.device), learner.settings.throttle, session.rank)
        self.later = LateChecks(session, lambda: self.steps)
        self.mean = MeanOfRanks(learner, models, self.exchange, self.later)
        random.exchange = lambda *numbers: self.exchange("seeding anew", *numbers)
        self.steps, self.printed = 0, PrintedTexts()
        self.replicas, self.terms = LoopReplicas(), TermsOfMeans(self.exchange)
        self.is_over, self.function = False, ""  # the name of the loss that is computing, if one is
        # The calls of evener.gather, and whether a rank had no samples of a batch.
        self.gathered, self.had_placeholders = 0, False
        self.is_in_pass = False
        """True while ``backward()`` is running."""
        self.strangers = 0
        """Checksum of updates of tensors in no model, and of learning rates, since the last exchange; 0 for none."""
        self.functions: dict[Any, Any] = {}
        """Prepared losses made for functions that were given to ``global_mean``."""
        self.batches: Any = None
        """The batches that the loop makes itself, or None."""
        self._current: list[CurrentBatch] = []
        self._measured: CurrentBatch | None = None
        self._first_calls = FirstCalls(lambda: self.learner, self._current, random.kept)
        self._outputs = Outputs(lambda: bool(self._current))
        self._watch_models()

    @property
    def learner(self) -> Learner:
        """The learner of the models as they are now."""
        return self._learners[-1]

    @property
    def models(self) -> list[nn.Module]:
        """The models that the loop trains."""
        return self._models

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def world_size(self) -> int:
        return self.session.world_size

    @property
    def data(self) -> DataAxis:
        """Which ranks compute which part of a batch."""
        return self.learner.data

    def balancer(self, config: RunConfig, ahead: int) -> Balancer:
        """Returns the balancer of a loader.

        Args:
            ahead: The number of batches that may be drawn before the times of the first are known.
        """
        divides = self.data.degree > 1 or self.world_size == 1  # else weights are of the parts of the model
        name = config.balance or "equal" if divides else "equal"
        return balancer_called(name, config, self.data.degree, ahead)

    @property
    def outputs(self) -> list[Tensor]:
        """Outputs of the models since the batch began, if ranks wait for each other in the backward pass."""
        return self._outputs.found

    def cut(self, made: Any, batch: CurrentBatch) -> Any:
        """Returns this rank's part of what the loop computes with, where a strategy divides samples."""
        piece = self.learner.cut.of_loop(made, batch.micro)
        batch.batch.micro_batches[0] = replace(piece, inputs=None)
        return piece.inputs

    def current_batch(self, what: str, of: Any = None) -> CurrentBatch:
        """Returns the current batch.

        Args:
            of: Tensors that must belong to it.

        Raises:
            ConfigurationError: If there is none, or they do not.
        """
        if of is not None:
            check_at_hand(of, self._current, what)
        if not self._current:
            raise ConfigurationError(OUTSIDE.format(what=what))
        return self._current[-1]

    def exchange(self, what: str, *values: float) -> list[list[float]]:
        """Returns the values of all ranks, eight at most. ``what`` says why, from :data:`WAITS`. A collective call.

        Raises:
            ConfigurationError: If ranks call this for different reasons, or have updated weights differently.
        """
        strangers, self.strangers = self.strangers, 0
        own = WAITS.index(what), self.steps, strangers, self.printed.checksum
        row = [*map(float, own), *values, *[0.0] * (_WIDTH - len(values))]
        with self.session.watchdog.phase(what, step=self.steps, explains=True), waiting():
            rows = self._control.exchange(row).wait()
        check_exchange(rows, what)
        self.printed.compare([row[3] for row in rows], self.session.control.gather_objects, self.rank)
        return [row[4:] for row in rows]

    def _watch_models(self) -> None:
        """Tries first calls. Collects outputs if a BatchNorm makes ranks wait for each other in the backward pass."""
        self._first_calls.watch(self._models)
        normalize_by_batches(self.learner.model)
        self.waits_in_backward = any(isinstance(part, BatchNorm) for part in self.learner.model.modules())
        self._outputs.watch(self._models if self.world_size > 1 and self.waits_in_backward else [])

    @contextmanager
    def at(self, batch: CurrentBatch, mark: Callable[[], float] | None = None) -> Iterator[None]:
        """Context in which the loop computes with a batch.

        Contexts may be nested, for an evaluation in training or two loaders at once. The last batch of a loop that was
        left, by ``break`` or ``next(iter(loader))``, stays current until the next one. ``mark`` is for the watch.
        """
        for left in [each for each in self._current if each.is_left]:
            self.leave(left)
        self.look_for_changes()
        batch.scope = self.learner.micro_scope(batch.micro, self.steps)
        batch.versions = self.learner.loose_buffers.versions()
        self._current.append(batch)
        self.had_placeholders |= 0 in batch.shares
        if self._measured is None:
            self._measured = batch
            self.work_timer.step(self.steps).__enter__()
        batch.scope.__enter__()
        loop_watch().batch(mark or (lambda: batch.mark))
        try:
            yield
        except GeneratorExit:
            batch.is_left = True
            raise
        except BaseException:
            self.leave(batch)
            raise
        self.leave(batch)

    def leave(self, batch: CurrentBatch) -> None:
        """Ends the computations with ``batch``. A second call has no effect."""
        if batch not in self._current:
            return
        later = self._current[self._current.index(batch) + 1 :]
        batch.is_crossed = any(batch.differs(other) for other in later)
        self._current.remove(batch)
        batch.scope.__exit__(None, None, None)
        self.learner.synchronizer.free_gathered()
        self.outputs.clear()
        if self._measured is batch:
            self._measured = None
            self.work_timer.__exit__(None)

    def finish(self, batch: CurrentBatch, timed: CurrentBatch | None) -> list[float]:
        """Ends a batch. Returns the seconds of own work with each part of ``timed``; NaN if nobody trained with it. All
        ranks must call this together.

        Raises:
            ConfigurationError: If gradients of this rank's samples alone are left, the ranks have different batches, or
                a rank had samples in only one of two loaders.
            DivergenceError: If ranks hold different weights or buffers, or a number of an earlier step is not finite.
        """
        self.mean.check_all_summed("the end of the batch")
        worked = timed.worked if timed is not None and timed.samples else None
        own = math.nan if worked is None else worked.value() or math.nan
        changed = self.learner.loose_buffers.versions() != batch.versions
        flags = float(changed), float(batch.is_crossed), float(self.learner.graphs.untold)
        held = self.replicas.own_row(self.learner, self.steps)
        rows = self.exchange("the end of a batch", batch.agreed, own, *flags, *held)
        check_marks([row[0] for row in rows])
        check_crossed([rank for rank, row in enumerate(rows) if row[3]])
        self.replicas.check([row[5:] for row in rows], self.session, self.steps)
        if any(row[2] for row in rows):
            share_buffers(self.learner, batch.batch)
        if any(row[4] for row in rows):
            self.learner.graphs.agree(self.session.control.gather_objects)
        self.later.end_batch()
        return self.data.slowest([row[1] for row in rows])

    # The models

    @contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        """Context for what all ranks do together, but no loss of a batch."""
        self.exchange(what)
        with self.session.watchdog.phase(what, explains=True), waiting():
            yield

    def look_for_changes(self) -> None:
        """Takes over layers that the loop has put in, with the weights of rank 0. A collective call if there are any.

        Raises:
            ConfigurationError: If only some ranks have any, or they come in mid-batch with weights that differ.
        """
        self.division.end_failed_step()
        if all([*map(id, self._parts_of(module))] == [*map(id, held)] for module, held in self._held):
            return
        self.division.check_may_change(self.make.strategy)
        rows = self.exchange("layers that were put in or taken out", float(self._weights_now()))
        if self._current and len({row[0] for row in rows}) > 1:
            raise ConfigurationError(
                "a layer was put into the model in the middle of a batch, and has other weights on each rank: put it "
                "in before the batch, where all get those of rank 0, or before evener.prepare"
            )
        self.renew(self._models)

    def _layers(self, models: Sequence[nn.Module]) -> list[tuple[nn.Module, Sequence[object]]]:
        """Returns all modules of the models, each with what it holds itself."""
        return [(module, self._parts_of(module)) for model in models for module in model.modules()]

    def _parts_of(self, module: nn.Module) -> Sequence[object]:
        """Returns what a module holds itself; of a divided model, which is whole at times, the modules alone."""
        modules = own_modules(module).values()
        return [*modules] if self.division.divides_model else [*modules, *own_parameters(module).values()]

    def _weights_now(self) -> int:
        """Returns a checksum of all parameters."""
        found = [digest(p) for model in self._models for p in model.parameters()]
        return int(together({str(n): number.item() for n, number in enumerate(found)}))

    def add(self, models: list[nn.Module], make: LearnerOfLoop) -> None:
        """Adds ``models`` to those of earlier calls that the loop still holds. A collective call."""
        self.strangers = 0  # updates before this call belong to no prepared batch
        self.exchange("evener.prepare")
        self.make = make
        self.renew([*self._still_held(), *models])

    def _still_held(self) -> list[nn.Module]:
        """Returns the models still in use. A notebook cell that runs again has dropped the models it made before."""
        references = [weakref.ref(model) for model in self._models]
        if not self._current:
            self._release_models()
        found = [reference() for reference in references]
        alive = self.session.control.gather_objects([model is not None for model in found])
        return [
            model
            for model, flags in zip(found, zip(*alive, strict=True), strict=True)
            if model is not None and all(flags)
        ]

    def _release_models(self) -> None:
        """Drops the models, so that those that the loop has dropped are freed."""
        self._models, self._held = [], []
        self._outputs.watch([])
        self.outputs.clear()
        self.mean.release()
        while self._learners:
            self._learners.pop().close()
        gc.collect()

    def renew(self, models: list[nn.Module]) -> None:
        """Sets up these models. A collective call. What was set up for a current batch is kept until the end."""
        with self.random.kept():
            self._learners.append(self.division.set_up(self.make, models, self.session))
        self._models = held_by(self.learner, len(models))
        self._held = self._layers(self._models)
        self.mean.renew(self.learner, self._models)
        self.replicas = LoopReplicas(self.steps)
        self._watch_models()

    # Passes and updates

    def took_step(self) -> None:
        """Counts an update that an optimizer has made."""
        self.steps += 1
        self.session.watchdog.progress(f"step {self.steps}")

    def comes_to_loss(self, gradient: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Called when a pass reaches a prepared loss, with its ``gradient``, or gathered rows, with that of ``rows``.

        Raises:
            ConfigurationError: If the pass was started by a function that does not report it.
        """
        if self.world_size == 1 or self.is_over:
            return
        if not self.is_in_pass:
            raise ConfigurationError(
                "a prepared loss was gone backward through by another function than torch.autograd.backward and grad "
                "as they are after evener.prepare: call loss.backward()"
            )
        if gradient is not None:
            self.mean.roots.came(gradient)
        if rows is not None:
            self.mean.roots.came_to_rows(rows)

    def passed(self) -> None:
        """Ends a backward pass: sums the gradients over the ranks, unless ``no_sync`` delays that."""
        self.mean.work_is_done(self.work_timer.work_done)
        for batch in self._current:
            batch.worked = self.work_timer.taken()
        with self.summing():
            self.mean()

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Context in which ranks wait for each other's gradients."""
        with self.session.watchdog.phase("the sum of gradients", step=self.steps, explains=True), waiting():
            yield

    @property
    def sequence(self) -> Any:
        """How the sequences of the current batch are divided over ranks; None if they are not."""
        return self._current[-1].micro.sequence if self._current else None

    @property
    def rows(self) -> set[int]:
        """Numbers of rows that this rank has of the current batches."""
        return {len(batch.micro.samples) for batch in self._current}

    def close(self) -> None:
        """Releases everything. Prepared loaders and losses that the loop still holds keep this, but no model."""
        if not self.is_over:
            self.is_over = True
            for batch in list(self._current):
                self.leave(batch)
            self.mean.shown.hide()
            for each in (self.mean, self.division, self._first_calls):
                each.close()
            self._release_models()

    def check_in_use(self, what: str) -> None:
        """Raises ConfigurationError if a later call of ``evener.prepare`` has ended this preparation."""
        if self.is_over:
            raise ConfigurationError(
                f"this {what} belongs to an earlier call of evener.prepare, which a later one with models has ended: "
                "use the one that the last call returned"
            )
