"""The command ``evener``: parses the command line, runs a command, and prints errors.

A command imports its libraries when it runs, so that ``evener --help`` is fast.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from evener.cli import (
    bench,
    compare,
    completion,
    devices,
    evaluate,
    export,
    listing,
    plan,
    plot,
    predict,
    report,
    resize,
    run,
    sources,
    train,
    verify,
)
from evener.cli.names import check_names
from evener.cli.parsing import Parser
from evener.core.os_errors import os_error_message
from evener.core.stdio import guarded, open_missing, shorten_own_warnings, unheard
from evener.core.stop_signals import StopSignal, interrupting
from evener.core.text import printable
from evener.errors import EvenerError, InterruptedRunError, RankError

COMMANDS = (
    train,
    evaluate,
    predict,
    resize,
    run,
    verify,
    plan,
    plot,
    report,
    compare,
    devices,
    bench,
    export,
    listing,
    completion,
)


class Version(argparse.Action):
    """Prints Evener's version and exits. The version is looked up only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from evener.version import evener_version

        print(f"evener {evener_version()}", flush=True)
        parser.exit()


def parser(only: str | None = None) -> Parser:
    """Creates the parser of the whole command line.

    Args:
        only: The only command whose options are added, which saves time; None for all commands.
    """
    top = Parser(
        prog="evener",
        description="Train one PyTorch model on all the devices there are, equal or not, as if they were one device.",
        usage="%(prog)s COMMAND [OPTIONS]",
        epilog="evener COMMAND --help explains a command, evener COMMAND --help-full all of its options.",
    )
    top.add_argument("--version", nargs=0, action=Version, help="show the version of Evener, and end")
    commands = top.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, prog="evener"
    )
    for command in COMMANDS:
        of_command = top.command(commands, command.HELP)
        if only in (None, command.HELP.name):
            command.fill(of_command)
            of_command.set_defaults(execute=command.execute, parser=parser, own=of_command)
    return top


def _parse(given: Sequence[str], parsed: argparse.Namespace) -> None:
    """Parses the command line into ``parsed``, and adds the settings from files and environment variables."""
    named = next((word for word in given if not word.startswith("-")), "")
    parser(named).parse_args(given, parsed)
    parsed.given = tuple(given)
    sources.complete(parsed)


def _executed(parsed: argparse.Namespace) -> int:
    if getattr(parsed, "print_config", False):
        print(sources.as_toml(parsed), flush=True)
        return 0
    if getattr(parsed, "needs_task", False) and not parsed.task and not getattr(parsed, "replay", None):
        parsed.own.error("no task is named: give TASK, or `task` in --config; `evener list tasks` shows some")
    check_names(parsed)
    status: int = parsed.execute(parsed)
    return status


def main(arguments: Sequence[str] | None = None, parsed: argparse.Namespace | None = None) -> int:
    """Runs the command, and returns its exit status.

    The status is 0; 1 if the command's answer is no, or the run failed; 2 for wrong settings; or 128 plus the number of
    a signal.

    Args:
        arguments: The arguments of the command line; None for those of the process.
        parsed: The namespace that receives the parsed arguments.

    Raises:
        SystemExit: If the command line is wrong, or after printing help or the version.
    """
    open_missing()
    parsed = argparse.Namespace() if parsed is None else parsed
    try:
        with guarded(), interrupting():
            _parse(sys.argv[1:] if arguments is None else arguments, parsed)
            status = _executed(parsed)
    except SystemExit:
        raise
    except EvenerError as error:
        plain = isinstance(error, RankError | InterruptedRunError)
        label = "" if plain else f"{type(error).__name__}: "
        return _failed("\n".join([f"{label}{error}", *getattr(error, "__notes__", ())]), error.exit_status)
    except StopSignal as stop:
        return _failed(str(stop), 128 + stop.number)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except OSError as error:
        return _failed(os_error_message(error), 1) if error.errno else _failed_with(error)
    except BaseException as error:
        return _failed_with(error)
    return status


def _failed_with(error: BaseException) -> int:
    """Prints an exception of user code in a run of one process in the same form as a rank's exception."""
    from evener.distributed.failure import failure_of

    failure = failure_of(error, 0)
    return _failed(str(failure.to_error()), failure.exit_status)


def _failed(text: str, status: int) -> int:
    print(f"evener: {printable(text)}", file=unheard(sys.stderr), flush=True)
    return status


def command() -> None:
    """Runs the command and ends the process, even if a thread of user code would keep it alive."""
    parsed = argparse.Namespace()
    shorten_own_warnings()
    try:
        status = main(parsed=parsed)
    finally:
        if "torch" in sys.modules:  # otherwise no user code has run
            from evener.distributed.launch.exit_watch import leaving

            leaving(_limit_seconds(parsed))
    sys.exit(status)


def _limit_seconds(parsed: argparse.Namespace) -> float:
    """Returns the time limit for the process to end, in seconds: ``--timeout-seconds`` if it is valid, else the
    default.
    """
    from evener.core.config.time_limit import TIMEOUT_SECONDS

    given = getattr(parsed, "timeout_seconds", None)
    return given if given is not None and math.isfinite(given) and given > 0 else TIMEOUT_SECONDS


if __name__ == "__main__":
    command()
