"""Keeps the state of ``transformers`` during a training: state, callbacks, control, evaluations, checkpoints.

After each step, every rank calls its own callbacks, as under ``torchrun``. If a callback asks for something on one
rank, all ranks do it after the same step.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from transformers import TrainerState
from transformers.trainer_callback import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    TrainerControl,
)
from transformers.trainer_utils import speed_metrics

from evener.core.os_errors import storage_errors
from evener.core.records import Note
from evener.errors import ConfigurationError
from evener.integrations.transformers.callbacks import TrainerEvents
from evener.training.engine import Engine
from evener.training.lifecycle.callback import Callback
from evener.training.step.step import Step

STATE = "trainer_state.json"
ENGINE = "evener"
"""Directory in a checkpoint that holds the engine's own checkpoint."""
_ALIKE = (DefaultFlowCallback, PrinterCallback, EarlyStoppingCallback)
"""Callbacks that decide the same on all ranks. If there are no others, the ranks need not exchange flags."""
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_STEPS_LATE = 4
"""Number of steps after which a step's loss can be read without waiting for the device."""


@dataclass(frozen=True)
class Followed:
    """Results of a training besides the weights."""

    state: TrainerState
    training_loss: float
    metrics: dict[str, float]
    callbacks: list[dict[str, Any]]
    """Attributes of each callback on this rank; only those that can be pickled."""


