"""A whole run: starts the ranks, decides where the run resumes from, and returns the result."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, Unpack

import psutil

from evener.checkpoint import layout as folder
from evener.checkpoint.weights_file import read_weights
from evener.components.offload.host_storage import check_outside
from evener.core.config.kwargs import Settings
from evener.core.config.offload import Offload
from evener.core.config.process_range import one_number
from evener.core.config.run_config import AUTO, RunConfig
from evener.core.config.validation import as_path, check_settings
from evener.core.elsewhere import url_of
from evener.core.observer import Observer
from evener.core.task.task import Task, TaskLike, resolve
from evener.distributed.environment import check_processes, default_processes, detect, kind_taken
from evener.distributed.launch.launch import is_launched, launch
from evener.distributed.launch.notice import watching
from evener.distributed.launch.process_count import Headcount
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.launch.worker import RankCall, job_in
from evener.distributed.recovery.regroup import RegroupError
from evener.distributed.recovery.replacement import say_ready
from evener.distributed.restart_count import generation
from evener.distributed.session import RUN_DIR, Session, rejoin
from evener.distributed.signals import GRACE_SECONDS
from evener.errors import ConfigurationError
from evener.training.builtin_tasks import BUILT_IN
from evener.training.factory import check_division, suggested_processes
from evener.training.lifecycle.callback import Callback
from evener.training.lifecycle.elastic import headcount_of, joining_terms, restarting
from evener.training.lifecycle.handover import CarriedState, RestartWithStateError, made_anew, succeeds
from evener.training.reporting.notebook import notebook_bar
from evener.training.reporting.run_dir import goes_on_in, is_of_this_launch, new_run_dir, refuse_taken
from evener.training.reporting.task_file import OriginNote
from evener.training.run import Run, Trained
from evener.training.state.remote_run import check_elsewhere, running_elsewhere

P = ParamSpec("P")
_PATHS = ("run_dir", "resume", "weights", "offload_to", "metrics_file")


def _naming_settings(fit: Callable[P, Trained]) -> Callable[P, Trained]:
    """Wraps ``fit`` so that an unknown setting is reported before a missing task."""
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
    callback: Callback | None = None,
    run_home: str | Path | None = None,
    **settings: Unpack[Settings],
) -> Trained:
    """Trains a task on all ranks.

    Args:
        task: A :class:`Task`, a function that builds one, its name ``package.module:function``, or ``digits``,
            ``mnist``, ``shakespeare``.
        config: The settings; ``settings`` change single ones, as in ``fit("digits", processes=2)``.
        options: Keyword arguments for the task's function.
        rendezvous: How several machines meet, in torchrun's terms.
        show: Whether rank 0 shows progress on standard error.
        observers: Told of the run, besides the records and the terminal.
        callback: Called on every rank between the steps of the run.
        run_home: Where to make a new run directory if the settings name none. If None, no directory is made.

    Raises:
        EvenerError: Whatever ended the run; the class tells the cause.
    """
    Rendezvous.check(rendezvous)
    config = (config or RunConfig()).replace(**settings)
    resolve(task, BUILT_IN, options)
    config, home = resolved(config), as_path("run_home", run_home)
    home = None if home is None else home.absolute()
    if config.keep_best is not None and config.run_dir is None and home is None:
        raise ConfigurationError(
            f"keep_best={config.keep_best!r} keeps a checkpoint in the run directory, and the run has none: name one "
            "with run_dir"
        )
    headcount = headcount_of(config, rendezvous) or Headcount((check_plan(config, rendezvous),))
    check_elsewhere(config)
    # Otherwise it may be that of the run which this machine joins.
    if rendezvous is None or not rendezvous.is_elastic:
        _refuse_taken(config)
    with (
        notebook_bar(show) as bar,
        watching(config.notice_command if detect().local_rank == 0 else None),
    ):
        told = [*observers, *([] if bar is None else [bar])]
        shows = show and bar is None
        job = FitJob(task, dict(options or {}), config, shows, told, callback, home, not is_launched())
        results = launch(
            job,
            processes=headcount,
            timeout_seconds=config.timeout_seconds,
            rendezvous=restarting(config, rendezvous),
            device=config.device,
            grace_seconds=config.grace_seconds if config.run_dir or home else GRACE_SECONDS,
            terms=joining_terms(task, config, options),
        )
    trained: Trained | None = results[0]
    assert trained is not None
    return trained


def _refuse_taken(config: RunConfig) -> None:
    """Refuses a directory that belongs to another run. Errors that would occur in any directory are raised first.

    One that lies elsewhere is looked at later, when this run has locked it.
    """
    if config.run_dir is None or config.overwrite or url_of(config.run_dir) is not None:
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
    """Returns the settings with absolute paths, because user code may change the working directory during the run."""
    paths = {name: getattr(config, name) for name in _PATHS}
    return config.replace(
        **{name: path.absolute() for name, path in paths.items() if path is not None and str(path) != AUTO}
    )


def check_plan(config: RunConfig, rendezvous: Rendezvous | None = None) -> int:
    """Returns the number of ranks on this machine, after checking what can be checked before any rank is started.

    Raises:
        ConfigurationError: For more processes than GPUs, a range of them, or shares that do not fit the ranks.
    """
    device = kind_taken(config.device)
    launched = detect()
    given = one_number(config.processes)
    suggested = given or suggested_processes(config) or default_processes(device)
    processes = launched.local_world_size if is_launched() else suggested
    check_processes(processes, device)
    check_outside(device, Offload.from_settings(config.offload, config.offload_to))
    if rendezvous is None:
        check_division(config, launched.world_size if is_launched() else processes)
    return processes


@dataclass(frozen=True)
class FitJob:
    """The job that a rank runs. The launcher pickles it and sends it to the rank."""

    task: TaskLike
    options: dict[str, Any]
    config: RunConfig
    show: bool
    observers: list[Observer]
    callback: Callback | None
    run_home: Path | None
    sent_back: bool
    """True if the rank sends its result back to the launcher, which needs only one result from each machine."""
    began: float = field(default_factory=time.time)
    """When the run was started, in seconds since the epoch."""

    def __call__(self) -> Trained | None:
        """Runs the job, and runs it again each time that this rank survives while another is replaced."""
        job, heir = self, CarriedState() if succeeds() else None
        began = self.began if generation() == 0 else psutil.Process().create_time()
        if heir is not None:
            say_ready(Path(os.environ[RUN_DIR]))
        while True:
            try:
                return job._run(heir, began)
            except RegroupError:
                return None
            except RestartWithStateError as handed_on:
                start, heir = handed_on.start, handed_on.heir
                began = time.time()
            rejoin(start)
            job = replace(_as_sent(), observers=self.observers, callback=self.callback)

    def _run(self, heir: CarriedState | None, began: float) -> Trained | None:
        config = self.config
        with (
            Session(device=config.device, timeout_seconds=config.timeout_seconds) as session,
            running_elsewhere(config.run_dir, session) as elsewhere,
        ):
            task = resolve(self.task, BUILT_IN, self.options)()
            task = task if heir is None else replace(task, model=partial(made_anew, task.model))
            if config.run_dir is None and self.run_home is not None:
                config = config.replace(run_dir=self._new_directory(task, session))
            resume = _resumed(config, session)
            config = config.replace(resume=resume, weights=config.weights if resume is None else None)
            observers = [*self.observers, *self._note(config.run_dir)]
            trained = Run(
                task, config, session, self.show, observers, heir, self.callback, elsewhere, began
            ).execute()
            return trained if not self.sent_back or session.environment.local_rank == 0 else None

    def _note(self, run_dir: Path | None) -> list[Observer]:
        """Returns the observer that writes down the task, if the run has a directory."""
        return [] if run_dir is None else [OriginNote(run_dir, self.task, self.options)]

    def _new_directory(self, task: Task, session: Session) -> Path:
        """Makes a run directory on rank 0 and returns its path on all ranks. A collective call."""
        run_home = self.run_home
        assert run_home is not None
        label = self.task if isinstance(self.task, str) else task.name
        mine = _same_again(lambda: new_run_dir(label, time.time(), run_home)) if session.rank == 0 else None
        path: Path = session.control.broadcast_object(mine)
        if session.environment.local_rank == 0:
            _same_again(lambda: path)  # rank 0 may be on this machine some time
        return path


def _as_sent() -> FitJob:
    """Returns the job as this rank received it, unused, because training may change objects that a task holds."""
    job = job_in(Path(os.environ[RUN_DIR]))
    assert isinstance(job, RankCall)
    assert isinstance(job.function, FitJob)
    return job.function


def _same_again(make: Callable[[], Path]) -> Path:
    """Returns the path made at the first start, if Evener's launcher started these ranks again; otherwise makes it."""
    private = os.environ.get(RUN_DIR)
    note = Path(private) / "run-directory" if private else None
    if note is not None and note.exists():
        return Path(note.read_text())
    made = make()
    if note is not None:
        note.write_text(str(made))
    return made


def _resumed(config: RunConfig, session: Session) -> Path | None:
    """Returns the path that the run resumes from, or None if it begins anew. A collective call.

    With ``resume="auto"``, or if the ranks were started again, this is the run's own checkpoint if there is one.
    """
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
