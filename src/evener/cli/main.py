"""The command ``evener``: parse, call, print.

The libraries behind a command are imported when it is called, so that ``evener --help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from evener.cli import bench, devices, export, plan, run, train, verify
from evener.errors import EvenerError, RankError
from evener.streams import guarded, open_missing, unheard
from evener.system import words

COMMANDS = (train, run, verify, plan, devices, bench, export)


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
    open_missing()
    try:
        with guarded():
            parsed = parser().parse_args(arguments)
            status: int = parsed.execute(parsed)
    except SystemExit:
        raise
    except EvenerError as error:
        label = "" if isinstance(error, RankError) else f"{type(error).__name__}: "
        return _told(f"{label}{error}", error.exit_status)
    except KeyboardInterrupt:
        return _told("interrupted", 130)
    except OSError as error:
        return _told(words(error), 1) if error.errno else _told_of(error)
    except BaseException as error:
        return _told_of(error)
    return status


def _told_of(error: BaseException) -> int:
    """An exception of the user's own in a run of one process, as a rank tells of one."""
    from evener.runtime.failure import failure_of

    failure = failure_of(error, 0)
    return _told(str(failure.to_error()), failure.exit_status)


def _told(text: str, status: int) -> int:
    print(f"evener: {text}", file=unheard(sys.stderr), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
