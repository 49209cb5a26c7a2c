"""Writes and reads ``report.json``, the versioned file that other programs read, too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from evener.core.typed_json import value_of
from evener.errors import DataError
from evener.files import dumps, read_json
from evener.tools.report.schema import FORMAT, VERSION, Report, ReportFile


def json_of(file: ReportFile) -> str:
    """Returns the content of the file: strict JSON, the same bytes for the same report."""
    return dumps(dataclasses.asdict(file)) + "\n"


def read_report(path: Path) -> ReportFile:
    """Reads a file that `json_of` has made. Fields that are not known are ignored, as a later version may add some.

    Raises:
        DataError: If it is no such file, or one of another version.
    """
    try:
        found = read_json(path)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"it has no format {FORMAT!r}")
        if found.get("version") != VERSION:
            raise ValueError(
                f"it has version {found.get('version')!r} of the format, and version {VERSION} is known"
            )
        file: ReportFile = value_of(ReportFile, found)
        for at, run in enumerate(file.runs):
            _check_columns(run, at)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no report that can be read: {error}") from error
    return file


def _check_columns(run: Report, at: int) -> None:
    """Raises ValueError if a series has not as many numbers as there are columns."""
    columns = len(run.columns.first)
    spread = [run.merges.spread] if run.merges and run.merges.spread else []
    lengths = [len(run.columns.last)]
    lengths += [len(each) for one in (*run.series, *spread) for each in (one.minimum, one.mean, one.maximum)]
    if any(length != columns for length in lengths):
        raise ValueError(f"runs[{at}] has series of other lengths than its {columns} columns")