class Following(Callback):
    """Runs the events, evaluations and checkpoints of one training of a trainer."""

    _engine: Engine

    def __init__(self, trainer: TrainerEvents, resumed: Path | None, steps: int, steps_an_epoch: int) -> None:
        self._trainer, self._resumed = trainer, resumed
        self._max_steps, self._steps_an_epoch = steps, steps_an_epoch
        self._began = 0.0
        self._waiting: deque[Step] = deque()
        self._losses: list[float] = []
        """Losses of the steps since the start."""
        self._first = self._logged = 0
        """Step at the start, and step of the last log entry."""

    def begin(self, engine: Engine) -> None:
        trainer = self._trainer
        self._engine, trainer.engine = engine, engine
        again = self._agreed_state()
        engine.learner.clipping.measures = not engine.config.update_in_backward
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = (
            engine.model,
            engine.learner.optimizer,
            engine.scheduler,
        )
        if again:
            return
        self._call("on_train_begin")
        if trainer.args.eval_on_start:
            self._evaluate()
        if engine.steps_done < self._max_steps:
            if not engine.progress.position:
                self._call("on_epoch_begin")
            self._call("on_step_begin")

    def _agreed_state(self) -> bool:
        """Takes over the state of the rank that has progressed furthest. All ranks must call this together.

        Returns True if the training had begun before: after a return to a checkpoint, or if a rank was replaced while
        others stayed.
        """
        trainer, engine, again = self._trainer, self._engine, bool(self._began)
        began = self._began or time.time()
        first = engine.steps_done
        own = (again, trainer.state if again else self._loaded(), began, self._losses)
        places = (self._first, self._logged) if again else (first, first)
        found = engine.session.control.gather_objects((*own, *places))
        begun, state, self._began, losses, self._first, logged = max(
            found, key=lambda each: (each[0], each[1].global_step)
        )
        self._waiting.clear()
        self._losses = losses[: max(0, first - self._first)]
        self._logged = min(logged, first)
        trainer.state = self._set_up(state)
        return bool(begun)

    def _loaded(self) -> TrainerState:
        path = self._resumed / STATE if self._resumed is not None else None
        return (
            TrainerState.load_from_json(str(path)) if path is not None and path.exists() else TrainerState()
        )

    def _set_up(self, state: TrainerState) -> TrainerState:
        engine, args = self._engine, self._trainer.args
        state.global_step, state.epoch = engine.steps_done, self._epoch()
        state.max_steps, state.num_train_epochs = (
            self._max_steps,
            math.ceil(self._max_steps / self._steps_an_epoch),
        )
        state.compute_steps(args, self._max_steps)
        state.train_batch_size = args.per_device_train_batch_size
        state.is_world_process_zero = engine.session.rank == 0
        state.is_local_process_zero = engine.session.environment.local_rank == 0
        state.log_history = [row for row in state.log_history if row["step"] <= engine.steps_done]
        return state

    def _epoch(self) -> float:
        progress, size = self._engine.progress, self._engine.batch_size
        return float(progress.epoch + math.ceil(progress.position / size) / self._steps_an_epoch)

    # After a step

    def stepped(self, step: Step) -> None:
        trainer, state = self._trainer, self._trainer.state
        state.global_step, state.epoch = self._engine.steps_done, self._epoch()
        self._waiting.append(step)
        while len(self._waiting) > _STEPS_LATE:
            self._losses.append(self._waiting.popleft().loss)
        self._call("on_step_end")
        self._act(step)
        control = trainer.control
        over = control.should_training_stop or state.global_step >= self._max_steps
        if step.batch.last or over:
            self._call("on_epoch_end")
            self._act(step)
        self._go_on(step.batch.last, state.global_step >= self._max_steps)

    def _go_on(self, next_epoch: bool, complete: bool) -> None:
        """Begins the next step, unless the run is complete or a callback ends it."""
        control, engine = self._trainer.control, self._engine
        if control.should_epoch_stop:
            raise ConfigurationError(
                f"a callback set control.should_epoch_stop after step {engine.steps_done}, and an epoch of Evener's "
                "Trainer goes over all samples; set should_training_stop, or train on fewer samples"
            )
        if complete or control.should_training_stop:
            if not complete:
                message = f"ends after step {engine.steps_done}, asked by a callback"
                engine.observers.event(Note(engine.steps_done, message))
            engine.observers.ended = True
            return
        if next_epoch:
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def _call(self, event: str) -> None:
        """Calls the callbacks, and combines their requests with those of the other ranks."""
        trainer = self._trainer
        called = getattr(trainer.callback_handler, event)
        trainer.control = called(trainer.args, trainer.state, trainer.control)
        self._agree()

    def _agree(self) -> None:
        control: TrainerControl = self._trainer.control
        callbacks, ranks = self._trainer.callback_handler.callbacks, self._engine.session.world_size
        if ranks == 1 or all(type(each) in _ALIKE for each in callbacks):
            return
        own = [float(getattr(control, flag)) for flag in _FLAGS]
        rows = self._engine.step_sync.control.exchange(own).wait()
        for flag, asked in zip(_FLAGS, zip(*rows, strict=True), strict=True):
            setattr(control, flag, any(asked))

    def _act(self, step: Step) -> None:
        """Logs, evaluates and saves a checkpoint, as far as they are due."""
        control = self._trainer.control
        if control.should_log and self._engine.steps_done > self._logged:
            self._log(step)
        if control.should_evaluate:
            self._evaluate()
        if self._trainer.control.should_save:
            self._save()
            self._call("on_save")

    def _log(self, step: Step) -> None:
        self._drain()
        since = self._losses[self._logged - self._first :]
        logs = {"loss": _mean(since)}
        norm = self._engine.learner.clipping.norm
        if norm is not None:
            logs["grad_norm"] = float(norm)
        logs["learning_rate"] = step.lr
        self._logged = self._engine.steps_done
        self._trainer.log(logs)
        self._agree()

    def _drain(self) -> None:
        self._losses += [step.loss for step in self._waiting]
        self._waiting.clear()

    def _evaluate(self) -> None:
        trainer, state = self._trainer, self._trainer.state
        metrics = trainer.evaluate(ignore_keys=trainer.ignore_keys)
        self._agree()
        best = self._is_best(metrics)
        if best and trainer.args.save_strategy != "no":
            state.best_global_step = state.global_step
        if trainer.args.save_strategy == "best":
            trainer.control.should_save = best

    def _is_best(self, metrics: dict[str, float]) -> bool:
        args, state = self._trainer.args, self._trainer.state
        name = args.metric_for_best_model
        if name is None:
            return False
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise ConfigurationError(
                f"metric_for_best_model is {args.metric_for_best_model!r}; the metrics are {', '.join(metrics)}"
            )
        better, value = np.greater if args.greater_is_better else np.less, metrics[name]
        if np.isnan(value) or not (state.best_metric is None or better(value, state.best_metric)):
            return False
        state.best_metric = value
        return True

    # Checkpoints

    def _save(self) -> None:
        """Writes a checkpoint under a temporary name, and renames it when it is complete."""
        trainer, engine, args = self._trainer, self._engine, self._trainer.args
        home = Path(args.output_dir)
        made, partial = (
            home / f"checkpoint-{engine.steps_done}",
            home / f".checkpoint-{engine.steps_done}.partial",
        )
        best = home / f"checkpoint-{trainer.state.best_global_step}"
        if trainer.state.best_global_step and (best == made or best.exists()):
            trainer.state.best_model_checkpoint = str(best)
        first = engine.session.rank == 0
        with storage_errors(f"the checkpoint {made} cannot be written"):
            if first and partial.exists():
                shutil.rmtree(partial)
            trainer.save_model(str(partial))
            if not args.save_only_model:
                engine.save(partial / ENGINE, keep=1)
            if first:
                trainer.state.save_to_json(str(partial / STATE))
                replace_directory(made, partial)
                rotate(home, args.save_total_limit, trainer.state.best_model_checkpoint)
        best_now = engine.session.control.broadcast_object(trainer.state.best_model_checkpoint)
        trainer.state.best_model_checkpoint = best_now

    # The end

    def end(self) -> Followed:
        trainer, state = self._trainer, self._trainer.state
        self._drain()
        steps = len(self._losses)
        metrics = speed_metrics(
            "train", self._began, num_samples=steps * self._engine.batch_size, num_steps=steps
        )
        metrics["train_loss"] = _mean(self._losses)
        metrics = self._engine.session.control.broadcast_object(metrics)
        trainer.log(metrics)
        self._call("on_train_end")
        kept = [_travelling(callback, trainer) for callback in trainer.callback_handler.callbacks]
        trainer.let_go()
        return Followed(state, metrics["train_loss"], metrics, kept)


