"""When a run saves, and how it ends where it stands.

Ranks save together, after the same step. What one of them wants, because its clock says so or a signal came, it tells
with its row of a step; all have read that row when the next step is over, and do it then::

    step n        rank 1 is asked to stop; its row says so
    step n + 1    all read the row ─▶ save after it, and end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

from evener.checkpoint import evaluation as evaluated
from evener.checkpoint import layout as folder
from evener.core.config.intervals import Interval
from evener.core.config.run_config import RunConfig
from evener.core.records import Note
from evener.core.text import from_here
from evener.data.batch import Batch
from evener.distributed.signals import Deferral, interruption
from evener.errors import CheckpointError, ConfigurationError, InterruptedRunError
from evener.training.engine import Engine


class Wish(IntEnum):
    """What a rank may want all to do after a step; it travels as one number, of which the greatest of all ranks holds.

    So the order is a promise: each does what those before it do, too.
    """

    NOTHING = 0
    LOOK = 1
    """To hear of a save that failed."""
    SAVE = 2
    END = 3
    """To end as if the run were complete, which saves."""
    STOP = 100
    """To save and stop; with the number of the signal added."""


class Saving:
    """The checkpoints of one run in a directory. All ranks call its methods after the same steps.

    Args:
        stop: Whether this rank was asked to stop.

    Raises:
        ConfigurationError: If the best evaluation is to be kept and there is none.
    """

    def __init__(
        self, engine: Engine, config: RunConfig, directory: Path, stop: Deferral, best: Best
    ) -> None:
        self._engine, self._config, self._directory, self._stop = engine, config, directory, stop
        self._best = best
        self._unwritten: tuple[Path, str] | None = None
        self._interval = Interval.of(config.save_every)
        self._saved_at = engine.steps_done
        self._last = time.monotonic()
        if best.metric and engine.task.evaluate is None:
            raise ConfigurationError(f"keep_best {config.keep_best!r}: the task has nothing to evaluate on")
        if not best.state_dict() and engine.session.rank == 0:  # that of another run, or by another metric
            evaluated.forget_best(directory)

    def wish(self) -> float:
        """What this rank tells the others with its next step."""
        if self._stop.number:
            return Wish.STOP + self._stop.number
        passed, every = time.monotonic() - self._last, self._interval.seconds
        if every and passed >= every and self._engine.session.rank == 0:
            return Wish.SAVE
        return Wish.LOOK if self._engine.state.saver.has_failed else Wish.NOTHING

    def stepped(self, batch: Batch) -> None:
        """A step was taken.

        Raises:
            CheckpointError: If a checkpoint could not be written, and the run is to stop then.
            InterruptedRunError: If a rank was asked to stop; the state is saved then.
        """
        self._write_evaluation()
        wish = self._wished(batch)
        if wish >= Wish.STOP:
            self._end_here(int(wish - Wish.STOP))
        elif wish == Wish.SAVE or self._is_due(batch):
            self._save()
        elif wish == Wish.LOOK:
            self._bearing(self._engine.finish_saving)

    def _wished(self, batch: Batch) -> float:
        """By the last row that all ranks are sure to have read; a wish from before the last save is fulfilled."""
        number = self._engine.steps_done - 1
        if batch.last:
            self._engine.settle()
        else:
            number -= 1
        wish = self._engine.ledger.wished(number)
        return wish if wish >= Wish.STOP or number >= self._saved_at else 0.0

    def _is_due(self, batch: Batch) -> bool:
        steps, epochs = self._interval.steps, self._interval.epochs
        if steps:
            return self._engine.steps_done % steps == 0
        return bool(epochs) and batch.last and (batch.epoch + 1) % epochs == 0

    def _save(self, wait: bool | None = None) -> None:
        wait = self._config.save_mode == "blocking" if wait is None else wait
        self._bearing(self._engine.finish_saving)
        self._bearing(lambda: self._write(wait))
        self._saved_at, self._last = self._engine.steps_done, time.monotonic()

    def _write(self, wait: bool = True) -> None:
        self._engine.save(self._directory, keep=self._config.keep, wait=wait)

    def _bearing(self, act: Callable[[], object]) -> None:
        """Does what may find that something could not be written."""
        try:
            act()
        except CheckpointError as error:
            if self._config.on_full_disk == "stop":
                raise
            self._engine.observers.event(Note(self._engine.steps_done, f"{error}; the run goes on"))

    def _end_here(self, number: int) -> None:
        steps = self._engine.steps_done
        self.end()
        place = f"step {steps}, saved. Continue with --resume {from_here(self._directory.parent)}"
        self._engine.session.watchdog.progress(place)  # for the launcher
        raise InterruptedRunError(interruption(number, place), number)

    def end(self) -> None:
        """The state is saved when this returns, whatever is to follow of failures.

        Raises:
            CheckpointError: If it could not be.
        """
        engine = self._engine
        try:
            engine.finish_saving()
        except CheckpointError:
            if self._config.on_full_disk == "stop":
                raise
            self._saved_at = -1  # this or an earlier one: it is tried once more
        if self._saved_at != engine.steps_done:
            self._write()
            self._saved_at = engine.steps_done
        self._write_evaluation()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """The present weights were evaluated; if they are the best so far, their checkpoint stays.

        Raises:
            ConfigurationError: If the metric that decides is not among them.
        """
        best, steps = self._best, self._engine.steps_done
        if best.metric and best.is_better(metrics):
            self.end()
            best.set(metrics, steps)
            if self._engine.session.rank == 0:
                evaluated.mark_best(self._directory, folder.name_of(steps), best.metric, metrics[best.metric])

    def followed(self) -> None:
        """Whatever follows a step is over: its evaluation is told, and what observers remember is that after it.

        It lies beside the checkpoint of this step, if there is one, which was written before.
        """
        steps, state = self._engine.steps_done, self._engine.state
        if self._engine.session.rank == 0 and self._saved_at == steps:
            self._unwritten = self._directory / folder.name_of(steps), state.kept_text()
            self._write_evaluation()

    def _write_evaluation(self) -> None:
        """When the checkpoint is there. Without it the evaluation is done again, which costs time and nothing else."""
        if self._unwritten is not None and evaluated.is_of(self._unwritten[0], self._engine.state.identity):
            with suppress(OSError):
                evaluated.write_evaluation(*self._unwritten)
            self._unwritten = None


class Best:
    """The best evaluation of a run so far, which checkpoints keep.

    Args:
        keep_best: The metric, with ``:min`` or ``:max`` or by its name; None if nothing is kept for it.
    """

    def __init__(self, keep_best: str | None) -> None:
        self.metric, _, direction = (keep_best or "").partition(":")
        self._lowest = direction == "min" or (not direction and "loss" in self.metric)
        self.value: float | None = None
        self.words = ""
        """What the user must know of the best so far; empty if nothing."""
        self._state: dict[str, Any] = {}

    def is_better(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than all before.

        Raises:
            ConfigurationError: If the metric that decides is not among them.
        """
        if self.metric not in metrics:
            raise ConfigurationError(f"keep_best is {self.metric!r}; the metrics are {', '.join(metrics)}")
        value = metrics[self.metric]
        if self.value is None:
            return value == value
        return value < self.value if self._lowest else value > self.value

    def set(self, metrics: Mapping[str, float], steps: int) -> None:
        """It is the best."""
        self.value = metrics[self.metric]
        self._state = {**self._measure(), "value": self.value, "steps": steps}

    def _measure(self) -> dict[str, Any]:
        return {"metric": self.metric, "lowest": self._lowest}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The number of another metric is not compared with."""
        before = {name: state.get(name) for name in ("metric", "lowest")}
        self.value, self._state, self.words = None, state, ""
        if state and before == self._measure():
            self.value = state["value"]
        elif state and self.metric:
            kind = "lowest" if state["lowest"] else "highest"
            self._state = {}
            self.words = (
                f"keep_best is {self.metric!r}, and the run kept the {kind} {state['metric']} until now: the best "
                "evaluation is looked for anew"
            )
