"""Trains a task on this rank, step by step: for a user's own loop, and as the core of ``fit``.

::

    engine = evener.Engine(task, batch_size=64, epochs=3)
    for batch in engine.batches():
        engine.step(batch)
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener import checkpoint
from evener.balance.base import Balancer
from evener.components.build import build_scheduler
from evener.core.config.kwargs import Settings
from evener.core.config.run_config import RunConfig
from evener.core.losses import Loss
from evener.core.observer import Observer, Observers
from evener.core.task.task import TaskLike, resolve
from evener.core.types import Tree
from evener.data.batch import Batch
from evener.distributed.session import Session
from evener.distributed.shm.scoreboard import lent
from evener.errors import ConfigurationError
from evener.strategies.buffers import share_buffers
from evener.strategies.cuda_graphs import notes_of
from evener.training.activation_checkpoint_tuning import Recomputing
from evener.training.batches.feed import BatchFeed
from evener.training.batches.progress import Progress
from evener.training.builtin_tasks import BUILT_IN
from evener.training.consistency.replicas import ReplicaCheck
from evener.training.consistency.startup import agree_on_optimizer
from evener.training.evaluation import InputsOnly, examine_both, predict, record_of
from evener.training.factory import learner_of
from evener.training.profiling import StepProfiler
from evener.training.state.run_state import RunState
from evener.training.step.exchange import way_to_tell
from evener.training.step.manual_step import ManualBatch, ManualStep
from evener.training.step.nonfinite import NonFinitePolicy
from evener.training.step.step import RankTimes, Step
from evener.training.step.step_sync import StepSync


class Engine:
    """Trains a task, one global batch at a time, on the ranks of a session.

    Args:
        task: What to train: a `Task`, a function that builds one, or its name.
        config: The settings; ``settings`` change single ones, as in ``Engine(task, batch_size=97)``.
        session: The session of ranks. If None, the engine opens one and closes it.
        observers: Told of steps, evaluations and changes of shares.

    Raises:
        ConfigurationError: If settings cannot work together, or the ranks do not train the same.
    """

    def __init__(
        self,
        task: TaskLike,
        config: RunConfig | None = None,
        *,
        session: Session | None = None,
        observers: Sequence[Observer] = (),
        **settings: Unpack[Settings],
    ) -> None:
        self.task = task = resolve(task, BUILT_IN)()
        self.config = config = (config or RunConfig()).replace(**settings)
        with ExitStack() as undo:
            self.session = session or undo.enter_context(
                Session(device=self.config.device, timeout_seconds=self.config.timeout_seconds)
            )
            self.batch_size = self.config.batch_size or task.batch_size
            self.epochs = self.config.epochs or (10**9 if self.config.steps else task.epochs)
            self.learner = learner = learner_of(task, self.config, self.session)
            undo.callback(learner.close)
            self.observers = Observers(list(observers), self.session.rank)
            self.scheduler = build_scheduler(task, learner.optimizer)
            agree_on_optimizer(learner.optimizer, self.scheduler, learner.names, self.session)
            self._by_step = task.scheduler_interval == "step"
            learner.stepper.scheduler = self.scheduler if self._by_step else None
            self.guard = NonFinitePolicy(self.config.non_finite, learner, self.observers)
            control, exact = undo.enter_context(lent(self.session)), learner.settings.bits is not None
            telling = undo.enter_context(
                way_to_tell(self.session, learner.mesh, control, lambda: self.feed, exact)
            )
            told = self._observe, self.guard.waits, learner.graphs, telling, self.session.mixed, exact
            self.step_sync = StepSync(control, learner.mesh, self.session.device, lambda: self.loss, *told)
            self.recomputing = Recomputing(learner, self.observers.event)
            self._by_hand = ManualStep(learner, control, self.config.non_finite)
            self._replicas = ReplicaCheck(learner, control, self.config, self.observers.event)
            self.feed = BatchFeed(learner, config, self.batch_size, self.epochs, self.step_sync.steps_late)
            self.state = RunState(learner, self.feed, self.scheduler, self.config, self.observers)
            undo.callback(self.state.saver.close)
            self.skips = self.feed.skips
            about = {"task": task.name, "strategy": learner.name, "batch_size": self.batch_size}
            self.profiler = StepProfiler(self.config.profile, self.config.run_dir, self.session, about)
            undo.callback(self.profiler.close)
            self._owned = undo.pop_all()
        self.times = RankTimes()
        self._at_hand = ManualBatch(self.learner, self._by_hand.work_timer)
        self._is_by_hand = True  # whether the user's own loop took the last step itself
        self._current: Batch | None = None
        self._upcoming: Batch | None = None

    @property
    def model(self) -> nn.Module:
        """The model on this rank's device."""
        return self.learner.model

    @cached_property
    def loss(self) -> Loss:
        """The task's loss as a sum of terms.

        Raises:
            LossError: If the number of its terms cannot be known from the targets.
        """
        return self.task.exact_loss()

    @property
    def progress(self) -> Progress:
        """Training progress: epoch, position in the epoch, steps and samples."""
        return self.state.progress

    @property
    def steps_done(self) -> int:
        """Number of steps taken, including those of a run that this one resumed from."""
        return self.progress.steps

    @property
    def samples_done(self) -> int:
        """Number of samples trained on, including those of a run that this one resumed from."""
        return self.progress.samples

    # Batches

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole run. None if the dataset has no known length."""
        return self.feed.total_steps

    @property
    def balancer(self) -> Balancer | None:
        """The balancer that divides the batches. None before the first batch."""
        return self.feed.balancer

    def batches(self) -> Generator[Batch]:
        """Yields this rank's part of each remaining global batch of the run, in order."""
        with self.feed.open(self.progress) as loader:
            batch = self._next(loader)
            while batch is not None and not self._reached_last_step():
                taken = self.steps_done
                self.profiler.begin(taken)
                upcoming = None if taken + 1 == self.feed.last_step else self._next(loader)
                self._upcoming, self._current = upcoming, batch
                with self._at_hand.around(batch, taken, self._is_by_hand or bool(self.config.throttle)):
                    yield batch
                self._current, self._is_by_hand = None, self.steps_done == taken
                if self._is_by_hand:  # the user's own loop took the step itself
                    self._took_by_hand(batch)
                batch = upcoming
            self.step_sync.finish()
            self.learner.graphs.agree(self.session.control.gather_objects)
            self.tell()
            self._replicas.check(self.steps_done, everything=True)

    def _reached_last_step(self) -> bool:
        return self.observers.ended or self.steps_done >= (self.feed.last_step or math.inf)

    def _next(self, source: Iterator[Batch]) -> Batch | None:
        batch = self.feed.next(source, self.steps_done)
        self.times.input += self.feed.input_seconds
        return batch

    # The step

    def step(self, batch: Batch) -> Step:
        """Runs forward, backward, gradient synchronization and update for one global batch.

        Raises:
            DivergenceError: If the loss or a gradient of a rank is not finite; names the step and the rank. On a CPU,
                the rank that finds it keeps the weights from before the step.
            RankError, RankTimeoutError: If another rank is gone or late.
        """
        began, learner, sync, number = time.perf_counter(), self.learner, self.step_sync, self.steps_done
        watchdog, recomputing = self.session.watchdog, self.recomputing.step(batch, number)
        with watchdog.phase("training", step=number, explains=True), recomputing:
            step = Step(batch, number, sync.settle, learner.names_in_order)
            next_count = sync.count(self._upcoming)
            outcome = learner.run(batch, partial(sync.divisor, step, learner.loss_scale), number)
            elapsed = learner.stepper.elapsed(learner.work_timer.elapsed())
            self.times.input += outcome.input_seconds
            forget = sync.post(step, outcome, self._upcoming, next_count, elapsed, self.feed.input_seconds)
            if sync.buffers_changed:  # before the update: if a rank dies in it, no other waits for buffers
                share_buffers(learner, batch)
            learner.update(forget, number, partial(self.guard.passes, step))
        step.lr = float(learner.optimizer.param_groups[0]["lr"])
        self._advance(step.batch)
        step.seconds = time.perf_counter() - began
        self.tell()
        return step

    def settle(self) -> None:
        """Waits until it is known that all steps so far went well.

        Raises:
            DivergenceError: If the loss or a gradient of a rank was not finite.
        """
        self.step_sync.check()

    def _observe(self, step: Step) -> None:
        """Records the times of a step, once all ranks know them."""
        self.feed.observe_step(step)
        self.times.compute += step.own_seconds.compute
        self.times.wait += step.own_seconds.wait
        self.times.forward += step.own_seconds.forward

    def _advance(self, batch: Batch) -> None:
        if not self.learner.left_out:
            self.learner.average.updated()
        (progress := self.progress).advance(batch)
        of = f" of {self.total_steps}" if self.total_steps else ""
        self.session.watchdog.progress(f"step {progress.steps}{of}, epoch {batch.epoch + 1}")
        if self.scheduler and (not self.learner.stepper.updates if self._by_step else batch.last):
            self.scheduler.step()
        self._replicas.after(progress.steps, self.settle)

    def tell(self) -> None:
        """Tells the observers of finished steps whose results are known and of new events, each once."""
        for step in self.step_sync.told():
            if self.observers.are_some:
                self.observers.step(step.record())
        for event in (*self.feed.new_events(), *notes_of(self.learner, self.steps_done)):
            self.observers.event(event)

    # The user's own loop

    def backward(self, total: Tensor, count: float | Tensor) -> float:
        """Back-propagates ``total`` divided by the count of all ranks. :meth:`update` sums the gradients of the ranks.

        Args:
            total: Sum of the loss's terms over this rank's samples, one number.
            count: Number of these terms.

        Returns:
            The mean over the terms of all ranks.

        Raises:
            ConfigurationError: If the current batch is cut into micro-batches.
            DivergenceError: If the total of a rank is not finite.
        """
        return self._by_hand.backward(total, count, self._current, self.steps_done)

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Sums the gradients of the optimizer's parameters over the ranks, clips them, steps, and clears them.

        Args:
            optimizer: A user's optimizer. If None, the task's: its update also applies the penalty and ends the step.
        """
        self._by_hand.update(optimizer, self.steps_done)

    def _took_by_hand(self, batch: Batch) -> None:
        """Ends a step that the user's own loop took: the ranks exchange only their times."""
        self._by_hand.check_meets()
        self.settle()
        own, sync = self._by_hand.over(batch, self._at_hand.is_timed), self.step_sync
        self.feed.observe_times(sync.tell_times(Step(batch, self.steps_done, sync.settle), own))
        self.times.compute += 0.0 if math.isnan(own) else own
        self._advance(batch)

    # Evaluation

    def evaluate(self, dataset: Dataset[Any] | None = None) -> dict[str, float]:
        """Returns the task's loss and metrics over a dataset, each sample counted once; the same on every rank.

        Args:
            dataset: Pairs ``(inputs, targets)``. If None, the task's ``evaluate``; observers are told of its result.

        Raises:
            ConfigurationError: If there is no dataset.
        """
        if (chosen := self.task.evaluate if dataset is None else dataset) is None:
            raise ConfigurationError(
                "there is nothing to evaluate on: give a dataset, or a Task with `evaluate=`"
            )
        self.step_sync.finish()
        self.tell()
        began = time.perf_counter()
        with self.session.watchdog.phase("evaluation", step=self.steps_done):
            found = examine_both(self.learner, chosen, self.feed.evaluation_options(self.steps_done))
        if dataset is None:
            self.observers.evaluation(record_of(found, self.progress, time.perf_counter() - began))
        return found.metrics

    def predict(
        self, dataset: Dataset[Any], *, targets: bool = True, everywhere: bool = False
    ) -> Tree | None:
        """Returns the model's outputs for every sample, in dataset order, on the CPU of rank 0. Other ranks get None.

        Args:
            dataset: Pairs ``(inputs, targets)``; the targets are not used.
            targets: False if the items are the inputs alone.
            everywhere: If True, every rank gets the outputs.
        """
        self.settle()
        chosen = dataset if targets else InputsOnly(dataset)
        return predict(self.learner, chosen, self.feed.evaluation_options(self.steps_done), everywhere)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Returns all that is needed to resume from here on any number of ranks: whole tensors, copied to the CPU.

        All ranks must call this together, and each gets the whole model. :meth:`save` needs no memory for that.
        """
        self.settle()
        return self.state.whole()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from the result of :meth:`state_dict`, without changing it.

        Raises:
            ConfigurationError: If the state is from another model or optimizer, or the order of samples would differ.
        """
        self.state.load_state(state)

    def save(self, directory: Path, *, keep: int = 2, wait: bool = True) -> Path:
        """Writes a checkpoint into ``directory`` and returns the checkpoint's directory. Each rank writes its own part.

        All ranks must call this together. A checkpoint is written atomically; the file ``latest`` then names it.

        Args:
            keep: Number of latest checkpoints to keep, 1 or more, besides the one that ``best`` names.
            wait: If False, returns as soon as the data are copied, which needs CPU memory for this rank's part. The
                next save, :meth:`finish_saving` and :meth:`load` wait for the end.

        Raises:
            DivergenceError: If weights are not finite, or ranks hold different ones; these are never saved.
            CheckpointError: If it, or the one before it, could not be written; on all ranks.
        """
        self.settle()
        self.tell()  # so that the records of a run resumed from here lack no step
        self._replicas.check(self.steps_done, again=False)
        return self.state.save(directory, checkpoint.Keep(keep), wait)

    def finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, if there is one. All ranks must call this together.

        Raises:
            CheckpointError: If it could not be written; on all ranks.
        """
        self.state.saver.finish()

    def load(self, path: Path, tell: Callable[[str], object] = warnings.warn) -> None:
        """Resumes from a checkpoint, or the latest one of a run directory. Each rank reads its own part.

        All ranks must call this together. In a directory, a damaged checkpoint is skipped for the one before it.

        Args:
            tell: Called on rank 0 with messages about skipped checkpoints and about settings that have changed.

        Raises:
            ConfigurationError: If there is no checkpoint, or as in :meth:`load_state_dict`.
            DataError: If no checkpoint can be read.
        """
        self._at_hand.close()
        self.step_sync.forget()
        self.state.load(path, tell)

    def give_up(self) -> None:
        """Abandons the current step because other ranks are gone. Everything else stays as it is."""
        self._at_hand.close()

    def close(self) -> None:
        """Releases processes and memory of the strategy and, if the engine opened it, of the session."""
        self._at_hand.close()
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.tell()
        self.close()
