"""``evener report``: says where a run's time went and what to do next, as a page and as data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from evener.cli.parsing import CommandHelp, Parser, path, place
from evener.errors import ConfigurationError, EvenerError

if TYPE_CHECKING:
    from evener.tools.report.schema import ReportFile

HELP = CommandHelp(
    "report",
    "say where a run's time went, what was wrong, and what to do next",
    "Read the directories of runs, also of one that goes on or was killed, and say for each where its time went, which "
    "rank others waited for and why, and which setting would help by how much. With --out as a page that opens "
    "offline, with --json as data; both have all that the verdict was made from.",
    usage="RUN [RUN ...] [OPTIONS]",
    examples=(
        "evener report runs/first --out report.html",
        "evener report runs/old runs/new --out both.html --json both.json",
        "evener report --watch runs/first",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    parser.files.append(
        parser.add_argument(
            "runs", type=place, metavar="RUN", nargs="+", help="a run directory, or a report.json of --json"
        )
    )
    parser.option("output", "--out", type=path, metavar="FILE", help="write the page, .html")
    parser.option("output", "--json", type=path, metavar="FILE", help="write the data; - for standard output")
    parser.option("output", "--overwrite", action="store_true", help="replace files that are there")
    parser.option(
        "output",
        "--plan",
        type=path,
        metavar="FILE",
        help="compare with what `evener plan --save FILE` has predicted",
    )
    parser.option(
        "watch",
        "--watch",
        action="store_true",
        help="serve the page on this machine until Ctrl-C; all of its users can read it",
        full="Serve the page at http://127.0.0.1:PORT/ until Ctrl-C, made anew while the run goes on, and the data at "
        "/report.json. There is no password: every user of this machine can read the report, and everyone to whom the "
        "port is forwarded.",
    )
    parser.option(
        "watch",
        "--port",
        type=_port,
        metavar="PORT",
        help="its port, 8780 if not given; 0 for any that is free",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Prints the verdict of each run, and writes the files that are asked for; or serves the page."""
    from evener.core.text import printable
    from evener.tools.report.json_file import json_of
    from evener.tools.report.page import page_of

    if arguments.watch or arguments.port is not None:
        return _watch(arguments)
    _refuse_existing(arguments.overwrite, arguments.out, arguments.json)
    file = gathered(arguments.runs, arguments.plan)
    _write(arguments.out, page_of(file) if arguments.out else "")
    if arguments.json is not None and str(arguments.json) == "-":
        sys.stdout.write(json_of(file))
        sys.stdout.flush()
        return 0
    for run in file.runs:
        print(printable(f"{run.identity.name}: {run.verdict.words}"), flush=True)
    _write(arguments.json, json_of(file) if arguments.json else "")
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    """Serves the page until Ctrl-C."""
    from evener.core.stdio import to_stderr
    from evener.core.text import printable
    from evener.tools.report.json_file import json_of
    from evener.tools.report.watch import PORT, WatchedReport, WatchServer

    if not arguments.watch:
        raise ConfigurationError("--port is the port of --watch: give that, too")
    if arguments.out or arguments.json:
        raise ConfigurationError("--watch serves the page and writes no file: leave out --out and --json")
    report = WatchedReport(lambda: gathered(arguments.runs, arguments.plan), json_of)
    try:
        report.texts()
    except EvenerError as error:
        if not all(run.exists() for run in arguments.runs):
            raise
        to_stderr(printable(f"evener: waiting for the run: {error}"))
    with WatchServer(report, PORT if arguments.port is None else arguments.port) as server:
        runs = ", ".join(map(str, arguments.runs))
        print(
            printable(
                f"the report of {runs} is at {server.url} until Ctrl-C; users of this machine can read it"
            )
        )
        sys.stdout.flush()
        server.serve_forever()
    return 0


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 0 to 65535")
    return int(text)


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
            replace_text(file, text, follow=True)
