"""One run of a task, on one of its ranks: trains, evaluates, saves, and reports to the observers."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from evener.checkpoint.layout import CHECKPOINTS, CheckpointDirectory, saved_in
from evener.checkpoint.remote.upload import RemoteRun
from evener.components.model_init import named_tensors
from evener.core.config.run_config import RunConfig
from evener.core.elsewhere import shown
from evener.core.observer import Observer
from evener.core.records import Note, RunSummary
from evener.core.task.task import Task
from evener.core.text import counted, few
from evener.data.batch import Batch
from evener.distributed.recovery.deferred_free import bury
from evener.distributed.recovery.replacement import NothingKeptError
from evener.distributed.session import RUN_DIR, Session
from evener.distributed.signals import Deferral, asked, check, deferring, last_words
from evener.errors import InterruptedRunError
from evener.nn.fqn import clean_name
from evener.training.engine import Engine
from evener.training.evaluation import try_evaluation
from evener.training.lifecycle.callback import Callback
from evener.training.lifecycle.early_stop import Stopping
from evener.training.lifecycle.handover import CarriedState, RestartWithStateError, succession
from evener.training.lifecycle.rollback import falling_back
from evener.training.lifecycle.save_schedule import Best, Saving
from evener.training.reporting.loggers.prometheus import MetricsFile
from evener.training.reporting.run_dir import Records, RunDirectory, earlier_runs_message, goes_on_in
from evener.training.reporting.summary_counters import Clock, SummaryCounters
from evener.training.reporting.terminal import Terminal
from evener.training.run_report import RunReport
from evener.training.survey import head_line


@dataclass(frozen=True)
class Trained:
    """Result of :func:`fit`: the summary of the run, and the weights in the form for ``model.load_state_dict``."""

    summary: RunSummary
    """Summary of how the run ended."""
    weights: dict[str, Tensor]
    """Parameters and buffers by name, whole, on the CPU."""
    rank: int = 0
    """The rank that returned this result: 0, and on further machines the rank of their first process."""
    callback_result: Any = None
    """Return value of ``Callback.end`` on that rank."""
    average: dict[str, Tensor] = field(default_factory=dict)
    """The average of the weights in the same form; empty if there is none."""

    def __repr__(self) -> str:
        return f"<Trained {self.summary.words}; weights of {len(self.weights)} names>"

    def _repr_html_(self) -> str:
        """Returns the summary as tables for a notebook."""
        return self.summary._repr_html_()


class Run:
    """One run of one task, on one of its ranks."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        session: Session,
        show: bool,
        observers: Sequence[Observer] = (),
        heir: CarriedState | None = None,
        callback: Callback | None = None,
        elsewhere: RemoteRun | None = None,
        began: float | None = None,
    ) -> None:
        self._task, self._config, self._session = task, config, session
        self._callback = callback or Callback()
        self._clock = Clock()
        self._batches: Generator[Batch] | None = None
        self._ending = threading.Lock()
        self._held = ExitStack()
        self._records: Records | None = None
        with ExitStack() as undo:
            all_observers, earlier = list(observers), list[CheckpointDirectory]()
            if config.run_dir is not None and session.rank == 0:
                goes_on = heir is not None or goes_on_in(config.run_dir, config.resume)
                undo.enter_context(self._held)
                self._held.enter_context(RunDirectory(config.run_dir, config.overwrite, goes_on))
                self._records = Records(
                    config.run_dir,
                    goes_on,
                    config.on_full_disk == "stop",
                    replaces=config.overwrite,
                    run=lambda: self._engine.state.identity,
                    is_evaluated=self._is_evaluated,
                )
                all_observers.insert(0, self._records)
                earlier = [] if goes_on or config.overwrite else saved_in(config.run_dir / CHECKPOINTS)
            if show:
                all_observers.append(Terminal())
            if config.metrics_file is not None:
                all_observers.append(MetricsFile(config.metrics_file))
            self._engine = undo.enter_context(Engine(task, config, session=session, observers=all_observers))
            self._engine.learner.synchronizer.alone()
            if elsewhere is not None:
                self._engine.state.saver.upload = elsewhere.upload
                self._engine.state.saver.not_uploaded = elsewhere.not_uploaded
            self._tally = SummaryCounters(self._engine.learner.data.degree, task.metrics)
            self._engine.observers.add(self._tally)
            self._report = RunReport(self._engine, self._tally, self._clock, began)
            self._best = Best(config.keep_best)
            self._engine.state.kept |= {"callback": self._callback, "best": self._best}
            self._engine.state.kept["guard"] = self._engine.guard
            self._notes = list(filter(None, [head_line(session, config), earlier_runs_message(earlier)]))
            self._succession = succession(self._engine)
            self._heir = self._taken_up(heir)
            if config.resume is not None and self._heir.steps < 0:
                self._engine.load(config.resume, self._notes.append)
                if config.run_dir is not None and not goes_on_in(config.run_dir, config.resume):
                    self._engine.state.branch()
                hosts = sorted(set(session.control.gather_objects(session.environment.host)))
                of_hosts = f" of {few(hosts)}" if len(hosts) > 1 else ""
                ranks = counted(session.world_size, "rank") + of_hosts
                self._notes.append(
                    f"goes on after step {self._engine.steps_done} of {shown(config.resume)}, on {ranks}"
                )
            self._engine.state.agree_on_identity()
            self._notes += filter(None, [self._best.message])
            self._owned = undo.pop_all()

    def _taken_up(self, heir: CarriedState | None) -> CarriedState:
        """Takes over the state that a surviving rank kept in memory while others were replaced, if there is one."""
        if self._succession is None or heir is None:
            if heir is not None:
                raise NothingKeptError(
                    "these ranks cannot take over what others had in memory: all have to start again"
                )
            return CarriedState()
        found, message = self._succession.inherit(heir)
        self._notes += [message] if message else []
        return found

    def execute(self) -> Trained:
        """Trains to the end.

        Raises:
            InterruptedRunError: If a signal ends the run, after the records of what was done are written.
            RestartWithStateError: If another rank has died, and this one must continue in another start.
        """
        engine, summary = self._engine, None
        with self._owned, last_words(lambda: self._end(self._interrupted())):
            try:
                engine.observers.start(self._report.start())
                if self._records is not None:
                    self._records.catch_up(self._heir.records)
                for text in filter(None, (*self._report.header(), *self._notes)):
                    engine.observers.event(Note(engine.steps_done, text))
                with self._staying():
                    with self._deferring() as stop:
                        if self._config.non_finite == "restore":
                            falling_back(lambda: self._train(stop), engine, self._config)
                        else:
                            self._train(stop)
                        callback_result = self._callback.end()
                    engine.guard.check_terms(engine.steps_done)
                    tensors = engine.learner.tensors()
                    engine.learner.check_weights(engine.steps_done)
                    engine.profiler.close()
                    average = self._averages()
                    parts = self._session.control.gather_objects(self._report.part())
                    links = self._report.links(parts)
                summary = self._report.summary(parts, tensors, links=links)
            except RestartWithStateError:
                engine.profiler.close()
                self._end(None)
                self._held.close()
                bury(self._owned.pop_all())
                raise
            except (Exception, KeyboardInterrupt) as error:
                if asked() is not None or isinstance(error, InterruptedRunError | KeyboardInterrupt):
                    summary = self._interrupted()
                    self._end(summary)
                    self._let_go()  # the error keeps the batches; killed workers leave their temporary files
                elif self._records is not None and RUN_DIR not in os.environ:  # else the launcher writes it
                    self._records.failed(error)
                raise
            finally:
                self._end(summary)
            weights = self._saved(tensors)
            return Trained(summary, weights, self._session.rank, callback_result, average)

    def _staying(self) -> AbstractContextManager[None]:
        """Returns a context in which this rank survives the death of other ranks, if rank replacement is possible."""
        if self._succession is None:
            return nullcontext()
        return self._succession.staying(self._let_go)

    def _let_go(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def _end(self, summary: RunSummary | None) -> None:
        """Tells the observers that the run is over. Only the first call has an effect."""
        if self._ending.acquire(blocking=False):
            self._engine.observers.end(summary)

    def _interrupted(self) -> RunSummary:
        """Returns a summary from what this rank alone knows, because the other ranks may be gone."""
        self._engine.profiler.close()
        parts = [self._report.part()] * self._session.world_size
        return self._report.summary(parts, named_tensors(self._engine.model), interrupted=True)

    def _deferring(self) -> AbstractContextManager[Deferral]:
        """Returns a context that defers signals if the run can save. Otherwise a signal ends the run at once."""
        if self._config.run_dir is None:
            return nullcontext(Deferral(0.0))
        return deferring(self._config.grace_seconds, lambda: self._session.watchdog.progress_text)

    def _train(self, stop: Deferral) -> None:
        engine, run_dir, last = self._engine, self._config.run_dir, None
        kept = {"stays": self._succession is not None, "is_saved": self._heir.steps < 0}
        saving = (
            Saving(engine, self._config, run_dir / CHECKPOINTS, stop, self._best, **kept) if run_dir else None
        )
        stopping, progress = Stopping(engine), engine.progress
        self._try_evaluation(saving)
        if progress.epoch and not progress.position and not self._is_evaluated():
            self._evaluate(saving, progress.epoch - 1)  # the run ended before or during the evaluation
            if saving is not None:
                saving.followed()
        if progress.steps:
            stopping.resumed()
        self._callback.begin(engine)
        self._clock.start()
        self._batches = engine.batches()
        for batch in self._batches:
            check()
            engine.step_sync.wish = stopping.wish(saving.wish() if saving else 0.0)
            step = engine.step(batch)
            batch = last = step.batch  # as far as it was computed, and without its samples
            if batch.last:
                engine.settle()
                self._clock.stop()
                self._tell_skipped(batch.epoch)
            if saving is not None:
                saving.stepped(step)
            if batch.last:
                self._evaluate(saving, batch.epoch)
                self._clock.start()
            stopping.stepped(batch)
            self._clock.stop()
            self._callback.stepped(step)
            if saving is not None:
                saving.followed()
            self._clock.start()
        self._clock.stop()
        if last is not None and not last.last:
            self._tell_skipped(last.epoch)
        if saving is not None:
            saving.end()
        if not self._is_evaluated():
            self._evaluate(saving)
        if saving is not None:
            saving.followed()

    def _try_evaluation(self, saving: Saving | None) -> None:
        """Evaluates one batch before the first step. Ranks that take over what others had in memory do not."""
        engine, dataset = self._engine, self._task.evaluate
        if dataset is not None and not engine.progress.steps:
            with self._session.watchdog.phase("trial of the evaluation", step=0):
                metrics = try_evaluation(engine.learner, dataset, engine.feed.evaluation_options(0))
            if saving is not None and metrics:
                saving.check_best(metrics)

    def _evaluate(self, saving: Saving | None, epoch: int | None = None) -> None:
        """Evaluates after ``epoch`` if ``evaluate_every`` says so. Always evaluates if ``epoch`` is None, at the end of
        the run.
        """
        every = self._config.evaluate_every
        if self._task.evaluate is None or (epoch is not None and (not every or (epoch + 1) % every)):
            return
        metrics = self._engine.evaluate()
        if math.isnan(metrics.get("loss", 0.0)):
            message = "the loss of the evaluation is not a number: no target of it counts, or outputs are not finite"
            self._engine.observers.event(Note(self._engine.steps_done, message))
        if saving is not None:
            saving.evaluated(metrics)

    def _tell_skipped(self, epoch: int) -> None:
        engine = self._engine
        for record in engine.skips.record(engine.steps_done, epoch) if engine.skips else ():
            engine.observers.event(record)

    def _is_evaluated(self) -> bool:
        record = self._tally.evaluation_record
        return record is not None and record.step == self._engine.steps_done

    def _averages(self) -> dict[str, Tensor]:
        """Returns the average of the weights in the form of :meth:`_saved`; empty if there is none. A collective
        call."""
        learner = self._engine.learner
        if not learner.average.number:
            return {}
        with learner.average.shown():
            return self._saved(learner.tensors())

    def _saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the entries of ``tensors`` that ``model.load_state_dict`` takes, as copies on the CPU."""
        own = self._engine.model.state_dict()
        return {
            name: tensors.get(clean_name(name), value).detach().cpu().clone()
            for name, value in own.items()
            if isinstance(value, Tensor)
        }
