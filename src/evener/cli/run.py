"""``evener run``: runs a torchrun-style script, unchanged, on all local devices."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser, path
from evener.core.config.process_range import one_number
from evener.core.config.run_config import RunConfig
from evener.errors import ConfigurationError

if TYPE_CHECKING:
    from evener.distributed.launch.rendezvous import Rendezvous
    from evener.distributed.launch.script import ScriptHook

HELP = CommandHelp(
    "run",
    "run an unchanged torchrun script on all devices",
    "Run an unchanged torchrun-style script on all local devices, with Evener's reports of errors "
    "and hangs. Options of the command come before SCRIPT, the script's own behind it.",
    usage="[OPTIONS] SCRIPT [ARGS]",
    examples=(
        "evener run --processes 2 script.py --epochs 3",
        "evener run --observe -m package.module",
        "evener run --observe --run-dir runs/script script.py",
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
    parser.option(
        "output",
        "--run-dir",
        type=path,
        metavar="DIR",
        help="with --observe: the records of each step, for evener report",
        full="with --observe: write what was observed of each step into this directory, as evener train does, for "
        "evener report",
    )
    parser.option(
        "output", "--overwrite", action="store_true", help="replace a finished run that is in --run-dir"
    )
    parser.option(
        "output",
        "--metrics-file",
        type=path,
        metavar="FILE",
        help="with --observe: live figures for Prometheus, in a *.prom file",
    )
    options.add_report_option(parser, "with --run-dir: write report.html there at the end")
    options.add_json_option(parser, "what --observe saw", "ranks")
    parser.option("script", "-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")


def execute(arguments: argparse.Namespace) -> int:
    """Runs the script on all ranks."""
    config = options.config_of(arguments)
    from evener.distributed.launch.script import run_script

    rendezvous = options.rendezvous_of(arguments)
    observer = _observer(arguments, config, rendezvous)
    try:
        run_script(
            arguments.script,
            arguments.arguments,
            is_module=arguments.module,
            processes=one_number(config.processes),
            device=config.device,
            timeout_seconds=config.timeout_seconds,
            rendezvous=rendezvous,
            observer=observer,
        )
    except ConfigurationError:  # such as a directory that holds another run
        raise
    except BaseException:
        _report(arguments, config)
        raise
    _report(arguments, config)
    return 0


def _report(arguments: argparse.Namespace, config: RunConfig) -> None:
    if arguments.report and config.run_dir is not None:
        from evener.cli.report_at_end import write_report

        write_report(str(config.run_dir.absolute()))


def _observer(
    arguments: argparse.Namespace, config: RunConfig, rendezvous: Rendezvous | None
) -> ScriptHook | None:
    """Returns what observes the ranks; None if nothing does.

    Raises:
        ConfigurationError: If an option would do nothing, or asks for more than is seen from here.
    """
    if not arguments.observe:
        said = options.said(arguments, "run_dir", "overwrite", "metrics_file", "report", "json")
        unused = [option for option, value in said.items() if value]
        if unused:
            raise ConfigurationError(f"{unused[0]} goes with what --observe saw: give --observe too")
        return None
    if arguments.report and config.run_dir is None:
        raise ConfigurationError("--report writes into the run directory: give --run-dir too")
    from evener.distributed.ddp_profiler.report import DdpObserver
    from evener.distributed.launch.launch import is_launched
    from evener.training.script_run import ScriptRun

    if config.run_dir is None and config.metrics_file is None:
        return DdpObserver(arguments.json)
    if is_launched() or (rendezvous is not None and rendezvous.nodes[1] != 1):
        raise ConfigurationError(
            f"{'--metrics-file' if config.run_dir is None else '--run-dir'} puts together what the ranks of one "
            "machine write: start them here, without torchrun, or leave it out for the table alone"
        )
    run_dir, metrics_file = (place and place.absolute() for place in (config.run_dir, config.metrics_file))
    settings = {
        "task": Path(arguments.script).name,
        "observed": True,
        "command": shlex.join(command_again(arguments, config)),
        "script": arguments.script,
        "arguments": arguments.arguments,
        "processes": config.processes,
        "device": config.device,
    }
    return ScriptRun(run_dir, settings, config.overwrite, metrics_file, arguments.json)


def command_again(arguments: argparse.Namespace, config: RunConfig) -> list[str]:
    """Returns the command line that runs the script again."""
    given = {"--processes": config.processes, "--device": config.device}
    options = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    module = ["-m"] if arguments.module else []
    return ["evener", "run", *options, *module, arguments.script, *arguments.arguments]
