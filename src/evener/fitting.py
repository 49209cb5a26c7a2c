"""A whole run: launch the ranks, train, evaluate, and leave a directory that tells what happened."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evener import checkpoint
from evener.assembly import check_division, suggested_processes
from evener.checkpoint import folder
from evener.config import AUTO, RunConfig
from evener.engine import Engine
from evener.errors import InterruptedRunError
from evener.nn.names import clean_name
from evener.observer import Observer
from evener.records import EvaluationRecord, Note, RunStart, RunSummary, StepRecord
from evener.report.terminal import Terminal
from evener.rundir import CHECKPOINTS, Records, RunDirectory, goes_on_in, new_run_dir, refuse_finished
from evener.runtime.agreement import evener_version
from evener.runtime.environment import check_processes, default_device, default_processes, detect
from evener.runtime.interrupt import GRACE_SECONDS, Deferral, asked, check, deferring, last_words
from evener.runtime.launch import is_launched, launch
from evener.runtime.rendezvous import Rendezvous
from evener.runtime.session import RUN_DIR, Session
from evener.saving import Saving
from evener.strategies.model import named_tensors
from evener.task import Task, TaskLike, resolve
from evener.tasks import BUILT_IN


@dataclass(frozen=True)
class Trained:
    """What :func:`fit` gives: the summary of the run, and the weights as ``model.load_state_dict`` takes them."""

    summary: RunSummary
    weights: dict[str, Tensor]
    rank: int = 0
    """The rank that it comes from: 0, and on further machines that of their first process."""


def fit(
    task: TaskLike,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    rendezvous: Rendezvous | None = None,
    show: bool = True,
    observers: Sequence[Observer] = (),
    run_home: Path | None = None,
    **settings: Any,
) -> Trained:
    """Trains a task on all ranks.

    Args:
        task: A :class:`Task`, a function that builds one, its name ``package.module:function``, or ``digits``,
            ``mnist``, ``shakespeare``.
        config: The settings; ``settings`` change single ones, as in ``fit("digits", processes=2)``.
        options: Keyword arguments for the task's function.
        rendezvous: How several machines meet, in torchrun's words.
        show: Whether rank 0 shows progress on standard error.
        observers: Told of the run, besides the records and the terminal.
        run_home: Where to make a new run directory if the settings name none; None leaves none.

    Raises:
        EvenerError: Whatever ended the run; the class says what it was.
    """
    config = (config or RunConfig()).replace(**settings)
    resolve(task, BUILT_IN, options)
    if config.run_dir is not None and not (config.overwrite or goes_on_in(config.run_dir, config.resume)):
        refuse_finished(config.run_dir)
    processes = check_plan(config, rendezvous)
    job = FitJob(task, dict(options or {}), config, show, list(observers), run_home, not is_launched())
    results = launch(
        job,
        processes=processes,
        timeout_seconds=config.timeout_seconds,
        rendezvous=rendezvous,
        device=config.device,
        grace_seconds=config.grace_seconds if config.run_dir or run_home else GRACE_SECONDS,
    )
    trained: Trained | None = results[0]
    assert trained is not None
    return trained


def check_plan(config: RunConfig, rendezvous: Rendezvous | None = None) -> int:
    """The number of ranks on this machine, after finding what cannot work before anything is started.

    Raises:
        ConfigurationError: For more processes than GPUs, or shares that do not fit the ranks.
    """
    device = config.device or default_device()
    launched = detect()
    suggested = config.processes or suggested_processes(config) or default_processes(device)
    processes = launched.local_world_size if is_launched() else suggested
    check_processes(processes, device)
    if rendezvous is None:
        check_division(config, launched.world_size if is_launched() else processes)
    return processes


@dataclass(frozen=True)
class FitJob:
    """What a rank is sent to do."""

    task: TaskLike
    options: dict[str, Any]
    config: RunConfig
    show: bool
    observers: list[Observer]
    run_home: Path | None
    sent_back: bool
    """Whether the result travels to the launcher, who wants but one of each machine."""

    def __call__(self) -> Trained | None:
        config = self.config
        with Session(device=config.device, timeout_seconds=config.timeout_seconds) as session:
            task = resolve(self.task, BUILT_IN, self.options)()
            if config.run_dir is None and self.run_home is not None:
                config = config.replace(run_dir=self._new_directory(task, session))
            config = config.replace(resume=_resumed(config, session))
            trained = Run(task, config, session, self.show, self.observers).execute()
            return trained if not self.sent_back or session.environment.local_rank == 0 else None

    def _new_directory(self, task: Task, session: Session) -> Path:
        """Made by rank 0, and the same for all."""
        run_home = self.run_home
        assert run_home is not None
        label = self.task if isinstance(self.task, str) else task.name
        mine = _same_again(lambda: new_run_dir(label, time.time(), run_home)) if session.rank == 0 else None
        path: Path = session.control.broadcast_object(mine)
        return path


def _same_again(make: Callable[[], Path]) -> Path:
    """What ranks that were started again made the first time, if Evener's launcher has started them."""
    private = os.environ.get(RUN_DIR)
    note = Path(private) / "run-directory" if private else None
    if note is not None and note.exists():
        return Path(note.read_text())
    made = make()
    if note is not None:
        note.write_text(str(made))
    return made


