"""Runs benchmarks one after the other and keeps their records: ``make bench``.

    python -m benchmarks [--only NAME,NAME] [--to DIRECTORY] [-- ARGUMENTS]
    python -m benchmarks --pages

Which there are, with which arguments, is in ``catalogue.toml``. Tables of a record are replaced when all runs of its
benchmark have ended well; then RESULTS.md is written. The status is 1 if a benchmark failed, 2 if a name is wrong.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.page import Entry, catalogue, write_pages
from benchmarks.results import DIRECTORY, PLACE, merge, read_records

END_SECONDS = 10.0
"""How long a benchmark that is ended has for it."""


def run(entry: Entry, directory: Path) -> str:
    """Measures a benchmark and replaces its tables in the record.

    Returns:
        Why it failed and its record is as before; empty if it did not.
    """
    limit = 5 * entry.seconds + 300
    with tempfile.TemporaryDirectory() as made:
        for command in entry.commands:
            print(f"\n== {shlex.join(command)}", flush=True)
            try:
                status = status_of([sys.executable, *command[1:]], {**os.environ, PLACE: made}, limit)
            except subprocess.TimeoutExpired:
                return f"it did not end within {limit} s, and was ended"
            if status:
                return f"status {status}" if status > 0 else signal.Signals(-status).name
        tables = read_records(Path(made)).get(entry.name)
    if not tables:
        return "it recorded nothing"
    try:
        merge(directory, entry.name, tables)
    except ValueError as error:  # the record that is there is none
        return str(error)
    return ""


def status_of(command: Sequence[str], environment: dict[str, str], seconds: float) -> int:
    """Runs a program in a group of processes of its own, of which none is left afterwards, whatever happens.

    Raises:
        subprocess.TimeoutExpired: If it takes longer.
    """
    program = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
    try:
        return program.wait(seconds)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(program.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    program.wait(END_SECONDS)


def run_all(entries: Sequence[Entry], directory: Path) -> int:
    """Runs them all, and says at the end which failed."""
    failed: dict[str, str] = {}
    minutes = sum(entry.seconds for entry in entries) / 60
    print(
        f"{', '.join(entry.name for entry in entries)}: about {minutes:.0f} minutes on two cores", flush=True
    )
    for entry in entries:
        began = time.monotonic()
        if why := run(entry, directory):
            failed[entry.name] = f"{entry.name} failed, and its record is as before: {why}"
        else:
            try:
                write_pages(directory)
            except KeyError as error:
                failed["pages"] = f"docs/benchmarks.md was not written: {error.args[0]}"
        print(f"== {entry.name}: {why or 'recorded'}, {time.monotonic() - began:.0f} s", flush=True)
    print(*failed.values(), sep="\n", end="\n" if failed else "", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--only", metavar="NAME,NAME", help="these; by default all that need no more than two cores"
    )
    parser.add_argument(
        "arguments", nargs="*", help="of the one benchmark that --only names, in place of its usual ones"
    )
    parser.add_argument("--to", type=Path, metavar="DIRECTORY", help="leave Evener's own records as they are")
    parser.add_argument("--pages", action="store_true", help="only write the pages again, of the records")
    given = parser.parse_args(arguments)
    directory = given.to / "results" if given.to else DIRECTORY
    if given.pages:
        write_pages(directory)
        return 0
    known = catalogue()
    names = [name.strip() for name in (given.only or "").split(",") if name.strip()]
    if wrong := [name for name in names if name not in known]:
        print(f"there is no benchmark {', '.join(wrong)}. There are: {', '.join(known)}", file=sys.stderr)
        return 2
    entries = [known[name] for name in names] or [entry for entry in known.values() if not entry.needs]
    if given.arguments:
        if len(names) != 1:
            parser.error("arguments are those of one benchmark: name it with --only")
        entries = [replace(entries[0], runs=(shlex.join(given.arguments),))]
    try:
        return run_all(entries, directory)
    except KeyboardInterrupt:
        print("\ninterrupted; the benchmarks that had ended are recorded", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what runs is ended
    sys.exit(main())
