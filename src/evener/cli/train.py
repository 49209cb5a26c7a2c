"""``evener train``: the main job."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from evener.cli import options
from evener.config import RunConfig


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train", help="train a task on all devices", description="Train a task on all devices."
    )
    options.add_task_options(parser)
    options.add_config_options(parser)
    options.add_shares_option(parser)
    options.add_rendezvous_options(parser)
    parser.add_argument(
        "--json", type=options.path, metavar="PATH", help="also write the summary to this file"
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Trains and prints the summary."""
    config = options.config_of(arguments)
    options.find_modules_here()
    from evener.fitting import fit
    from evener.records import as_json, write_json
    from evener.report.terminal import summary_text

    if config.run_dir is None:
        config = config.replace(run_dir=_resumed(config))
    trained = fit(
        arguments.task,
        config,
        options=options.task_options_of(arguments),
        rendezvous=options.rendezvous_of(arguments),
        run_home=Path("runs"),
    )
    if trained.rank == 0:
        print(summary_text(trained.summary), flush=True)
        if arguments.json:
            write_json(arguments.json, as_json(trained.summary))
    return 0


def _resumed(config: RunConfig) -> Path | None:
    """The run directory that is gone on with; None for a checkpoint that lies by itself."""
    resume = config.resume
    return resume if resume is not None and (resume / "checkpoints").is_dir() else None
