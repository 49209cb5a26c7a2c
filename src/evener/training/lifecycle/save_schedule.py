"""Decides when a run saves, and stops it after saving when that is requested.

Ranks save together, after the same step. A rank may request something, because its clock says so or a signal came. It
sends the request with its row of a step. All ranks have read that row when the next step is over, and act then::

    step n        rank 1 is asked to stop; its row says so
    step n + 1    all read the row ─▶ save after it, and end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from evener.checkpoint import evaluation as evaluated
from evener.checkpoint import layout as folder
from evener.core.attempts import SaveRecord, append_attempt
from evener.core.config.intervals import Interval
from evener.core.config.run_config import RunConfig
from evener.core.records import Note
from evener.core.text import from_here
from evener.data.batch import Batch
from evener.distributed.recovery.regroup import GroupChange, Stop
from evener.distributed.signals import Deferral, interruption
from evener.errors import CheckpointError, ConfigurationError, InterruptedRunError
from evener.training.engine import Engine
from evener.training.evaluation import AVERAGE
from evener.training.lifecycle.handover import keeps_memory
from evener.training.lifecycle.regrouping import Regrouping
from evener.training.step.step import Step

_WORTH_NOTING = 1e-3
"""Seconds of a save that is written down."""


class Wish(IntEnum):
    """A rank's request for what all ranks do after a step. Sent as a number; the greatest of all ranks holds.

    The order matters: each value includes the actions of those below it.
    """

    NOTHING = 0
    LOOK = 1
    """Report a save that failed."""
    SAVE = 2
    REGROUP = 3
    """Agree on another number of ranks."""
    END = 4
    """End as if the run were complete, which saves."""
    STOP = 100
    """Save and stop. The number of the signal is added."""


@contextmanager
def bearing(engine: Engine, on_full_disk: str) -> Iterator[None]:
    """Reports a write that failed in the block and goes on, unless ``on_full_disk`` is ``stop``."""
    try:
        yield
    except CheckpointError as error:
        if on_full_disk == "stop":
            raise
        engine.observers.event(Note(engine.steps_done, f"{error}; the run goes on"))


class Saving:
    """Writes the checkpoints of one run into a directory. All ranks must call its methods after the same steps.

    Args:
        stop: Tells if this rank was asked to stop.
        stays: Whether this rank keeps its state in memory when others come or leave.
        is_saved: Whether the run begins with what a checkpoint holds, or with nothing.

    Raises:
        ConfigurationError: If the best evaluation is to be kept and the task has none, or no checkpoint can hold a part
            of the run's state.
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        directory: Path,
        stop: Deferral,
        best: Best,
        *,
        stays: bool = False,
        is_saved: bool = True,
    ) -> None:
        self._engine, self._config, self._directory, self._stop = engine, config, directory, stop
        self._best, self._stays = best, stays
        self._regrouping = Regrouping(engine.session, directory.parent)
        self._unwritten: tuple[Path, str] | None = None
        self._told = ""
        self._interval = Interval.parse(config.save_every)
        self._saved_at = self._tried_at = engine.steps_done if is_saved else -1
        self._last = time.monotonic()
        if best.metric and engine.task.evaluate is None:
            raise ConfigurationError(f"keep_best {config.keep_best!r}: the task has nothing to evaluate on")
        engine.state.check_savable()
        if engine.session.rank == 0:
            self._point_to_best()

    def _point_to_best(self) -> None:
        """Removes a pointer to the best checkpoint that another run has left, or one of another metric. Writes one that
        is missing because the run died after it had saved the best."""
        best, place = self._best, self._directory
        if not best.state_dict():
            evaluated.forget_best(place)
        elif best.value is not None:
            evaluated.recall_best(place, best.steps, best.metric, best.value, self._engine.state.identity)

    def wish(self) -> float:
        """Returns the request that this rank sends with its next step."""
        if self._stop.number:
            return Wish.STOP + self._stop.number
        if self._regrouping.is_asked():
            return Wish.REGROUP
        passed, every = time.monotonic() - self._last, self._interval.seconds
        if every and passed >= every and self._engine.session.rank == 0:
            return Wish.SAVE
        return Wish.LOOK if self._engine.state.saver.has_failed else Wish.NOTHING

    def stepped(self, step: Step) -> None:
        """Saves if it is time to. Called after each step.

        Raises:
            CheckpointError: If a checkpoint could not be written, and the run is to stop in that case.
            InterruptedRunError: If a rank was asked to stop; the state is saved then.
        """
        self._write_evaluation()
        batch = step.batch
        wish = self._wished(batch)
        if number := step.asked_to_stop or max(0, int(wish - Wish.STOP)):
            self._stop_or_change(number)
        elif wish == Wish.REGROUP and self._engine.steps_done != self._engine.total_steps:
            self._stop_or_change()
        if wish == Wish.SAVE or self._is_due(batch):
            self._save()
        elif wish == Wish.LOOK:
            self._bearing(self._engine.finish_saving)

    def _wished(self, batch: Batch) -> float:
        """Returns the request in the last row that all ranks have surely read; 0 if it is from before the last save."""
        number = self._engine.steps_done - 1
        if batch.last:
            self._engine.settle()
        else:
            number -= 1
        wish = self._engine.step_sync.wished(number)
        return wish if wish >= Wish.STOP or number >= self._tried_at else 0.0

    def _is_due(self, batch: Batch) -> bool:
        steps, epochs = self._interval.steps, self._interval.epochs
        if steps:
            return self._engine.steps_done % steps == 0
        return bool(epochs) and batch.last and (batch.epoch + 1) % epochs == 0

    def _save(self, wait: bool | None = None) -> None:
        wait = self._config.save_mode == "blocking" if wait is None else wait
        with self._timed():
            self._bearing(self._engine.finish_saving)
            is_written = self._bearing(lambda: self._write(wait))
        self._tried_at, self._last = self._engine.steps_done, time.monotonic()
        self._saved_at = self._tried_at if is_written else -1

    def _write(self, wait: bool = True) -> None:
        self._engine.save(self._directory, keep=self._config.keep, wait=wait)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Writes down for how long training stopped in the block."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        if self._engine.session.rank == 0 and seconds >= _WORTH_NOTING:
            append_attempt(self._directory.parent, SaveRecord(self._engine.steps_done, seconds))

    def _bearing(self, act: Callable[[], object]) -> bool:
        """Calls ``act``. If a write failed, raises or only reports it and returns False, as ``on_full_disk`` says."""
        done = False
        with bearing(self._engine, self._config.on_full_disk):
            act()
            done = True
        self._tell_not_uploaded()
        return done

    def _tell_not_uploaded(self) -> None:
        """Reports once that a checkpoint was not uploaded, which does not end the run."""
        wrong = self._engine.state.saver.not_uploaded
        if wrong and wrong != self._told:
            self._engine.observers.event(Note(self._engine.steps_done, f"{wrong}; the run goes on"))
        self._told = wrong

    def _stop_or_change(self, number: int = 0) -> None:
        """Ends the run because of a signal, or the ranks because their number changes, as all ranks agree."""
        agreed = self._regrouping.agree(number, self._engine.steps_done)
        if isinstance(agreed, Stop):
            self._end_here(agreed.signal, agreed.why)
        elif isinstance(agreed, GroupChange):
            agreed = replace(agreed, in_memory=self._stays and self._keeps_memory(agreed))
            self.end()  # also if memory is kept: a rank may die while it joins
            self._engine.observers.event(Note(self._engine.steps_done, agreed.words))
            self._regrouping.end(agreed, self._engine.steps_done)

    def _keeps_memory(self, change: GroupChange) -> bool:
        return change.ranks > 0 and keeps_memory(self._config, self._engine.session.world_size, change.ranks)

    def _end_here(self, number: int, why: str = "") -> None:
        steps = self._engine.steps_done
        if why:
            self._engine.observers.event(Note(steps, f"all ranks end, for {why}"))
        self.end()
        place = f"step {steps}, saved. Continue with --resume {from_here(self._directory.parent)}"
        self._engine.session.watchdog.progress(place)  # for the launcher
        self._regrouping.stop()
        raise InterruptedRunError(interruption(number, place), number)

    def end(self) -> None:
        """Saves the state, and returns when it is written.

        Raises:
            CheckpointError: If it could not be written.
        """
        engine = self._engine
        with self._timed():
            try:
                engine.finish_saving()
            except CheckpointError:
                if self._config.on_full_disk == "stop":
                    raise
                self._saved_at = -1  # this or an earlier save failed: try once more
            self._tell_not_uploaded()
            if self._saved_at != engine.steps_done:
                self._write()
                self._saved_at = engine.steps_done
        self._tell_not_uploaded()
        engine.state.saver.upload_again(self._directory)
        self._write_evaluation()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Keeps the checkpoint of the current weights if their evaluation is the best so far.

        Raises:
            ConfigurationError: If the metric that decides is not among the metrics.
        """
        best, steps = self._best, self._engine.steps_done
        if best.metric and not self._is_awaited(best.metric, metrics) and best.is_better(metrics):
            earlier = best.state_dict()
            # First, for the checkpoint: the run may die before the pointer is written.
            best.set(metrics, steps)
            self._bearing(self.end)
            if self._saved_at != steps:
                best.load_state_dict(earlier)
            elif self._engine.session.rank == 0:
                found = folder.name_of(steps), best.metric, metrics[best.metric]
                self._bearing(lambda: evaluated.mark_best(self._directory, *found))

    def check_best(self, metrics: Mapping[str, float]) -> None:
        """Checks that the metric that decides is among those of an evaluation.

        Raises:
            ConfigurationError: If it is not.
        """
        if self._best.metric and not self._is_awaited(self._best.metric, metrics):
            self._best.is_better(metrics)

    def _is_awaited(self, metric: str, metrics: Mapping[str, float]) -> bool:
        """Returns True for a metric of the average of the weights, as long as there is no average."""
        average = self._engine.learner.average
        begins_later = average.how is not None and not average.how.instead and not average.number
        return begins_later and metric.startswith(AVERAGE) and metric.removeprefix(AVERAGE) in metrics

    def followed(self) -> None:
        """Stores what observers remember after everything that follows a step is over, such as its evaluation.

        It is written beside the checkpoint of this step, if there is one, because that was written before the
        evaluation.
        """
        steps, state = self._engine.steps_done, self._engine.state
        if self._engine.session.rank == 0 and self._saved_at == steps:
            self._unwritten = self._directory / folder.name_of(steps), state.kept_text()
            self._write_evaluation()

    def _write_evaluation(self) -> None:
        """Writes the evaluation if its checkpoint exists. Without it, a resumed run only has to evaluate again."""
        if self._unwritten is not None and evaluated.is_of(self._unwritten[0], self._engine.state.identity):
            with suppress(OSError):
                evaluated.write_evaluation(*self._unwritten)
            self._unwritten = None


class Best:
    """The best evaluation of a run so far, which checkpoints keep.

    Args:
        keep_best: The metric, with ``:min`` or ``:max`` or by name alone. If None, nothing is kept for it.
    """

    def __init__(self, keep_best: str | None) -> None:
        self.metric, _, direction = (keep_best or "").partition(":")
        self._lowest = direction == "min" or (not direction and "loss" in self.metric)
        self.value: float | None = None
        self.message = ""
        """Message for the user about the best evaluation so far; empty if there is none."""
        self._state: dict[str, Any] = {}

    def is_better(self, metrics: Mapping[str, float]) -> bool:
        """Returns True if an evaluation is better than all before.

        Raises:
            ConfigurationError: If the metric that decides is not among the metrics.
        """
        if self.metric not in metrics:
            raise ConfigurationError(f"keep_best is {self.metric!r}; the metrics are {', '.join(metrics)}")
        value = metrics[self.metric]
        if self.value is None:
            return value == value
        return value < self.value if self._lowest else value > self.value

    def set(self, metrics: Mapping[str, float], steps: int) -> None:
        """Records an evaluation as the best."""
        self.value = metrics[self.metric]
        self._state = {**self._measure(), "value": self.value, "steps": steps}

    @property
    def steps(self) -> int:
        """Steps done before the best evaluation; -1 if there is none."""
        return int(self._state.get("steps", -1))

    def _measure(self) -> dict[str, Any]:
        return {"metric": self.metric, "lowest": self._lowest}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the best value, unless it is that of another metric, with which values cannot be compared."""
        before = {name: state.get(name) for name in ("metric", "lowest")}
        self.value, self._state, self.message = None, state, ""
        if state and before == self._measure():
            self.value = state["value"]
        elif state and self.metric:
            kind = "lowest" if state["lowest"] else "highest"
            self._state = {}
            self.message = (
                f"keep_best is {self.metric!r}, and the run kept the {kind} {state['metric']} until now: the best "
                "evaluation is looked for anew"
            )
