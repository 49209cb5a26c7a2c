"""``evener run``: runs a torchrun-style script, unchanged, on all local devices."""

from __future__ import annotations

import argparse

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser
from evener.core.config.process_range import one_number
from evener.errors import ConfigurationError

HELP = CommandHelp(
    "run",
    "run an unchanged torchrun script on all devices",
    "Run an unchanged torchrun-style script on all local devices, with Evener's reports of errors "
    "and hangs. Options of the command come before SCRIPT, the script's own behind it.",
    usage="[OPTIONS] SCRIPT [ARGS]",
    examples=(
        "evener run --processes 2 script.py --epochs 3",
        "evener run --observe -m package.module",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    options.add_config_options(parser, "processes", "device", "timeout_seconds")
    options.add_rendezvous_options(parser)
    parser.option(
        "output",
        "--observe",
        action="store_true",
        help="show at the end where each rank's time went in a step",
        full="show at the end where each rank's time went in a step of DDP training, and its collectives",
    )
    options.add_json_option(parser, "what --observe saw")
    parser.option("script", "-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")


def execute(arguments: argparse.Namespace) -> int:
    """Runs the script on all ranks."""
    config = options.config_of(arguments)
    if arguments.json is not None and not arguments.observe:
        raise ConfigurationError("--json writes what --observe saw: give --observe too")
    from evener.distributed.ddp_profiler.report import DdpObserver
    from evener.distributed.launch.script import run_script

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
