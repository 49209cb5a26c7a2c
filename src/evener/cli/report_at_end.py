"""``evener train --report``: writes the report of the run into its directory at the end, whatever ended the run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evener.core.elsewhere import is_url
from evener.core.observer import Observer
from evener.core.records import RunStart
from evener.core.stdio import unheard
from evener.core.text import from_here, said
from evener.training.reporting.width import fitted

REPORT = "report.html"
"""Name of the page in a run directory."""


class DirectoryNote(Observer):
    """Notes the directory of the run in a file, for this process: the run may be one of other processes.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, run: RunStart) -> None:
        if run.run_dir is not None:
            self._path.write_text(run.run_dir)
            if not is_url(run.run_dir):
                (Path(run.run_dir) / REPORT).unlink(missing_ok=True)  # of an earlier run


@contextmanager
def report_at_end(wanted: bool) -> Iterator[list[Observer]]:
    """Writes the report when the block has ended, also by an error.

    Yields:
        The observers that the run needs for it; none if ``wanted`` is False.
    """
    if not wanted:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="evener-report-") as directory:
        note = Path(directory) / "run-directory"
        try:
            yield [DirectoryNote(note)]
        finally:
            if note.exists():  # otherwise the run did not begin, or rank 0 is on another machine
                write_report(note.read_text())


def write_report(run_dir: str) -> None:
    """Writes the report into a run directory, and says so. What fails here is said, and changes nothing else."""
    try:
        words = _written(run_dir)
    except Exception as error:
        words = f"the report of {run_dir} could not be made: {type(error).__name__}: {said(error)}"
    print(fitted(f"evener: {words}", sys.stderr), file=unheard(sys.stderr), flush=True)


def _written(run_dir: str) -> str:
    if is_url(run_dir):
        return f"a report is not uploaded: write it here by evener report {run_dir} --out {REPORT}"
    from evener.files import replace_text
    from evener.tools.report.gather import report_of
    from evener.tools.report.page import page_of
    from evener.tools.report.schema import ReportFile

    path = Path(run_dir) / REPORT
    report = report_of(Path(run_dir))
    replace_text(path, page_of(ReportFile((report,))))
    return f"{report.verdict.words} The report is in {from_here(path)}"
