"""When a run saves, and how it ends where it stands.

Ranks save together, after the same step. What one of them wants, because its clock says so or a signal came, it tells
with its row of a step; all have read that row when the next step is over, and do it then::

    step n        rank 1 is asked to stop; its row says so
    step n + 1    all read the row ─▶ save after it, and end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from evener.checkpoint import folder
from evener.config import RunConfig
from evener.data.batch import Batch
from evener.engine import Engine
from evener.errors import CheckpointError, ConfigurationError, InterruptedRunError
from evener.intervals import Interval
from evener.records import Note
from evener.runtime.interrupt import Deferral, interruption

_LOOK, _SAVE, _STOP = 1.0, 2.0, 100.0
"""What a rank may want: to hear of a save that failed, to save, to save and stop (and the number of the signal)."""


class Saving:
    """The checkpoints of one run in a directory. All ranks call its methods after the same steps.

    Args:
        stop: Whether this rank was asked to stop.

    Raises:
        ConfigurationError: If the best evaluation is to be kept and there is none.
    """

    def __init__(self, engine: Engine, config: RunConfig, directory: Path, stop: Deferral) -> None:
        self._engine, self._config, self._directory, self._stop = engine, config, directory, stop
        self._interval = Interval.of(config.save_every)
        self._saved_at = engine.steps_done
        self._last = time.monotonic()
        self._metric, _, self._direction = (config.keep_best or "").partition(":")
        if self._metric and engine.task.evaluate is None:
            raise ConfigurationError(f"keep_best {config.keep_best!r}: the task has nothing to evaluate on")
        found = folder.best_value(directory) if engine.session.rank == 0 else None
        self._best: float | None = engine.session.control.broadcast_object(found) if self._metric else None

    def wish(self) -> float:
        """What this rank tells the others with its next step."""
        if self._stop.number:
            return _STOP + self._stop.number
        passed, every = time.monotonic() - self._last, self._interval.seconds
        if every and passed >= every and self._engine.session.rank == 0:
            return _SAVE
        return _LOOK if self._engine.state.saver.has_failed else 0.0

    def stepped(self, batch: Batch) -> None:
        """A step was taken.

        Raises:
            CheckpointError: If a checkpoint could not be written, and the run is to stop then.
            InterruptedRunError: If a rank was asked to stop; the state is saved then.
        """
        wish = self._wished(batch)
        if wish >= _STOP:
            self._end_here(int(wish - _STOP))
        elif wish == _SAVE or self._is_due(batch):
            self._save()
        elif wish == _LOOK:
            self._bearing(self._engine.finish_saving)

    def _wished(self, batch: Batch) -> float:
        """By the last row that all ranks are sure to have read; a wish from before the last save is fulfilled."""
        number = self._engine.steps_done - 1
        if batch.last:
            self._engine.settle()
        else:
            number -= 1
        wish = self._engine.ledger.wished(number)
        return wish if wish >= _STOP or number >= self._saved_at else 0.0

    def _is_due(self, batch: Batch) -> bool:
        steps, epochs = self._interval.steps, self._interval.epochs
        if steps:
            return self._engine.steps_done % steps == 0
        return bool(epochs) and batch.last and (batch.epoch + 1) % epochs == 0

    def _save(self, wait: bool | None = None) -> None:
        wait = self._config.save_mode == "blocking" if wait is None else wait
        self._bearing(self._engine.finish_saving)
        self._bearing(lambda: self._engine.save(self._directory, keep=self._config.keep, wait=wait))
        self._saved_at, self._last = self._engine.steps_done, time.monotonic()

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
        place = f"step {steps}; saved in {self._directory}, to go on from with --resume"
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
            engine.save(self._directory, keep=self._config.keep)
            self._saved_at = engine.steps_done

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """The present weights were evaluated; if they are the best so far, their checkpoint stays.

        Raises:
            ConfigurationError: If the metric that decides is not among them.
        """
        if not self._metric:
            return
        if self._metric not in metrics:
            raise ConfigurationError(f"keep_best is {self._metric!r}; the metrics are {', '.join(metrics)}")
        value = metrics[self._metric]
        if self._is_better(value):
            self.end()
            self._best = value
            if self._engine.session.rank == 0:
                name = folder.name_of(self._engine.steps_done)
                folder.mark_best(self._directory, name, self._metric, value)

    def _is_better(self, value: float) -> bool:
        lowest = self._direction == "min" or (not self._direction and "loss" in self._metric)
        if self._best is None:
            return value == value
        return value < self._best if lowest else value > self._best