def _mean(losses: list[float]) -> float:
    """Returns the mean of the finite losses; NaN if there are none. A batch without labels has no finite loss."""
    known = [loss for loss in losses if math.isfinite(loss)]
    return sum(known) / len(known) if known else math.nan


def _travelling(callback: Any, trainer: TrainerEvents) -> dict[str, Any]:
    """Returns the attributes of a callback that can be pickled for another process."""
    found: dict[str, Any] = {}
    for name, value in vars(callback).items():
        if value is trainer or isinstance(value, torch.nn.Module):
            continue
        with suppress(Exception):
            cloudpickle.dumps(value)
            found[name] = value
    return found


def replace_directory(path: Path, by: Path) -> None:
    """Renames the directory ``by`` to ``path``. Removes what has that name only afterwards: whenever the process is
    killed, one of them is whole."""
    older = path.with_name(f".{path.name}.older")
    if path.exists():
        shutil.rmtree(older, ignore_errors=True)
        path.rename(older)
    by.rename(path)
    shutil.rmtree(older, ignore_errors=True)


def rotate(home: Path, limit: int | None, best: str | None) -> None:
    """Removes the oldest checkpoints beyond ``limit``, but never the newest or the best."""
    found = sorted(home.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    found = [path for path in found if path.name.removeprefix("checkpoint-").isdecimal()]
    if not limit or limit < 1 or len(found) <= limit:
        return
    kept = {found[-1], *([Path(best)] if best else [])}
    removable = [path for path in found if path not in kept]
    for path in removable[: len(found) - max(limit, len(kept & set(found)))]:
        shutil.rmtree(path)
