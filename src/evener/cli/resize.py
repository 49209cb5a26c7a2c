"""``evener resize``: asks a run to go on with another number of ranks."""

from __future__ import annotations

import argparse

from evener.cli.parsing import CommandHelp, Parser, path

HELP = CommandHelp(
    "resize",
    "change the number of ranks of a run that goes on",
    "Ask a run that was started with --processes MIN:MAX on one machine to go on with N ranks. The number changes "
    "after its next step, and the training stays the same. For a run with --nnodes MIN:MAX, start evener on one more "
    "machine, or send SIGTERM to evener on the one that is to leave.",
    usage="RUN N [OPTIONS]",
    examples=("evener resize runs/first 3",),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    parser.files.append(parser.add_argument("run", type=path, metavar="RUN", help="the directory of the run"))
    parser.add_argument("ranks", type=int, metavar="N", help="the number of ranks")
    parser.option(
        "waiting",
        "--timeout-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="how long the run may take to its next step",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Asks, waits for the answer, and prints it."""
    from evener.core.text import printable
    from evener.training.reporting.resize import resize

    print(printable(resize(arguments.run, arguments.ranks, arguments.timeout_seconds)), flush=True)
    return 0