def _resumed(config: RunConfig, session: Session) -> Path | None:
    """Where the run goes on from: as it is told, and from its own checkpoint if it may choose or was started again."""
    own, auto = config.run_dir, config.resume is not None and str(config.resume) == AUTO
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not auto and not again:
        return config.resume
    found = own is not None and session.rank == 0 and bool(folder.complete(own / CHECKPOINTS))
    if session.control.broadcast_object(found):
        return own
    return None if auto else config.resume


class Tally(Observer):
    """What the summary tells of steps and evaluations."""

    def __init__(self, parts: int) -> None:
        self.taken = [0] * parts
        self.last: StepRecord | None = None
        self.skipped = 0
        self.evaluation_record: EvaluationRecord | None = None

    everywhere = True

    def step(self, record: StepRecord) -> None:
        self.last = record
        self.skipped += record.skipped
        self.taken = [total + share for total, share in zip(self.taken, record.shares, strict=True)]

    def evaluation(self, record: EvaluationRecord) -> None:
        self.evaluation_record = record

    @property
    def samples(self) -> int:
        return sum(self.taken)


class Clock:
    """The seconds of training, without what comes between."""

    def __init__(self) -> None:
        self._before = 0.0
        self._began: float | None = None

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._before, self._began = self.seconds, None

    @property
    def seconds(self) -> float:
        """So far, also while it runs."""
        return self._before + (0.0 if self._began is None else time.perf_counter() - self._began)


