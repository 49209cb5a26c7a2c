"""A task in training on this rank: what a loop of the user's own needs, and what ``fit`` is made of.

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
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener import checkpoint
from evener.balance.base import Balancer
from evener.checkpoint.weights_file import filler
from evener.components.build import build_scheduler
from evener.core.config.kwargs import Settings
from evener.core.config.run_config import RunConfig
from evener.core.losses import Loss
from evener.core.observer import Observer, Observers
from evener.core.records import EvaluationRecord
from evener.core.task.task import TaskLike, resolve
from evener.core.types import Tree
from evener.data.batch import Batch
from evener.distributed.session import Session
from evener.distributed.shm.scoreboard import lent
from evener.errors import ConfigurationError
from evener.strategies.base import set_up
from evener.strategies.buffers import share_buffers
from evener.strategies.learner import Learner
from evener.training.activation_checkpoint_tuning import Recomputing
from evener.training.batches.feed import Feed
from evener.training.batches.progress import Progress
from evener.training.builtin_tasks import BUILT_IN
from evener.training.consistency.replicas import Replicas
from evener.training.consistency.startup import agree_on_optimizer, agreement
from evener.training.evaluation import InputsOnly, evaluate, predict
from evener.training.factory import settings_of, strategy_of
from evener.training.state.run_state import RunState
from evener.training.step.exchange import way_to_tell
from evener.training.step.manual_step import AtHand, ByHand
from evener.training.step.nonfinite import Guard
from evener.training.step.step import RankTimes, Step
from evener.training.step.step_sync import Ledger


class Engine:
    """Trains a task, one global batch at a time, on the ranks of a session.

    Args:
        task: What to train: a `Task`, a function that builds one, or its name.
        config: The settings; ``settings`` change single ones, as in ``Engine(task, batch_size=97)``.
        session: The ranks; None opens one, which the engine then closes.
        observers: Told of steps, evaluations and changes of shares.

    Raises:
        ConfigurationError: For settings that cannot work together, and for ranks that do not train the same.
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
        self.config = (config or RunConfig()).replace(**settings)
        with ExitStack() as undo:
            self.session = session or undo.enter_context(
                Session(device=self.config.device, timeout_seconds=self.config.timeout_seconds)
            )
            self.batch_size = self.config.batch_size or task.batch_size
            self.epochs = self.config.epochs or (10**9 if self.config.steps else task.epochs)
            self.learner = self._learner()
            undo.callback(self.learner.close)
            self.observers = Observers(list(observers), self.session.rank)
            self.scheduler = build_scheduler(task, self.learner.optimizer)
            agree_on_optimizer(self.learner.optimizer, self.scheduler, self.learner.names, self.session)
            self.guard = Guard(self.config.non_finite, self.learner, self.observers)
            control, mesh = undo.enter_context(lent(self.session)), self.learner.mesh
            telling = undo.enter_context(way_to_tell(self.session, mesh, control, lambda: self.feed))
            told = self._observe, self.guard.waits, self.learner.graphs, telling, self.session.mixed
            self.ledger = Ledger(control, mesh, self.session.device, lambda: self.loss, *told)
            self.recomputing = Recomputing(self.learner, self.observers.event)
            self._by_hand = ByHand(self.learner, control, self.config.non_finite)
            self._replicas = Replicas(self.learner, control, self.config, self.observers.event)
            self.feed = Feed(self.learner, self.config, self.batch_size, self.epochs, self.ledger.steps_late)
            self.state = RunState(self.learner, self.feed, self.scheduler, self.config, self.observers)
            undo.callback(self.state.saver.close)
            self.skips = self.feed.skips
            self._owned = undo.pop_all()
        self.times = RankTimes()
        self._at_hand = AtHand(self.learner, self._by_hand.pace)
        self._current: Batch | None = None
        self._upcoming: Batch | None = None

    def _learner(self) -> Learner:
        """All ranks make theirs together, after they have found that they are about to train the same."""
        session = self.session
        strategy = strategy_of(self.config, session.world_size)
        settings = settings_of(self.config, strategy, session.world_size)
        agree, fill = agreement(self.task, self.config, session), filler(self.config)
        return set_up(strategy, self.task, session, settings, agree, fill)

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
        """Where the run stands in its data."""
        return self.state.progress

    @property
    def steps_done(self) -> int:
        """Steps that were taken, those of a run that this one goes on from among them."""
        return self.progress.steps

    @property
    def samples_done(self) -> int:
        """Samples that were trained on, likewise."""
        return self.progress.samples

    # Batches

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if the dataset does not tell its length."""
        return self.feed.total_steps

    @property
    def balancer(self) -> Balancer | None:
        """What divides the batches; None before the first."""
        return self.feed.balancer

    def batches(self) -> Generator[Batch]:
        """This rank's part of every global batch that is left of the run, in order."""
        with self.feed.open(self.progress) as loader:
            batch = self._next(loader)
            while batch is not None and not self._reached_last_step():
                upcoming = None if self.steps_done + 1 == self.config.steps else self._next(loader)
                self._upcoming, self._current = upcoming, batch
                taken = self.steps_done
                with self._at_hand.of(batch, taken):
                    yield batch
                self._current = None
                if self.steps_done == taken:  # a loop of the user's own, which took the step itself
                    self._took_by_hand(batch)
                batch = upcoming
            self.ledger.finish()
            self.learner.graphs.agree(self.session.control.gather_objects)
            self.tell()
            self._replicas.check(self.steps_done, everything=True)

    def _reached_last_step(self) -> bool:
        return self.observers.ended or self.steps_done >= (self.config.steps or math.inf)

    def _next(self, source: Iterator[Batch]) -> Batch | None:
        batch = self.feed.next(source, self.steps_done)
        self.times.input += self.feed.input_seconds
        return batch

    # The step

    def step(self, batch: Batch) -> Step:
        """Forward, backward, exchange and update for one global batch.

        Raises:
            DivergenceError: If the loss or a gradient of a rank is not finite; names the step and the rank. On a CPU
                the weights of the rank that finds it are those before the step.
            RankError, RankTimeoutError: If another rank is gone or late.
        """
        began, learner, ledger = time.perf_counter(), self.learner, self.ledger
        number, watchdog = self.steps_done, self.session.watchdog
        recomputing = self.recomputing.step(batch, number)
        with watchdog.explained(), watchdog.phase("training", step=number), recomputing:
            step = Step(batch, number, ledger.settle, learner.names_in_order)
            next_count = ledger.count(self._upcoming)
            outcome = learner.run(batch, lambda: ledger.divisor(step), number)
            elapsed = learner.pace.elapsed()
            forget = ledger.post(step, outcome, self._upcoming, next_count, elapsed, self.feed.input_seconds)
            learner.update(forget, number, lambda: self.guard.passes(step))
            if ledger.buffers_changed:
                share_buffers(learner, batch)
        step.lr = float(learner.optimizer.param_groups[0]["lr"])
        self._advance(batch)
        step.seconds = time.perf_counter() - began
        self.tell()
        return step

    def settle(self) -> None:
        """Waits until it is known that all steps so far went well.

        Raises:
            DivergenceError: If the loss or a gradient of a rank was not finite.
        """
        self.ledger.check()

    def _observe(self, step: Step) -> None:
        """All ranks know the times of the step."""
        self.feed.observe_step(step)
        self.times.compute += step.own_seconds.compute
        self.times.wait += step.own_seconds.wait

    def _advance(self, batch: Batch) -> None:
        self.progress.advance(batch)
        of = f" of {self.total_steps}" if self.total_steps else ""
        self.session.watchdog.progress(f"step {self.steps_done}{of}, epoch {batch.epoch + 1}")
        if self.scheduler is not None and (batch.last or self.task.scheduler_interval == "step"):
            self.scheduler.step()
        self._replicas.after(self.steps_done, self.settle)

    def tell(self) -> None:
        """Tells the observers what they have not been told yet of steps that are over and known."""
        for step in self.ledger.told():
            if self.observers.are_some:
                self.observers.step(step.record())
        for event in self.feed.new_events():
            self.observers.event(event)

    # A loop of the user's own

    def backward(self, total: Tensor, count: float | Tensor) -> float:
        """Back-propagates ``total`` over the count of all ranks; the ranks' gradients add up in :meth:`update`.

        Args:
            total: Sum of the loss's terms over this rank's samples, one number.
            count: Number of these terms.

        Returns:
            The mean over the terms of all ranks.

        Raises:
            ConfigurationError: If the batch at hand is cut into micro-batches.
            DivergenceError: If the total of a rank is not finite.
        """
        return self._by_hand.backward(total, count, self._current, self.steps_done)

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Sums the gradients of the optimizer's parameters over the ranks, clips, steps and clears them.

        Args:
            optimizer: One of your own; None is the task's, whose update also takes in the task's penalty and
                ends the step.
        """
        self._by_hand.update(optimizer, self.steps_done)

    def _took_by_hand(self, batch: Batch) -> None:
        """The step of a loop of the user's own is over: every rank tells its time, and nothing else."""
        self.settle()
        own = self._by_hand.over(batch)
        self.feed.observe_times(self.ledger.tell_times(Step(batch, self.steps_done, self.ledger.settle), own))
        self.times.compute += 0.0 if math.isnan(own) else own
        self._advance(batch)

    # Evaluation

    def evaluate(self, dataset: Dataset[Any] | None = None) -> dict[str, float]:
        """The task's loss and metrics over a dataset, each sample counted once; the same on every rank.

        Args:
            dataset: Pairs ``(inputs, targets)``; None is the task's ``evaluate``, of which observers are told.

        Raises:
            ConfigurationError: If there is none.
        """
        chosen = self.task.evaluate if dataset is None else dataset
        if chosen is None:
            raise ConfigurationError(
                "there is nothing to evaluate on: give a dataset, or a Task with `evaluate=`"
            )
        self.ledger.finish()
        self.tell()
        began = time.perf_counter()
        with self.session.watchdog.phase("evaluation", step=self.steps_done):
            metrics, samples = evaluate(self.learner, chosen, self.feed.evaluation_options(self.steps_done))
        if dataset is None:
            seconds = time.perf_counter() - began
            epoch = max(0, self.progress.epoch - (self.progress.position == 0))
            self.observers.evaluation(EvaluationRecord(self.steps_done, epoch, metrics, samples, seconds))
        return metrics

    def predict(
        self, dataset: Dataset[Any], *, targets: bool = True, everywhere: bool = False
    ) -> Tree | None:
        """The model's outputs for every sample, in the order of the dataset, on the CPU of rank 0; None on others.

        Args:
            dataset: Pairs ``(inputs, targets)``, of which the targets are not used.
            targets: False if the items are the inputs alone.
            everywhere: Gives the outputs to every rank.
        """
        self.settle()
        chosen = dataset if targets else InputsOnly(dataset)
        return predict(self.learner, chosen, self.feed.evaluation_options(self.steps_done), everywhere)

    # State

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, on any number of ranks: whole, on the CPU, in copies.

        All ranks call it, and each gets the whole model; :meth:`save` needs no room for that.
        """
        self.settle()
        return self.state.whole()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave, which stays the caller's own.

        Raises:
            ConfigurationError: If it is of another model or optimizer, or the order of samples would be another one.
        """
        self.state.take(state)

    def save(self, directory: Path, *, keep: int = 2, wait: bool = True) -> Path:
        """Writes a checkpoint into ``directory``, every rank what it alone holds; returns the checkpoint's directory.

        All ranks call it. A checkpoint is whole or not there, and named by the file ``latest`` when it is whole.

        Args:
            keep: So many of the last checkpoints stay, and the one that ``best`` names.
            wait: False goes on as soon as what is to be written has been copied, which needs room on the CPU for what
                this rank writes. The next save, :meth:`finish_saving` and :meth:`load` wait for the end.

        Raises:
            DivergenceError: If weights are not finite, which are never saved.
            CheckpointError: If it could not be written, or the one before it could not; on all ranks.
        """
        self.settle()
        self.tell()  # a run that goes on from here lacks no step in its records
        return self.state.save(directory, checkpoint.Keep(keep), wait)

    def finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, if there is one. All ranks call it.

        Raises:
            CheckpointError: If it could not be written; on all ranks.
        """
        self.state.saver.finish()

    def load(self, path: Path, tell: Callable[[str], object] = warnings.warn) -> None:
        """Goes on from the checkpoint of a run directory, or the one that is named; each rank reads what it holds.

        All ranks call it. Of a directory of checkpoints one that is damaged is passed over for the one before it.

        Args:
            tell: Gets the words about a checkpoint that was passed over, and about what is not as it was; on rank 0.

        Raises:
            ConfigurationError: If there is none, or as :meth:`load_state_dict`.
            DataError: If none can be read.
        """
        self._at_hand.close()
        self.ledger.forget()
        self.state.load(path, tell)

    def give_up(self) -> None:
        """Leaves the step at hand, and everything else as it is: other ranks are gone."""
        self._at_hand.close()

    def close(self) -> None:
        """Gives back the strategy's and, where the engine opened it, the session's processes and memory."""
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
