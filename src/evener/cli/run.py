"""``evener run``: any torchrun-style script, unchanged, on all local devices."""

from __future__ import annotations

import argparse
from typing import Any

from evener.cli import options
from evener.errors import ConfigurationError
from evener.ranges import one_number


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="run an unchanged torchrun script on all devices",
        description="Run an unchanged torchrun-style script on all local devices, with Evener's reports of errors "
        "and hangs. Options of the command come before SCRIPT, the script's own behind it.",
    )
    options.add_config_options(parser, "processes", "device", "timeout_seconds")
    options.add_rendezvous_options(parser)
    parser.add_argument(
        "--observe",
        action="store_true",
        help="show at the end where each rank's time went in a step of DDP training, and its collectives",
    )
    parser.add_argument(
        "--json", type=options.path, metavar="PATH", help="also write what --observe saw to this file"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Runs the script on all ranks."""
    config = options.config_of(arguments)
    if arguments.json is not None and not arguments.observe:
        raise ConfigurationError("--json writes what --observe saw: give --observe too")
    from evener.runtime.observing import DdpObserver
    from evener.runtime.script import run_script

    run_script(
        arguments.script,
        arguments.arguments,
        is_module=arguments.module,
        processes=one_number(config.processes),
        device=config.device,
        timeout_seconds=config.timeout_seconds,
        rendezvous=options.rendezvous_of(arguments),
        observer=DdpObserver(arguments.json) if arguments.observe else None,
    )
    return 0
