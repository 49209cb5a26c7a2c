"""Starts ranks that call a function, and returns their results.

``launch(train, config, processes=4)`` returns what ``train(config)`` returned on each rank.

The function is sent with cloudpickle to new interpreters, so it may be a lambda, or a function from a notebook or from
a script without a ``__main__`` guard. If this process is already a rank (torchrun, SLURM), or one rank suffices, the
function is called in this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from evener.core.config.process_range import one_number
from evener.core.config.time_limit import TIMEOUT_SECONDS
from evener.core.config.validation import at_least, positive_seconds
from evener.core.os_errors import storage_errors
from evener.distributed import loopback
from evener.distributed.environment import (
    SHARED_CORES,
    check_processes,
    default_processes,
    detect,
    kind_taken,
    refuse_mpi,
)
from evener.distributed.file_descriptors import make_room
from evener.distributed.launch.agent import Agent
from evener.distributed.launch.process_count import Headcount
from evener.distributed.launch.rendezvous import Rendezvous
from evener.distributed.launch.scratch_dir import UNWRITTEN, scratch
from evener.distributed.launch.worker import BOOTSTRAP, Job, RankCall, result_of
from evener.distributed.recovery.replacement import ALLOWED
from evener.distributed.session import RUN_DIR, threads_per_rank
from evener.distributed.signals import GRACE_SECONDS
from evener.distributed.watchdog.store_health import LAUNCHER_PID
from evener.errors import ConfigurationError
from evener.torch_internals import interpreter

R = TypeVar("R")


def launch(
    fn: Callable[..., R],
    *args: object,
    processes: int | Headcount | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    rendezvous: Rendezvous | None = None,
    device: str | None = None,
    grace_seconds: float = GRACE_SECONDS,
    terms: Mapping[str, Any] | None = None,
    **kwargs: object,
) -> list[R]:
    """Calls ``fn(*args, **kwargs)`` on every rank.

    Args:
        processes: Ranks on this machine; by default one per GPU, or on the CPU one per core up to four. A `Headcount`
            allows restarts with fewer ranks after a death, as :func:`evener.fit` does from its checkpoint.
        timeout_seconds: How long a rank waits for others before the run ends with a report on who is missing.
        rendezvous: How several machines find each other; one machine by default.
        device: ``cpu`` or ``cuda``; limits the number of ranks. By default cuda if there is a GPU, else cpu.
        grace_seconds: How long ranks may take to end by themselves after a stop signal.
        terms: With ``nnodes`` MIN:MAX, what must be equal on the machines: one that differs is refused, and the others
            do not notice. Values that JSON has.

    Returns:
        The results of this machine's ranks in the last start, in order of rank. If this process is already a rank, the
        one result of ``fn``.

    Raises:
        ConfigurationError: If this machine cannot run so many processes, ``fn`` is no function or cannot be sent to
            them, or a time or the rendezvous is none.
        RankError: If a rank died, or raised an exception; then the message has its traceback.
        RankTimeoutError: If a rank waited in vain. The message says which rank is missing.
        InterruptedRunError: On SIGINT (Ctrl-C) or SIGTERM, after all ranks have ended. The message says where the run
            was.
        EvenerError: An error of this type that a rank raised, with the rank in its message.
    """
    if not callable(fn):
        raise ConfigurationError(f"{fn!r} is no function: give one, and its arguments after it")
    positive_seconds("timeout_seconds", timeout_seconds)
    positive_seconds("grace_seconds", grace_seconds)
    Rendezvous.check(rendezvous)
    if is_launched():
        return [fn(*args, **kwargs)]
    headcount = processes if isinstance(processes, Headcount) else resolve_processes(processes, device)
    job = RankCall(fn, args, kwargs, timeout_seconds)
    if headcount.start == 1 and (
        rendezvous is None or (rendezvous.is_standalone and not rendezvous.max_restarts)
    ):
        with job.signals():
            return [job.run()]
    with scratch() as directory:
        ranks = run_job(job, headcount, rendezvous, directory, sys.path, grace_seconds, terms)
        return [result_of(directory, local_rank) for local_rank in range(ranks)]


def is_launched() -> bool:
    """Returns True if this process is already one of several ranks."""
    return detect().world_size > 1


def resolve_processes(processes: int | None, device: str | None) -> Headcount:
    """Returns the number of ranks to start on this machine; for None the default for ``device``.

    Raises:
        ConfigurationError: If this machine cannot run so many processes, or ``processes`` is a range.
    """
    processes = one_number(processes)
    device = kind_taken(device)
    if processes is None:
        return Headcount((default_processes(device),))
    at_least("processes", processes, 1)
    check_processes(processes, device)
    return Headcount((processes,))


def run_job(
    job: Job,
    processes: Headcount,
    rendezvous: Rendezvous | None,
    run_dir: Path,
    path: list[str],
    grace_seconds: float = GRACE_SECONDS,
    terms: Mapping[str, Any] | None = None,
) -> int:
    """Starts ranks, runs a job on them until all have ended, and returns the number of ranks in the last start.

    Args:
        job: What each rank runs.
        processes: Number of ranks on this machine.
        rendezvous: How several machines find each other; None for one machine.
        run_dir: A private directory, in which the ranks leave their results.
        path: The ranks' ``sys.path``.
        grace_seconds: How long ranks may take to end by themselves after a stop signal.
        terms: What must be equal on machines that join later.

    Raises:
        ConfigurationError: If the job cannot be sent to the ranks, the limit of open files is too low, or MPI has
            started this process beside others.
        EvenerError: The failure that ended the run.
    """
    met = rendezvous or Rendezvous()
    if met.is_standalone:
        refuse_mpi()
    make_room(processes.start)
    _write_job(job, path, run_dir)
    arguments = [*interpreter.flags(), "-u", "-c", BOOTSTRAP, str(run_dir)]
    variables = _variables(run_dir, processes.start, met)
    agent = Agent(arguments, processes, met, run_dir, variables, job.timeout_seconds, grace_seconds, terms)
    agent.run_to_end()
    return agent.ranks


def _write_job(job: Job, path: list[str], run_dir: Path) -> None:
    try:
        sent = cloudpickle.dumps(job)
    except Exception as error:
        raise ConfigurationError(
            f"the function or one of its arguments cannot be sent to other processes: {error}; "
            "open files, locks, loaders and the like on the ranks instead"
        ) from error
    with storage_errors(UNWRITTEN):
        (run_dir / "job").write_bytes(sent)
        (run_dir / "path.json").write_text(json.dumps(path))


def _variables(run_dir: Path, processes: int, met: Rendezvous) -> Mapping[str, str]:
    variables = {RUN_DIR: str(run_dir), LAUNCHER_PID: str(os.getpid())}
    if met.is_standalone:
        variables |= loopback.variables()
    if met.max_restarts and not met.is_elastic:
        variables[ALLOWED] = "1"
    if "OMP_NUM_THREADS" not in os.environ:
        variables |= {"OMP_NUM_THREADS": str(threads_per_rank(processes)), SHARED_CORES: "1"}
    return variables
