"""``evener report``: says where a run's time went and what to do next, as a page and as data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from evener.cli.parsing import CommandHelp, Parser, path, place
from evener.errors import ConfigurationError

if TYPE_CHECKING:
    from evener.tools.report.schema import ReportFile

HELP = CommandHelp(
    "report",
    "say where a run's time went, what was wrong, and what to do next",
    "Read the directories of runs, also of one that goes on or was killed, and say for each where its time went, which "
    "rank others waited for and why, and which setting would help by how much. With --json also as data, with all "
    "that the verdict was made from.",
    usage="RUN [RUN ...] [OPTIONS]",
    examples=("evener report runs/first", "evener report runs/first --json report.json"),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    parser.files.append(
        parser.add_argument(
            "runs", type=place, metavar="RUN", nargs="+", help="a run directory, or a report.json of --json"
        )
    )
    parser.option("output", "--json", type=path, metavar="FILE", help="write the data; - for standard output")
    parser.option("output", "--overwrite", action="store_true", help="replace files that are there")
    parser.option(
        "output",
        "--plan",
        type=path,
        metavar="FILE",
        help="compare with what `evener plan --save FILE` has predicted",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prints the verdict of each run, and writes the files that are asked for."""
    from evener.core.text import printable
    from evener.tools.report.json_file import json_of

    _refuse_existing(arguments.overwrite, arguments.json)
    file = gathered(arguments.runs, arguments.plan)
    if arguments.json is not None and str(arguments.json) == "-":
        sys.stdout.write(json_of(file))
        sys.stdout.flush()
        return 0
    for run in file.runs:
        print(printable(f"{run.identity.name}: {run.verdict.words}"), flush=True)
    _write(arguments.json, json_of(file) if arguments.json else "")
    return 0


def gathered(runs: list[Path], plan: Path | None = None) -> ReportFile:
    """Returns the reports of run directories and of files that ``--json`` has written.

    Raises:
        ConfigurationError, DataError, StorageError: If one of them is neither, or is damaged.
    """
    from evener.tools.report.gather import report_of
    from evener.tools.report.json_file import read_report
    from evener.tools.report.schema import Report, ReportFile

    found = list[Report]()
    for run in runs:
        found += read_report(run).runs if run.is_file() else [report_of(run, plan)]
    return ReportFile(tuple(found))


def _refuse_existing(overwrite: bool, *files: Path | None) -> None:
    for file in files:
        if file is not None and file.exists() and not overwrite and str(file) != "-":
            raise ConfigurationError(f"{file} is there already: name another file, or give --overwrite")


def _write(file: Path | None, text: str) -> None:
    from evener.core.os_errors import storage_errors
    from evener.files import replace_text

    if file is not None:
        with storage_errors(f"the report cannot be written to {file}"):
            replace_text(file, text)