class Run:
    """One run of one task, on one of its ranks."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        session: Session,
        show: bool,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._task, self._config, self._session = task, config, session
        self._clock = Clock()
        self._ending = threading.Lock()
        with ExitStack() as undo:
            told = list(observers)
            if config.run_dir is not None and session.rank == 0:
                goes_on = goes_on_in(config.run_dir, config.resume)
                undo.enter_context(RunDirectory(config.run_dir, goes_on or config.overwrite))
                told.insert(0, Records(config.run_dir, goes_on, config.on_full_disk == "stop"))
            if show:
                told.append(Terminal())
            self._engine = undo.enter_context(Engine(task, config, session=session, observers=told))
            self._tally = Tally(self._engine.learner.data.degree)
            self._engine.observers.add(self._tally)
            self._notes: list[str] = []
            if config.resume is not None:
                self._engine.load(config.resume, self._notes.append)
                self._notes.append(f"goes on after step {self._engine.steps_done} of {config.resume}")
            throttle = self._engine.learner.settings.throttle
            self._emulation = throttle.words if throttle else ""
            self._owned = undo.pop_all()

    def execute(self) -> Trained:
        """Trains to the end.

        Raises:
            InterruptedRunError: If a signal ends the run, after the records of what was done are written.
        """
        engine, summary = self._engine, None
        with self._owned, last_words(lambda: self._end(self._interrupted())):
            try:
                engine.observers.start(self._start())
                for words in filter(None, (self._emulation, *self._notes)):
                    engine.observers.event(Note(engine.steps_done, words))
                with self._deferring() as stop:
                    self._train(stop)
                tensors = engine.learner.tensors()
                engine.learner.check_weights(engine.steps_done)
                summary = self._summary(self._session.control.gather_objects(self._own_part()), tensors)
            except (Exception, KeyboardInterrupt) as error:
                if asked() is not None or isinstance(error, InterruptedRunError | KeyboardInterrupt):
                    summary = self._interrupted()
                raise
            finally:
                self._end(summary)
            return Trained(summary, self._saved(tensors), self._session.rank)

    def _end(self, summary: RunSummary | None) -> None:
        """Tells the observers, once."""
        if self._ending.acquire(blocking=False):
            self._engine.observers.end(summary)

    def _interrupted(self) -> RunSummary:
        """What one rank alone knows, for the others may be gone."""
        parts = [self._own_part()] * self._session.world_size
        return self._summary(parts, named_tensors(self._engine.model), interrupted=True)

    def _start(self) -> RunStart:
        engine, world_size = self._engine, self._session.world_size
        resolved = {"task": self._task.name, **self._config.as_dict()}
        resolved |= {"batch_size": engine.batch_size, "world_size": world_size}
        return RunStart(
            task=self._task.name,
            settings=resolved,
            world_size=world_size,
            batch_size=engine.batch_size,
            total_steps=engine.total_steps,
            steps_done=engine.steps_done,
            parts=tuple(engine.learner.data.owners(range(engine.learner.data.degree))),
        )

    def _deferring(self) -> AbstractContextManager[Deferral]:
        """Signals, for a run that can save; another ends at once."""
        if self._config.run_dir is None:
            return nullcontext(Deferral(0.0))
        return deferring(self._config.grace_seconds, lambda: self._session.watchdog.progress_text)

    def _train(self, stop: Deferral) -> None:
        engine, run_dir, last = self._engine, self._config.run_dir, None
        saving = Saving(engine, self._config, run_dir / CHECKPOINTS, stop) if run_dir else None
        self._clock.start()
        for batch in engine.batches():
            check()
            engine.ledger.wish = saving.wish() if saving else 0.0
            engine.step(batch)
            last = batch
            if batch.last:
                engine.settle()
                self._clock.stop()
                self._tell_skipped(batch.epoch)
            if saving is not None:
                saving.stepped(batch)
            if batch.last:
                self._evaluate(saving, batch.epoch)
                self._clock.start()
        self._clock.stop()
        if last is not None and not last.last:
            self._tell_skipped(last.epoch)
        if saving is not None:
            saving.end()
        if not self._is_evaluated():
            self._evaluate(saving)

    def _evaluate(self, saving: Saving | None, epoch: int | None = None) -> None:
        """After an epoch if that is its turn, and at the end."""
        every = self._config.evaluate_every
        if self._task.evaluate is None or (epoch is not None and (not every or (epoch + 1) % every)):
            return
        metrics = self._engine.evaluate()
        if saving is not None:
            saving.evaluated(metrics)

    def _tell_skipped(self, epoch: int) -> None:
        engine = self._engine
        for record in engine.skips.record(engine.steps_done, epoch) if engine.skips else ():
            engine.observers.event(record)

    def _is_evaluated(self) -> bool:
        record = self._tally.evaluation_record
        return record is not None and record.step == self._engine.steps_done

    def _own_part(self) -> dict[str, Any]:
        times = self._engine.times
        device = self._session.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        return {
            "device": f"{device} {name}".strip(),
            "times": {
                "compute_seconds": times.compute,
                "wait_seconds": times.wait,
                "input_seconds": times.input,
            },
        }

    def _summary(
        self, parts: list[dict[str, Any]], weights: Mapping[str, Tensor], interrupted: bool = False
    ) -> RunSummary:
        engine, tally, seconds = self._engine, self._tally, self._clock.seconds
        return RunSummary(
            task=self._task.name,
            strategy=engine.learner.name,
            world_size=self._session.world_size,
            devices=[part["device"] for part in parts],
            steps=engine.steps_done,
            epochs=engine.progress.epochs_begun,
            samples=engine.samples_done,
            seconds=seconds,
            samples_per_second=tally.samples / seconds if seconds else 0.0,
            final_loss=tally.last.loss if tally.last else float("nan"),
            metrics=tally.evaluation_record.metrics if tally.evaluation_record else {},
            shares=self._shares(),
            weights_digest=checkpoint.weights_digest(weights),
            versions=versions(),
            batch_size=engine.batch_size,
            seed=self._config.seed,
            ranks=[part["times"] for part in parts],
            interrupted=interrupted,
            run_dir=str(self._config.run_dir) if self._config.run_dir else None,
            emulation=self._emulation,
            allreduce=engine.learner.synchronizer.words,
            skipped_steps=engine.guard.skipped,
            skipped=tally.skipped,
        )

    def _shares(self) -> list[float]:
        """The part of all samples that each rank computed; of ranks that compute the same ones, each had them all."""
        tally = self._tally
        parts = [count / tally.samples if tally.samples else 0.0 for count in tally.taken]
        return self._engine.learner.data.owners(parts)

    def _saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the tensors that ``model.load_state_dict`` takes, on the CPU, as copies."""
        own = self._engine.model.state_dict()
        return {
            name: tensors.get(clean_name(name), value).detach().cpu().clone()
            for name, value in own.items()
            if isinstance(value, Tensor)
        }


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {
        "evener": evener_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
    }
