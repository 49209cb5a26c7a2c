"""A run whose directory lies elsewhere: locked and brought here before it begins, complete elsewhere when it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from evener.checkpoint.remote.fetch import fetched
from evener.checkpoint.remote.files import RemoteFiles
from evener.checkpoint.remote.upload import RemoteRun
from evener.core.config.run_config import AUTO, RunConfig
from evener.core.elsewhere import url_of
from evener.core.os_errors import os_error_message
from evener.core.stdio import unheard
from evener.core.text import printable
from evener.distributed.hosts import all_gather
from evener.distributed.recovery.replacement import RecalledError
from evener.distributed.session import Session
from evener.errors import ConfigurationError, EvenerError, StorageError


def _say(text: str) -> None:
    print(f"evener: {printable(text)}", file=unheard(sys.stderr), flush=True)


def check_elsewhere(config: RunConfig) -> None:
    """Refuses URLs that cannot be read at all, before any rank is started. Brings weights here, which may take long.

    Raises:
        ConfigurationError: If the package of a protocol is missing, or there are no weights.
        StorageError: If the weights cannot be read.
    """
    for path in (config.run_dir, config.resume, config.weights):
        if path is not None and str(path) != AUTO and (url := url_of(path)):
            RemoteFiles(url)
    if config.weights is not None:
        fetched(config.weights, _say, checkpoint=True)


@contextmanager
def running_elsewhere(run_dir: Path | None, session: Session) -> Iterator[RemoteRun | None]:
    """Holds the run's directory elsewhere, if it has one. A collective call.

    Raises:
        ConfigurationError: If it cannot hold a run; on all ranks.
        StorageError: At the end of a run that was not interrupted, if not everything could be uploaded.
    """
    if run_dir is None or url_of(run_dir) is None:
        yield None
        return
    group, run = session.patient_group(), None
    wrong: EvenerError | None = None
    with ExitStack() as held:
        with session.watchdog.together("looking at the run directory"):
            try:
                run = RemoteRun(run_dir, _say)
                if run.files.is_of_this_process and session.world_size > 1:
                    raise ConfigurationError(
                        f"{run.url} lies in the memory of one process: use --processes 1"
                    )
                if session.rank == 0:
                    held.enter_context(run.held())
            except EvenerError as error:
                wrong = error
            except OSError as error:
                wrong = StorageError(f"{run_dir} cannot hold a run: {os_error_message(error)}")
            lacks = run.lacks() if run is not None and session.rank == 0 and wrong is None else ""
            found = [(wrong, lacks)] if group is None else all_gather((wrong, lacks), group)
        for each, _ in found:
            if each is not None:
                raise each
        assert run is not None
        if lacks := found[0][1]:
            run.not_uploaded = f"{lacks} of an earlier run on this host is not in {run.url} yet"
        try:
            yield run
        except RecalledError:  # goes on at once
            raise
        except BaseException:
            if session.rank == 0 and (wrong_at_end := _completed(run, run_dir)):
                _say(wrong_at_end)
            raise
        with session.watchdog.together("uploading the end of the run"):
            wrong_at_end = _completed(run, run_dir) if session.rank == 0 else ""
            if group is not None:
                wrong_at_end = all_gather(wrong_at_end, group)[0]
        if wrong_at_end:
            raise StorageError(wrong_at_end)


def _completed(run: RemoteRun, run_dir: Path) -> str:
    """Uploads what the run has written last. Returns what went wrong."""
    try:
        wrong = "" if run.finish() else "its last checkpoint could not be uploaded"
    except (StorageError, OSError) as error:
        wrong = str(error)
    return wrong and (
        f"{run.url} does not have all of the run: {wrong}. It is in {run_dir} on this host; the same command with "
        f"--resume {run.url} uploads it from here"
    )


def fetched_on_all_hosts(path: Path, session: Session) -> None:
    """Brings a checkpoint to every host. A collective call; does nothing for a path that does not lie elsewhere.

    Raises:
        EvenerError: On all ranks, if it failed on one.
    """
    if url_of(path) is None:
        return
    group = session.patient_group()
    wrong: EvenerError | None = None
    with session.watchdog.together("reading a checkpoint from elsewhere"):
        if session.environment.local_rank == 0:
            try:
                fetched(path, _say, checkpoint=True)
            except EvenerError as error:
                wrong = error
        found = [wrong] if group is None else all_gather(wrong, group)
    for each in filter(None, found):
        raise each
