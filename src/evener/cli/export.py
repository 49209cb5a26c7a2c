"""``evener export``: the weights of a run as a file that PyTorch loads without Evener."""

from __future__ import annotations

import argparse
from typing import Any

from evener.cli import options


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="write the weights of a run as safetensors",
        description="Write the weights of a run's latest checkpoint, or of the checkpoint that is named, as a file of "
        "safetensors by the names of the plain model.",
    )
    parser.add_argument(
        "run", type=options.path, metavar="RUN", help="a run directory, or one of its checkpoints"
    )
    parser.add_argument(
        "--to", type=options.path, metavar="FILE", help="the file (default: step-N.safetensors in RUN)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Writes the file and prints its name."""
    from evener.weights import export

    print(export(arguments.run, arguments.to, overwrite=arguments.overwrite), flush=True)
    return 0
