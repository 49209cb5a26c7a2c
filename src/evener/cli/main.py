"""The command ``evener``: parse, call, print.

The libraries behind a command are imported when it is called, so that ``evener --help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from evener.cli import bench, export, run, train, verify
from evener.errors import EvenerError, RankError

COMMANDS = (train, run, verify, bench, export)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="evener",
        description="Train one PyTorch model on all the devices there are, equal or not, as if they were one device.",
    )
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, 1 (the answer is no, or the run failed), 2 (wrong command line)."""
    parsed = parser().parse_args(arguments)
    try:
        status: int = parsed.execute(parsed)
    except EvenerError as error:
        label = "" if isinstance(error, RankError) else f"{type(error).__name__}: "
        print(f"evener: {label}{error}", file=sys.stderr, flush=True)
        return error.exit_status
    except KeyboardInterrupt:
        print("evener: interrupted", file=sys.stderr, flush=True)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
