"""Keeps the files of a run from being replaced by what a command writes, such as weights, pages and drawings."""

from __future__ import annotations

import os
from pathlib import Path

from evener.checkpoint.layout import CHECKPOINTS, LATEST
from evener.checkpoint.run_mark import MARK, mark_in
from evener.core.attempts import ATTEMPTS
from evener.core.record_index import INDEX
from evener.core.records import RECORDS
from evener.errors import ConfigurationError

RUN_FILES = ("config.json", "task.json", RECORDS, INDEX, ATTEMPTS, "summary.json", MARK)
"""Files that a run writes into its directory, beside its checkpoints."""


def check_output(path: Path) -> None:
    """Checks that a file may be written to ``path``, also in the place of one that is there.

    Raises:
        ConfigurationError: If a run could not be read or resumed then: it is one of the run's own files, or within its
            checkpoints.
    """
    place = Path(os.path.realpath(path))
    own = place.name in RUN_FILES and place.exists() and mark_in(place.parent) is not None
    if own or any(_holds_checkpoints(above) for above in place.parents):
        raise ConfigurationError(
            f"{path} is a file of a run, or lies in its checkpoints, and the run needs these: name a file elsewhere"
        )


def _holds_checkpoints(directory: Path) -> bool:
    """Returns True for a checkpoint, and for a directory of checkpoints."""
    mark = mark_in(directory)
    return "steps" in (mark or ()) or (
        directory.name == CHECKPOINTS
        and (mark_in(directory.parent) is not None or (directory / LATEST).is_file())
    )
