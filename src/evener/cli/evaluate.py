"""``evener evaluate``: the task's loss and metrics with the weights of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser

if TYPE_CHECKING:
    from evener.training.inference import InferenceSetup

SETTINGS = (
    *("batch_size", "micro_batch", "processes", "device", "strategy", "strategy_option", "mesh", "devices"),
    *(
        "balance",
        "max_shares",
        "share_multiple_of",
        "dtype",
        "precision",
        "precision_of",
        "compile",
        "compile_mode",
    ),
    *("compile_backend", "compile_check", "workers", "on_bad_sample", "timeout_seconds"),
)
HELP = CommandHelp(
    "evaluate",
    "evaluate the model of a run, on all devices",
    "Evaluate the model of a run on all devices, each sample counted once: the task's loss and metrics with the "
    "weights of the run's latest checkpoint, or of the one that is named. Batch size and precision are the run's where "
    "nothing else is said.",
    usage="RUN [OPTIONS]",
    examples=(
        "evener evaluate runs/first",
        "evener evaluate runs/first --best --processes 2 --json metrics.json",
        "evener evaluate runs/first/checkpoints/step-00000120 --data mytask:test_set",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    add_run_options(parser)
    named = "train, evaluate or package.module:dataset (default: the task's)"
    parser.option("what", "--data", metavar="DATA", help=named)
    options.add_task_options(parser, positional=False)
    options.add_json_option(parser, "the result", "metrics")
    options.add_config_options(parser, *SETTINGS)
    options.add_rendezvous_options(parser)


def add_run_options(parser: Parser) -> None:
    """Adds the arguments that select a run's weights."""
    named = "a run directory, or one of its checkpoints"
    parser.file("run", "RUN", named)
    parser.option(
        "what", "--best", action="store_true", help="the best checkpoint, which --keep-best has kept"
    )


def applied_of(arguments: argparse.Namespace) -> InferenceSetup:
    """Returns the weights, task and settings that the command line selects."""
    options.find_modules_here()
    from evener.training.inference import InferenceSetup
    from evener.training.reporting.task_file import origin

    run: Path = arguments.run / "checkpoints" / "best" if arguments.best else arguments.run
    config = options.config_of(arguments, origin(arguments.run).settings)
    of_task = options.task_options_of(arguments)
    return InferenceSetup.from_run(run, arguments.task, config, of_task, arguments.trust)


def execute(arguments: argparse.Namespace) -> int:
    """Evaluates the model and prints the metrics."""
    applied = applied_of(arguments)
    import dataclasses

    from evener.core.text import printable
    from evener.files import write_json
    from evener.training.inference import evaluate_run

    found = evaluate_run(applied, arguments.data, options.rendezvous_of(arguments))
    if found.rank == 0:
        values = ", ".join(f"{name} {value:.4f}" for name, value in found.metrics.items())
        print(printable(f"epoch {found.epoch + 1}: {values}"), flush=True)
        if arguments.json is not None:
            write_json(arguments.json, dataclasses.asdict(found), follow=True)
    return 0
