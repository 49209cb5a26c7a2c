"""``evener export``: the weights of a run as a file that PyTorch loads without Evener."""

from __future__ import annotations

import argparse

from evener.cli.parsing import CommandHelp, Parser, path

HELP = CommandHelp(
    "export",
    "write the weights of a run as safetensors",
    "Write the weights of a run's latest checkpoint, or of the checkpoint that is named, as a file of "
    "safetensors by the names of the plain model.",
    usage="RUN [OPTIONS]",
    examples=(
        "evener export runs/first",
        "evener export runs/first/checkpoints/best --to weights.safetensors",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    parser.file("run", "RUN", "a run directory, or one of its checkpoints")
    parser.option(
        "output",
        "--to",
        type=path,
        metavar="FILE",
        help="the file (default: step-N.safetensors in RUN)",
        full="the file (default: step-N.safetensors in RUN, or in the working directory if RUN is a URL)",
    )
    parser.option(
        "output", "--average", action="store_true", help="the average of the weights, which the task keeps"
    )
    parser.option("output", "--overwrite", action="store_true", help="replace a file that is there")


def execute(arguments: argparse.Namespace) -> int:
    """Writes the file and prints its name."""
    from evener.checkpoint.weights_file import export
    from evener.core.text import printable

    written = export(arguments.run, arguments.to, overwrite=arguments.overwrite, average=arguments.average)
    print(printable(str(written)), flush=True)
    return 0
