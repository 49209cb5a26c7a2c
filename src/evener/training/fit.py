"""A whole run: launch the ranks, find out where the run goes on from, and hand back what came of it."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, Unpack

from evener.checkpoint import layout as folder
from evener.checkpoint.weights_file import read_weights
from evener.components.offload.host_storage import check_outside
from evener.core.config.kwargs import Settings
from evener.core.config.offload import Offload
from evener.core.config.process_range import one_number
from evener.core.config.run_config import AUTO, RunConfig
from evener.core.config.validation import check_settings
from evener.core.observer import Observer
from evener.core.task.task import Task, TaskLike, resolve
from evener.distributed.environment import check_processes, default_processes, detect, kind_taken
from evener.distributed.launch.launch import is_launched, launch
from evener.distributed.launch.process_count import Headcount
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.launch.worker import Call, job_in
from evener.distributed.restart_count import generation
from evener.distributed.session import RUN_DIR, Session, rejoin
from evener.distributed.signals import GRACE_SECONDS
from evener.errors import ConfigurationError
from evener.training.builtin_tasks import BUILT_IN
from evener.training.factory import check_division, suggested_processes
from evener.training.lifecycle.attendant import Attendant
from evener.training.lifecycle.elastic import headcount_of, restarting
from evener.training.lifecycle.handover import HandedOnError, Heir, made_anew, succeeds
from evener.training.reporting.run_dir import goes_on_in, is_of_this_launch, new_run_dir, refuse_taken
from evener.training.reporting.task_file import OriginNote
from evener.training.run import Run, Trained

P = ParamSpec("P")
_PATHS = ("run_dir", "resume", "weights", "offload_to")


def _naming_settings(fit: Callable[P, Trained]) -> Callable[P, Trained]:
    """Has a setting that there is not told before a task that is missing."""
    own = inspect.signature(fit).parameters

    @wraps(fit)
    def named(*args: P.args, **kwargs: P.kwargs) -> Trained:
        check_settings(kwargs.keys() - own.keys(), [entry.name for entry in fields(RunConfig)])
        return fit(*args, **kwargs)

    return named


@_naming_settings
def fit(
    task: TaskLike,
    config: RunConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    rendezvous: Rendezvous | None = None,
    show: bool = True,
    observers: Sequence[Observer] = (),
    attendant: Attendant | None = None,
    run_home: Path | None = None,
    **settings: Unpack[Settings],
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
        attendant: Acts with the run between its steps, on every rank.
        run_home: Where to make a new run directory if the settings name none; None leaves none.

    Raises:
        EvenerError: Whatever ended the run; the class says what it was.
    """
    config = (config or RunConfig()).replace(**settings)
    resolve(task, BUILT_IN, options)
    config, run_home = resolved(config), run_home.absolute() if run_home is not None else None
    headcount = headcount_of(config, rendezvous) or Headcount((check_plan(config, rendezvous),))
    _refuse_taken(config)
    job = FitJob(
        task, dict(options or {}), config, show, list(observers), attendant, run_home, not is_launched()
    )
    results = launch(
        job,
        processes=headcount,
        timeout_seconds=config.timeout_seconds,
        rendezvous=restarting(config, rendezvous),
        device=config.device,
        grace_seconds=config.grace_seconds if config.run_dir or run_home else GRACE_SECONDS,
    )
    trained: Trained | None = results[0]
    assert trained is not None
    return trained


def _refuse_taken(config: RunConfig) -> None:
    """Refuses a directory that is another run's. What would be wrong in any directory is said first."""
    if config.run_dir is None or config.overwrite:
        return
    try:
        refuse_taken(config.run_dir, goes_on_in(config.run_dir, config.resume))
    except ConfigurationError:
        if config.resume is not None and str(config.resume) != AUTO:
            folder.candidates(config.resume)
        if config.weights is not None:
            read_weights(config.weights)
        raise


def resolved(config: RunConfig) -> RunConfig:
    """The settings with absolute paths: code of the user's may change to another directory while the run lasts."""
    paths = {name: getattr(config, name) for name in _PATHS}
    return config.replace(
        **{name: path.absolute() for name, path in paths.items() if path is not None and str(path) != AUTO}
    )


def check_plan(config: RunConfig, rendezvous: Rendezvous | None = None) -> int:
    """The number of ranks on this machine, after finding what cannot work before anything is started.

    Raises:
        ConfigurationError: For more processes than GPUs, a range of them, or shares that do not fit the ranks.
    """
    device = kind_taken(config.device)
    launched = detect()
    given = one_number(config.processes)
    suggested = given or suggested_processes(config) or default_processes(device)
    processes = launched.local_world_size if is_launched() else suggested
    check_processes(processes, device)
    check_outside(device, Offload.of(config.offload, config.offload_to))
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
    attendant: Attendant | None
    run_home: Path | None
    sent_back: bool
    """Whether the result travels to the launcher, who wants but one of each machine."""

    def __call__(self) -> Trained | None:
        """Once more for each start in which this rank stays and another is new."""
        job, heir = self, Heir() if succeeds() else None
        while True:
            try:
                return job._run(heir)
            except HandedOnError as handed_on:
                start, heir = handed_on.start, handed_on.heir
            rejoin(start)
            job = replace(_as_sent(), observers=self.observers, attendant=self.attendant)

    def _run(self, heir: Heir | None) -> Trained | None:
        config = self.config
        with Session(device=config.device, timeout_seconds=config.timeout_seconds) as session:
            task = resolve(self.task, BUILT_IN, self.options)()
            task = task if heir is None else replace(task, model=partial(made_anew, task.model))
            if config.run_dir is None and self.run_home is not None:
                config = config.replace(run_dir=self._new_directory(task, session))
            resume = _resumed(config, session)
            config = config.replace(resume=resume, weights=config.weights if resume is None else None)
            told = [*self.observers, *self._note(config.run_dir)]
            trained = Run(task, config, session, self.show, told, heir, self.attendant).execute()
            return trained if not self.sent_back or session.environment.local_rank == 0 else None

    def _note(self, run_dir: Path | None) -> list[Observer]:
        """What writes down which task this is, where the run leaves a directory."""
        return [] if run_dir is None else [OriginNote(run_dir, self.task, self.options)]

    def _new_directory(self, task: Task, session: Session) -> Path:
        """Made by rank 0, and the same for all."""
        run_home = self.run_home
        assert run_home is not None
        label = self.task if isinstance(self.task, str) else task.name
        mine = _same_again(lambda: new_run_dir(label, time.time(), run_home)) if session.rank == 0 else None
        path: Path = session.control.broadcast_object(mine)
        return path


def _as_sent() -> FitJob:
    """What this rank was sent, before it was used: a task may hold what a training changes."""
    job = job_in(Path(os.environ[RUN_DIR]))
    assert isinstance(job, Call)
    assert isinstance(job.function, FitJob)
    return job.function


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
    again = generation() != 0
    if not auto and not again:
        return config.resume
    found = False
    if own is not None and session.rank == 0 and (auto or is_of_this_launch(own)):
        found = bool(folder.complete(own / folder.CHECKPOINTS))
    if session.control.broadcast_object(found):
        return own
    return None if auto else config.resume
