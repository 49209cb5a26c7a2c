"""One step and its bookkeeping: what a loop of the user's own needs, and what ``fit`` is made of.

::

    engine = evener.Engine(task, batch_size=64, epochs=3)
    for batch in engine.batches():
        engine.step(batch)

Each step the ranks tell each other one short row of numbers (:class:`~evener.step.Signal`): posted right after
backward, read after the next forward pass, so that its travel costs no time. Only a rank that has to know before it
updates its weights, because its loss is not finite or some parameter got no gradient, waits for the row at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener.assembly import balancer_of, settings_of
from evener.balance.base import Balancer
from evener.collectives.board import quickest
from evener.config import RunConfig
from evener.data.batch import Batch
from evener.data.loader import Loader
from evener.errors import ConfigurationError, DivergenceError
from evener.evaluation import EvaluationOptions, InputsOnly, evaluate, predict
from evener.hardware.readout import Readout, read
from evener.hardware.stopwatch import stopwatch, waiting
from evener.loss import Loss
from evener.runtime.channel import Pending
from evener.runtime.heard import heard
from evener.runtime.session import Session
from evener.step import RankTimes, Signal, Step, check_finite, not_finite
from evener.strategies.base import StepOutcome, build_scheduler, micro_scope
from evener.strategies.pace import Pace
from evener.strategies.reading import Reading
from evener.strategies.registry import strategy_class
from evener.task import Task
from evener.types import Tree


class Engine:
    """Trains a task, one global batch at a time, on the ranks of a session.

    Args:
        task: What to train.
        config: The settings; ``settings`` change single ones, as in ``Engine(task, batch_size=97)``.
        session: The ranks; None opens one, which the engine then closes.
        on_step: Called with each :class:`Step` once its loss is known, on every rank.

    Raises:
        ConfigurationError: For settings that cannot work together.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig | None = None,
        *,
        session: Session | None = None,
        on_step: Callable[[Step], None] | None = None,
        **settings: Any,
    ) -> None:
        self.task = task
        self.config = (config or RunConfig()).replace(**settings)
        self._owns_session = session is None
        self.session = (
            session
            or Session(device=self.config.device, timeout_seconds=self.config.timeout_seconds).__enter__()
        )
        with ExitStack() as undo:
            if self._owns_session:
                undo.push(self.session)
            self.batch_size = self.config.batch_size or task.batch_size
            self.epochs = self.config.epochs or (10**9 if self.config.steps else task.epochs)
            self.steps_done = 0
            self.samples_done = 0
            self.times = RankTimes()
            self._epoch, self._position = 0, 0
            self._on_step = on_step
            self._counts: dict[tuple[int, int], float] = {}
            self._in_flight: tuple[Step, Batch | None, Pending] | None = None
            self._heard = False
            self._share_buffers = False
            self._current: Batch | None = None
            self._upcoming: Batch | None = None
            make_strategy = strategy_class(self.config.strategy, self.session.world_size)
            self.strategy = make_strategy(
                task, self.session, settings_of(self.config, self.session.world_size)
            )
            self._control = heard(quickest(self.session), self.strategy.data_ranks, self.session.world_size)
            self._reading = Reading.of(self.strategy, task.train, "training set")
            self.scheduler = build_scheduler(task, self.strategy.optimizer)
            self._loader: Loader | None = None
            self.balancer: Balancer | None = None
            self._balancer_state: dict[str, Any] = {}
            self._first_step = 0
            self._input_seconds = 0.0
            self._pace = Pace(
                stopwatch(self.session.device), self.strategy.settings.throttle, self.session.rank
            )
            undo.pop_all()

    @property
    def model(self) -> nn.Module:
        """The model on this rank's device."""
        return self.strategy.model

    @property
    def loss(self) -> Loss:
        """The task's loss as a sum of terms.

        Raises:
            LossError: If the number of its terms cannot be known from the targets.
        """
        if not hasattr(self, "_loss"):
            self._loss = self.task.exact_loss()
        return self._loss

    @property
    def epochs_done(self) -> int:
        """Passes over the training data that are complete, those of a run that this one goes on from among them."""
        return self._epoch

    # Batches

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if the dataset does not tell its length."""
        per_epoch = self._steps_per_epoch()
        if per_epoch is None:
            return self.config.steps
        steps = per_epoch * self.epochs
        return min(steps, self.config.steps) if self.config.steps else steps

    def _steps_per_epoch(self) -> int | None:
        size = self._reading.size
        return None if size is None else math.ceil(size / self.batch_size)

    def batches(self) -> Iterator[Batch]:
        """This rank's part of every global batch that is left of the run, in order."""
        with self._open_loader() as loader:
            source = iter(loader)
            batch = self._next(source)
            while batch is not None and not self._reached_last_step():
                upcoming = None if self.steps_done + 1 == self.config.steps else self._next(source)
                self._upcoming = upcoming
                self._current = batch
                taken = self.steps_done
                with (
                    self._pace.step(taken),
                    micro_scope(batch.micro_batches[0], taken, self.strategy.settings),
                ):
                    yield batch
                self._current = None
                if self.steps_done == taken:  # a loop of the user's own, which took the step itself
                    self._took_by_hand(batch)
                batch = upcoming
            self.settle()

    def _reached_last_step(self) -> bool:
        return self.config.steps is not None and self.steps_done >= self.config.steps

    def _next(self, source: Iterator[Batch]) -> Batch | None:
        began = time.perf_counter()
        with self.session.watchdog.phase("loading a batch", step=self.steps_done):
            batch = next(source, None)
            batch = batch and self.strategy.place(batch)
        self._input_seconds = time.perf_counter() - began
        self.times.input += self._input_seconds
        return batch

    def _open_loader(self) -> Loader:
        if self._loader is not None:
            raise ConfigurationError("batches() is running already; one engine makes one pass over the run")
        self._loader = self._reading.loader(
            self._reading.shuffled(self.config.seed),
            seed=self.config.seed,
            batch_size=self.batch_size,
            shares=self._shares,
            micro_batch=self.config.micro_batch,
            collate=self.task.collate,
            workers=self.config.workers,
            device=self.session.device,
            epochs=self.epochs,
            start=(self._epoch, self._position),
            first_step=self.steps_done,
        )
        # Besides what the loader draws ahead, a batch is looked at one step early and a step is known one step late.
        self.balancer = balancer_of(self.config, self._reading, self._loader.lookahead + 2)
        if self._balancer_state:
            self.balancer.load_state_dict(self._balancer_state)
        return self._loader

    def _shares(self, step: int, size: int) -> list[int]:
        assert self.balancer is not None
        return self.balancer.shares(step, size)

    # The step

    def step(self, batch: Batch) -> Step:
        """Forward, backward, exchange and update for one global batch.

        Raises:
            DivergenceError: If the loss of a rank is not finite; names the step and the rank. The weights of the rank
                that finds it are those before the step.
            RankError, RankTimeoutError: If another rank is gone or late.
        """
        began, times = time.perf_counter(), self.times
        with self.session.watchdog.explained(), self.session.watchdog.phase("training", step=self.steps_done):
            step = Step(batch, self.steps_done, self.settle)
            next_count = self._count(self._upcoming)
            outcome = self.strategy.backward(batch, lambda: self._divisor(step), self.steps_done)
            wait = max(0.0, time.perf_counter() - began - outcome.compute_seconds)
            forget = self._tell(step, outcome, next_count, wait)
            self.strategy.update(forget)
            step.penalty = self.strategy.penalty
            if self._share_buffers:
                self.strategy.share_buffers(self.strategy.data_ranks[_first_with_samples(batch)])
        step.lr = float(self.strategy.optimizer.param_groups[0]["lr"])
        self._advance(batch)
        step.seconds = time.perf_counter() - began
        times.compute += outcome.compute_seconds
        times.wait += wait
        return step

    def _divisor(self, step: Step) -> float:
        """What the sum of all terms is divided by, which all ranks must know before any goes backward."""
        self.settle()
        place = (step.batch.epoch, step.batch.index)
        if place not in self._counts:
            with waiting():
                rows = self._control.exchange([_sum(self._count(step.batch))]).wait()
            self._counts = {place: sum(row[0] for row in rows)}
        step.count = self.loss.divisor(self._counts[place])
        return step.count or 1.0

    def _count(self, batch: Batch | None) -> list[Readout]:
        """Terms in each of this rank's micro-batches of the batch."""
        micros = batch.micro_batches if batch else []
        return [read(self.loss.count(micro.targets)) for micro in micros if micro.weight]

    def _tell(
        self, step: Step, outcome: StepOutcome, next_count: list[Readout], wait_seconds: float
    ) -> Iterable[str]:
        """Posts this rank's signal; returns the parameters that have no gradient on any rank."""
        signal = Signal(
            total=outcome.total,
            next_count=_sum(next_count),
            missing=outcome.missing_code,
            buffers_changed=float(outcome.buffers_changed),
            compute_seconds=outcome.compute_seconds,
            wait_seconds=wait_seconds,
            input_seconds=self._input_seconds,
        )
        self._in_flight = (step, self._upcoming, self._control.exchange(signal))
        if not self._heard or outcome.missing or not math.isfinite(outcome.total):
            return self._missing_everywhere(outcome)
        return ()

    def _missing_everywhere(self, outcome: StepOutcome) -> Iterable[str]:
        codes = {signal.missing for signal in self.settle()}
        if 0.0 in codes:
            return ()
        if len(codes) == 1:
            return outcome.missing
        return set.intersection(*map(set, self.session.control.gather_objects(outcome.missing)))

    def settle(self) -> list[Signal]:
        """Waits for what the ranks told about the last step, and acts on it; empty if nothing is outstanding."""
        if self._in_flight is None:
            return []
        (step, upcoming, pending), self._in_flight = self._in_flight, None
        self._heard = True
        with waiting():
            signals = [Signal(*row) for row in pending.wait()]
        step.total = sum(signal.total for signal in signals)
        check_finite(step, signals)
        self._counts = {}
        if upcoming is not None:
            self._counts[upcoming.epoch, upcoming.index] = sum(signal.next_count for signal in signals)
        self._share_buffers |= any(signal.buffers_changed for signal in signals)
        step.compute_seconds = tuple(signal.compute_seconds for signal in signals)
        step.wait_seconds = tuple(signal.wait_seconds for signal in signals)
        step.input_seconds = tuple(signal.input_seconds for signal in signals)
        self._observe(step.number, step.batch, step.compute_seconds)
        if self._on_step is not None:
            self._on_step(step)
        return signals

    def _observe(self, number: int, batch: Batch, seconds: Sequence[float]) -> None:
        """Tells the balancer each rank's time, of ranks that had samples."""
        if self.balancer is not None:
            own = [seconds[rank] for rank in self.strategy.data_ranks]
            known = [time if n else math.nan for n, time in zip(batch.shares, own, strict=True)]
            self.balancer.observe(number, batch.shares, known)

    def _advance(self, batch: Batch) -> None:
        self.steps_done += 1
        self.samples_done += batch.size
        self._epoch, self._position = (
            (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.position + batch.size)
        )
        if self.scheduler is not None and (batch.last or self.task.scheduler_interval == "step"):
            self.scheduler.step()

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
        counts = self._counts_for_something()
        own = [float(total.detach()) if counts else 0.0, float(count) if counts else 0.0]
        with waiting():
            rows = self._control.exchange(own).wait()
        for rank, row in enumerate(rows):
            if not math.isfinite(row[0]):
                raise DivergenceError(not_finite(row[0], self.steps_done, rank))
        sums = [sum(column) for column in zip(*rows, strict=True)]
        (total * (1.0 if counts else 0.0) / (sums[1] or 1.0)).backward()  # type: ignore[no-untyped-call]
        self._pace.work_done()
        return sums[0] / sums[1] if sums[1] else math.nan

    def _took_by_hand(self, batch: Batch) -> None:
        """The step of a loop of the user's own is over: every rank tells its time, and nothing else."""
        self.settle()
        seconds = self._pace.seconds() or math.nan
        rows = self._control.exchange([seconds]).wait()
        self._observe(self.steps_done, batch, [row[0] for row in rows])
        self.times.compute += self._pace.seconds()
        self._advance(batch)

    def _counts_for_something(self) -> bool:
        """Whether the batch at hand is one of samples and not a placeholder."""
        if self._current is None:
            return True
        micros = self._current.micro_batches
        if len(micros) > 1:
            raise ConfigurationError(
                f"backward() takes a whole batch, this one is cut into {len(micros)} micro-batches, whose counts it "
                "cannot know ahead: leave micro_batch unset, or take steps with step()"
            )
        return micros[0].weight > 0

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Sums the gradients of the optimizer's parameters over the ranks, clips, steps and clears them.

        Args:
            optimizer: One of your own; None is the task's, whose update also takes in the task's penalty and
                ends the step.
        """
        chosen = self.strategy.optimizer if optimizer is None else optimizer
        parameters = [p for group in chosen.param_groups for p in group["params"]]
        phase = self.session.watchdog.phase("update", step=self.steps_done)
        with self.session.watchdog.explained(), phase, waiting():
            self.strategy.sum_gradients(parameters)
        if optimizer is None:
            self.strategy.update()
            return
        self.strategy.clip(parameters)
        chosen.step()
        chosen.zero_grad(set_to_none=True)

    # Evaluation

    def evaluate(self, dataset: Dataset[Any] | None = None) -> dict[str, float]:
        """The task's loss and metrics over a dataset, each sample counted once; the same on every rank.

        Args:
            dataset: Pairs ``(inputs, targets)``; None is the task's ``evaluate``.

        Raises:
            ConfigurationError: If there is none.
        """
        chosen = self.task.evaluate if dataset is None else dataset
        if chosen is None:
            raise ConfigurationError(
                "there is nothing to evaluate on: give a dataset, or a Task with `evaluate=`"
            )
        self.settle()
        return evaluate(self.strategy, chosen, self._evaluation_options())

    def predict(self, dataset: Dataset[Any], *, targets: bool = True) -> Tree:
        """The model's outputs for every sample, in the order of the dataset, on every rank and on the CPU.

        Args:
            dataset: Pairs ``(inputs, targets)``, of which the targets are not used.
            targets: False if the items are the inputs alone.
        """
        self.settle()
        return predict(self.strategy, dataset if targets else InputsOnly(dataset), self._evaluation_options())

    def _evaluation_options(self) -> EvaluationOptions:
        return EvaluationOptions(
            batch_size=self.batch_size,
            micro_batch=self.config.micro_batch,
            workers=self.config.workers,
            weights=self._speeds(),
        )

    def _speeds(self) -> list[float] | None:
        """Parts of a batch that the ranks take in evaluation, as they did in the last step; None is equal parts."""
        if self.balancer is None or self.steps_done == 0:
            return None
        shares = self.balancer.shares(max(self._first_step, self.steps_done - 1), self.batch_size)
        return [float(share) for share in shares]

    # State

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, on any number of ranks."""
        self.settle()
        return {
            **self.strategy.state_dict(),
            "balancer": self.balancer.state_dict() if self.balancer else self._balancer_state,
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "progress": {
                "epoch": self._epoch,
                "position": self._position,
                "steps": self.steps_done,
                "samples": self.samples_done,
                "seed": self.config.seed,
                "batch_size": self.batch_size,
                "parts": self._sizes_of_parts(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave.

        Raises:
            ConfigurationError: If the order of samples would be another one.
        """
        progress = state["progress"]
        for name, ours in (("seed", self.config.seed), ("batch_size", self.batch_size)):
            if progress[name] != ours:
                raise ConfigurationError(
                    f"the checkpoint was made with {name} {progress[name]}, this run has {ours}: samples would be "
                    f"repeated or lost; set {name} to {progress[name]}"
                )
        self._check_parts(progress)
        self.strategy.load_state_dict(state)
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self._epoch, self._position = progress["epoch"], progress["position"]
        self.steps_done, self.samples_done = progress["steps"], progress["samples"]
        self._balancer_state, self._first_step = state.get("balancer", {}), self.steps_done

    def _sizes_of_parts(self) -> list[int] | None:
        parts = self._reading.parts
        return None if parts is None else list(parts.sizes)

    def _check_parts(self, progress: Mapping[str, Any]) -> None:
        saved, ours = progress.get("parts"), self._sizes_of_parts()
        if saved != ours and progress["position"]:
            raise ConfigurationError(
                f"the checkpoint was made in the middle of an epoch of parts of {saved} samples, this run has {ours} "
                "(None: not partitioned by sample): samples would be repeated or lost; go on with the same parts, or "
                "from the end of an epoch"
            )

    def close(self) -> None:
        """Gives back the strategy's and, where the engine opened it, the session's processes and memory."""
        self.strategy.close()
        if self._owns_session:
            self.session.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sum(numbers: list[Readout]) -> float:
    return sum(number.value() for number in numbers)


def _first_with_samples(batch: Batch) -> int:
    return next(rank for rank, share in enumerate(batch.shares) if share)
